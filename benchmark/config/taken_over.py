"""Arguments that a class takes over from the class whose place it takes, unseen by who names the former alone."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pydoc import locate
from typing import Any

from benchmark.config.given_files import files_and_options
from benchmark.config.given_options import BEFORE, RUNNER_OPTIONS, given_options


def taken_over(arguments: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """Say in a line for each which arguments a class has from the one that stood in its place before.

    What is the class's default anyway is left out.

    Args:
        arguments: of ``lightning-cli fit``, which were read without an error.
        config: the configuration that they make, as plain values.
    """
    files, options = files_and_options(arguments)
    own = [f"{name}={value}" for name, value in options if name not in RUNNER_OPTIONS]
    return list(_lines(given_options(files, own), config, ""))


def _lines(given: Any, made: Any, place: str) -> Iterator[str]:
    if not isinstance(given, Mapping) or not isinstance(made, Mapping):
        return
    arguments = made.get("init_args", {}) if "class_path" in made else made
    before, name = given.get(BEFORE), made.get("class_path")
    if isinstance(before, Mapping) and isinstance(name, str) and isinstance(arguments, Mapping):
        usual = _defaults(name)
        for argument, value in _earlier(before).items():
            same = argument in arguments and argument not in given and arguments[argument] == value
            if same and usual.get(argument, inspect.Parameter.empty) != value:
                option = f"{place}.init_args.{argument}"
                earlier, now = (path.rpartition(".")[2] for path in (str(before.get("class_path", "?")), name))
                yield f"{place}: {now} takes over {argument}={value} from {earlier}; --{option} gives another value"
    inside = f"{place}.init_args." if "class_path" in made else f"{place}." if place else ""
    for key, entry in given.items():
        if key != BEFORE and isinstance(arguments, Mapping):
            yield from _lines(entry, arguments.get(key), inside + key)


def _earlier(before: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the classes before, those of the last one first to count, without mappings."""
    further = before.get(BEFORE)
    found = _earlier(further) if isinstance(further, Mapping) else {}
    own = {k: v for k, v in before.items() if k not in (BEFORE, "class_path") and not isinstance(v, Mapping)}
    return found | own


def _defaults(class_path: str) -> dict[str, Any]:
    """The defaults of a class's arguments; none of a class that cannot be found."""
    kind = locate(class_path)
    parameters = inspect.signature(kind).parameters if inspect.isclass(kind) else {}
    return {name: parameter.default for name, parameter in parameters.items()}
