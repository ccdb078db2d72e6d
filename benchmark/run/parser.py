"""What ``lightning-cli`` reads, options and configuration files, and how it answers those that are wrong."""

import enum
import os
import re
from argparse import Action, ArgumentError
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import reduce
from operator import or_
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin

import yaml
from jsonargparse import DefaultHelpFormatter, Namespace, get_loader, set_loader
from lightning.pytorch.cli import LightningArgumentParser

from benchmark.config_files import read_layers
from benchmark.engine.settings import RANKS_CLASSES
from benchmark.errors import ConfigurationError, causes
from benchmark.ranges import expected
from benchmark.run.choices import (
    CHOICES,
    LINKED,
    LINKED_OPTIONS,
    NOT_GIVEN,
    is_base,
    no_such_class,
)
from benchmark.shipped import configuration, no_such_configuration
from benchmark.yaml_files import check_yaml, read_mapping

#: Options of earlier versions, which the configurations of their runs hold as null.
RETIRED = ("optimizer", "lr_scheduler", "weights_only")

REQUIRED = "the following arguments are required: "
#: what jsonargparse says of a class_path that is a number, and of init_args that are a list
NO_CLASS = ("is not iterable", "Not a valid subclass", "has no attribute 'keys'")


def whole_numbers_first(hint: Any) -> Any:
    """Have a type that takes whole numbers and others try the former first, so that a 1 stays a whole number.

    ``typing`` keeps one ``Optional[Union[int, float]]`` for both orders, that which somebody in the process asked for
    first: which number is meant would depend on what was imported before.
    """
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    if not {int, float} <= {*parts}:
        return hint
    return reduce(or_, [int, *(part for part in parts if part is not int)])


class HelpInWords(DefaultHelpFormatter):
    """Says of an option which values it takes, in the words of the errors."""

    def _get_type_str(self, action: Action) -> str | None:
        return expected(getattr(action, "_typehint", action.type)) or super()._get_type_str(action)


class FederatedParser(LightningArgumentParser):
    """Reports what was wrong with an option in one line, by its whole name and with what would be right."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)  # an option has one name; a new one may begin alike
        kwargs.setdefault("formatter_class", HelpInWords)
        super().__init__(*args, **kwargs)

    def add_class_arguments(
        self, theclass: Any, nested_key: str | None = None, *more: Any, **settings: Any
    ) -> list[str]:
        """Add a constructor's arguments; the help of a method leaves out what it takes from the data."""
        if nested_key == "model":
            settings["skip"] = {*(settings.get("skip") or ()), *LINKED}
        added: list[str] = super().add_class_arguments(theclass, nested_key, *more, **settings)
        return added

    def _add_signature_parameter(self, container: Any, nested_key: str | None, param: Any, *more: Any, **s: Any) -> Any:
        """Add one argument of a constructor, of a type that means the same in every process."""
        param = replace(param, annotation=whole_numbers_first(param.annotation))
        return super()._add_signature_parameter(container, nested_key, param, *more, **s)

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Read a configuration file that :func:`check_file` found to be one."""
        check_file(Path(path))
        return super().parse_path(path, *args, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise what the command line prints.

        Raises:
            ConfigurationError: from the parser of a command.
            _RefusedError: from the parser of one class's arguments; the parser around it knows where that class stands.
        """
        refused = self._refused(message, ex)
        if not self.exit_on_error:
            raise refused from ex
        raise ConfigurationError(str(refused)) from ex

    def _known(self) -> list[str]:
        """The options of a run, or of a class."""
        others = ("help", "print_config", "print_shtab", *RETIRED)
        return [action.dest for action in self._actions if action.dest not in others]

    def _refused(self, message: str, ex: BaseException | None) -> "_RefusedError":
        unknown = re.match(r"Option '([\w.]+)' is not accepted|unrecognized arguments: --([\w.]+)", message)
        if unknown:  # of the whole command line, or of the class whose arguments this parser reads
            return _RefusedError([unknown[1] or unknown[2]], known=self._known())
        foreign = re.match(r"Subcommand '(\w+)' does not accept option '([\w.]+)'", message)
        commands: Any = next((action.choices for action in self._actions if action.dest == "subcommand"), None)
        if foreign and commands:
            return _RefusedError([foreign[2]], known=commands[foreign[1]]._known())
        if message.startswith(REQUIRED):
            return _RefusedError(message.removeprefix(REQUIRED).split(", "), NOT_GIVEN)
        found = re.match(r'Parser key "([\w.]+)"|--([\w.]+)\.help: ', message)
        key = (found[1] or found[2]) if found else ""
        if key in RETIRED:
            return _RefusedError([key], known=self._known())
        name = re.search(r"Problem with given class_path '(.+?)'|Expected a dot import path string: (\S+)", message)
        hint = next((getattr(action, "_typehint", None) for action in self._actions if action.dest == key), None)
        if name and key in CHOICES and (name[2] or is_base(name[1])):
            return _RefusedError([key], no_such_class(name[1] or name[2], CHOICES[key]))
        for cause in causes(ex):
            if isinstance(cause, _RefusedError):
                return cause.below(key) if key else cause
            if isinstance(cause, ModuleNotFoundError):
                return _RefusedError([key], f"{cause}; put the folder of your module on PYTHONPATH")
        if any(said in message for said in NO_CLASS):
            return _RefusedError([key], "expected the name of a class, or its class_path with a mapping of init_args")
        if name and (name[2] or "has no attribute" in message):
            return _RefusedError([key], no_such_class(name[1] or name[2], CHOICES.get(key, hint)))
        value = re.search(r"G(?:iven|ot) value: ((?!NestedArg|Namespace|[{\[]).{1,80})$", message, re.MULTILINE)
        takes = expected(hint)
        if takes:
            given = "" if not value else ", got null" if value[1] == "None" else f", got {value[1]}"
            return _RefusedError([key], f"expected {takes}{given}")
        lines = (line.strip(" -") for line in re.sub(r'Parser key "[\w.]+":?|^--[\w.]+: ', "", message).splitlines())
        noise = (
            "Given value",
            "Expected a path but",
            "Expected a <class 'NoneType'>",
            "Does not validate",
            "Subtypes:",
            "Errors:",
        )
        said = "; ".join(line for line in lines if line and not line.startswith(noise))
        return _RefusedError([key] if key else [], said + (f"; got {value[1]}" if value else ""))


