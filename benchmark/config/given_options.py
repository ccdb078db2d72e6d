"""The options of a run, from its files and its command line, in one canonical mapping.

Files are read as ``lightning-cli`` reads them, and later values win. These spellings give the same mapping::

    --model.training.lr=5e-4   --model.init_args.training={lr: 0.0005}   model: {init_args: {training: {lr: 5e-4}}}
    --data.partition=a.B       --data.partition.class_path=a.B           data: {partition: a.B}
    --data=configs/sources/x.yaml                                        data: {...}, what that file holds

Nothing is imported and no default is filled in. Where the result of ``lightning-cli`` depends on the earlier value,
that value is kept beside the new one as ``(before)``. A class that replaces another one, or a default, takes over those
of its arguments that both have; a list may be appended to, or its entries changed.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark.config.files import inlined, read_content, read_layers
from benchmark.config.yaml_files import parse_yaml
from benchmark.errors import ConfigurationError
from benchmark.shipped import shipped

#: Options that the runner of a cell sets itself.
RUNNER_OPTIONS = ("--config", "--run_dir", "--seed_everything", "--ckpt_path")

#: Options that have no default: a class without arguments leaves nothing to the one that takes its place.
REQUIRED = ("model", "data.source", "data.partition")

BEFORE, NOW, APPENDED = "(before)", "(now)", "(appended)"

#: Numbers that the command line reads and PyYAML leaves as text.
EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def given_options(configs: Sequence[str], overrides: Sequence[str]) -> dict[str, Any]:
    """Merge what files and command line arguments give a run.

    Args:
        configs: files, later ones win.
        overrides: command line arguments ``--option=value``, later ones win, over all files; ``{data_dir}`` stays.

    Raises:
        ConfigurationError: a file cannot be read or holds no configuration, or an override is refused by
            :func:`check_override`.
    """
    options: Any = {}
    for layer in read_layers([Path(entry) for entry in configs]):
        options = _after(options, layer.options)
    for entry in overrides:
        check_override(entry)
        option, _, text = entry.removeprefix("--").partition("=")
        options = _after(options, {option: _value(text)})
    return dict(_settled(options))


def check_override(entry: str, where: str = "") -> None:
    """Refuse a command line argument that a cell cannot have.

    Raises:
        ConfigurationError: it is not ``--option=value``, or the runner sets the option.
    """
    option, equals, _ = entry.partition("=")
    if not option.startswith("--") or not equals or option in RUNNER_OPTIONS:
        raise ConfigurationError(
            f"{where}the override {entry!r} is not of the form --key=value, or sets what the runner sets itself "
            f"({', '.join(RUNNER_OPTIONS)})"
        )


def _value(text: str) -> Any:
    """Return the value of a text on the command line; the text itself if it could be read in more than one way."""
    text = text.replace("{data_dir}", "<data_dir>")  # which YAML would read as a mapping
    if text.endswith((".yaml", ".yml")) and shipped(text).is_file():
        return read_content(shipped(text))
    try:
        if text.startswith(("{", "[", "'")):
            return inlined(parse_yaml(text, text), Path())
        return json.loads(text, parse_constant=str)
    except (ConfigurationError, ValueError):
        return text


def _after(before: Any, given: Any) -> Any:
    """The value of an option that had the value ``before`` (``...`` for none) and is given another one."""
    if isinstance(given, dict):
        result = _start(before, given.get("class_path"))
        for key, value in given.items():
            if key != "class_path":
                _put(result, str(key), value)
        return result
    if isinstance(given, list):
        entries = [_after(..., entry) for entry in given]
        return {BEFORE: before, NOW: entries} if _has_mappings(before) else entries
    if isinstance(given, str) and EXPONENT.fullmatch(given):
        return float(given)
    if isinstance(given, str) and (_has_mappings(before) or _changes_class(before, given)):
        return _start(before, given)
    return given


def _start(before: Any, class_path: Any) -> dict[str, Any]:
    """A mapping, of the arguments of a class for example, that goes on from what was there before."""
    if isinstance(before, str):
        before = {"class_path": before}
    named = {} if class_path is None else {"class_path": class_path}
    if before is ... or before == {}:
        return named
    if isinstance(before, dict) and class_path in (None, before.get("class_path")):
        return dict(before)
    return {BEFORE: before} | named


def _put(options: dict[str, Any], key: str, given: Any) -> None:
    """Give an option by its dotted name, in which the ``init_args`` of a class can stand or be left out."""
    name, dot, inner = key.partition(".")
    value = {inner: given} if dot else given
    if name == "init_args" and isinstance(value, dict):
        for argument, entry in value.items():
            _put(options, str(argument), entry)
    elif name.endswith("+"):
        name = name.removesuffix("+")
        options[name] = {BEFORE: options.get(name), APPENDED: _after(..., value)}
    else:
        options[name] = _after(options.get(name, ...), value)


def _has_mappings(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_has_mappings, value)))


def _changes_class(before: Any, given: str) -> bool:
    """Return whether a class replaces another one, or replaces null, where the default may be a class."""
    return _is_class(given) and (before is None or _is_class(before))


def _is_class(value: Any) -> bool:
    """Return whether a value looks like the name of a class."""
    parts = value.split(".") if isinstance(value, str) else [""]
    return all(map(str.isidentifier, parts)) and parts[-1][0].isupper()


def _settled(value: Any, place: str = "") -> Any:
    """The value without what has no effect: of an earlier class, arguments that the present one is given itself."""
    if isinstance(value, list):
        return [_settled(entry) for entry in value]
    if not isinstance(value, dict):
        return value
    settled = {key: _settled(entry, f"{place}.{key}" if place else key) for key, entry in value.items()}
    before = settled.get(BEFORE)
    if "class_path" in settled and isinstance(before, dict | str):
        earlier = {"class_path": before} if isinstance(before, str) else before
        left = {k: v for k, v in earlier.items() if k == "class_path" or not _replaced(v, settled.get(k))}
        settled[BEFORE] = left["class_path"] if set(left) == {"class_path"} else left
        if isinstance(settled[BEFORE], str) and place in REQUIRED:
            del settled[BEFORE]
    return settled["class_path"] if set(settled) == {"class_path"} else settled


def _replaced(before: Any, given: Any) -> bool:
    """Return whether a new value replaces the old one whole, so that nothing of it remains."""
    return given is not None and not any(_has_mappings(value) or _is_class(value) for value in (before, given))