class _RefusedError(ArgumentError):
    """Options that a parser refuses, by the names that they have in it.

    Args:
        options: what is refused; empty where it is no single option.
        reason: what is wrong with them.
        known: the options that there are, where one is refused since there is no such option.
    """

    def __init__(self, options: Sequence[str], reason: str = "", known: Sequence[str] | None = None) -> None:
        super().__init__(None, reason)
        self.options = options
        self.reason = reason
        self.known = known

    def below(self, place: str) -> "_RefusedError":
        """The same from the parser that holds the class at ``place``."""
        known = None if self.known is None else [f"{place}.init_args.{name}" for name in self.known]
        known = None if known is None else [name for name in known if name not in LINKED_OPTIONS]
        return _RefusedError([f"{place}.init_args.{name}" for name in self.options] or [place], self.reason, known)

    def __str__(self) -> str:
        """What the command line prints."""
        if self.known is None:
            return f"{', '.join(self.options)}{': ' if self.options else ''}{self.reason}"
        option = _first_unknown(self.options[0], self.known)
        return f"there is no option {option!r}; {_instead(option, self.known)}"


def _first_unknown(given: str, known: Sequence[str]) -> str:
    """The argument that takes no class here, where an option is one of that class's; else the option itself."""
    parts = given.split(".init_args.")
    for end in range(1, len(parts)):
        above = ".init_args.".join(parts[:end])
        if known and not any(name.startswith(above) for name in known):
            return above
    return given


def _instead(given: str, known: Sequence[str]) -> str:
    """What to write in place of an option that does not exist: those like it, else all that stand there."""
    place, found, name = given.rpartition("init_args.")
    if found and not any(option.startswith(place + found) for option in known):  # it takes no class
        there = {place + option.removeprefix(place).partition(".")[0] for option in known if option.startswith(place)}
        if there:
            return f"{place.removesuffix('.')} has no init_args, but {', '.join(sorted(there))}"
    here = {option.removeprefix(place + found): option for option in known}
    last = name.rpartition(".")[2]
    like = [short for short in here if short.rpartition(".")[2] == last] or get_close_matches(name, here, cutoff=0.8)
    if like:
        return f"did you mean {' or '.join(here[short] for short in like[:5])}?"
    options = sorted({place + found + short.partition(".")[0] for short in here})
    return f"expected one of {', '.join(options)}" if options else f"{place.removesuffix('.')} takes no options"


# ------------------------------------------------------------------------------------------------- configuration files


def with_strategy(arguments: Sequence[str]) -> list[str]:
    """A command line that names the strategy of which it gives a setting, such as ``--trainer.strategy.timeout``."""
    places = [at for at, argument in enumerate(arguments) if argument.startswith("--trainer.strategy")]
    if not places or not arguments[places[0]].startswith("--trainer.strategy."):
        return [*arguments]
    return [*arguments[: places[0]], f"--trainer.strategy={RANKS_CLASSES[0]}", *arguments[places[0] :]]


def with_files_read(arguments: Sequence[str]) -> list[str]:
    """A command line with what its configuration files give together in place of those that take others to be whole.

    Raises:
        ConfigurationError: a file that it names is no configuration, or only part of one.
    """
    kept: list[str | int] = []  # a number where a configuration file stands
    paths: list[Path] = []
    given = iter(with_strategy(arguments))
    for argument in given:
        name, equals, value = argument.partition("=")
        if name not in ("-c", "--config", "--data", "--trainer"):
            kept.append(argument)
            continue
        value = value if equals else next(given, "")
        group = name.removeprefix("--") if name in ("--data", "--trainer") else ""
        path = configuration(value)
        if any(sign in value for sign in ("{", "\n", ": ")):  # a text in place of a file
            kept += [argument] if equals else [argument, value]
        elif path is None and not os.path.exists(value) and not value.endswith((".yaml", ".yml")):
            raise ConfigurationError(no_such_configuration(value))
        elif group:
            check_file(path or Path(value), group)
            kept.append(f"{name}={path}")
        else:
            kept.append(len(paths))
            paths.append(path or Path(value))
    layers: dict[int, list[str]] = {at: [] for at in range(len(paths))}
    found = read_layers(paths)
    bare = next((layer for layer in found if "model" in layer.given), None)
    if bare and not bare.names_class:
        before = [entry.partition("=")[0] for entry in kept[: kept.index(bare.at)] if isinstance(entry, str)]
        if not {"--model", "--model.class_path", "--config", "-c"} & set(before):  # a text in place of a file may, too
            raise ConfigurationError(
                f"{bare.path} gives settings of a method, and no file says which; "
                "add --config configs/methods/<name>.yaml, or give --model before it"
            )
    for layer in found:
        _check_entries(layer.composed, "", layer.path, ())
        text = str(layer.path) if layer.composed is None else yaml.safe_dump(layer.composed)
        layers[layer.at].append(f"--config={text}")
    return [part for entry in kept for part in (layers[entry] if isinstance(entry, int) else [entry])]


def check_file(path: Path, place: str = "", inside: tuple[Path, ...] = ()) -> None:
    """Refuse a file that is no configuration, by its name, and so the files that it names.

    Args:
        path: of a YAML file.
        place: the option whose value it holds, such as ``data``; empty for a whole configuration.
        inside: the files that name this one.

    Raises:
        ConfigurationError: it cannot be read as a mapping (see :func:`read_mapping`), contains itself, or gives what is
            no name as the name of a class.
    """
    if path.resolve() in inside:
        raise ConfigurationError(f"{path} contains itself")
    _check_entries(read_mapping(path), place, path, (*inside, path.resolve()))


def _check_entries(value: Any, place: str, path: Path, inside: tuple[Path, ...]) -> None:
    if isinstance(value, list):
        for entry in value:
            _check_entries(entry, place, path, inside)
    if isinstance(value, str) and _is_file(value, place, path):
        check_file(path.parent / value, place, inside)
    if not isinstance(value, dict):
        return
    for key, entry in value.items():
        option = f"{place}.{key}" if place else str(key)
        if key == "class_path" and not isinstance(entry, str):
            raise ConfigurationError(f"{path}: {option}: expected the name of a class, got {str(entry)[:80]}")
        if option == "data.seed":
            raise ConfigurationError(f"{path}: data.seed comes from seed_everything; give that in its place")
        _check_entries(entry, option, path, inside)


def _is_file(value: str, place: str, path: Path) -> bool:
    """Whether a text is the name of a configuration file, seen from the file in which it stands."""
    return place in ("data", "trainer") or (value.endswith((".yaml", ".yml")) and (path.parent / value).is_file())


_load = get_loader("yaml")


def load(text: str) -> Any:
    """What a value on the command line, or of a configuration file, stands for.

    Raises:
        ConfigurationError: it means something else than its reader sees (see :func:`check_yaml`).
        yaml.YAMLError: it is a text and no YAML.
    """
    if text == "None":  # what jsonargparse makes of a null for an argument of a class
        return None
    check_yaml(text, repr(text if len(text) < 60 else text[:60] + "..."))
    return _load(text)


set_loader("yaml", load, exceptions=(yaml.YAMLError,))
# A default such as that of Lightning's Timer, whose interval is a member of an enumeration of texts.
yaml.SafeDumper.add_multi_representer(enum.Enum, lambda dumper, member: dumper.represent_data(member.value))
