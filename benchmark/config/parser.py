"""Read the options and configuration files of ``lightning-cli``, and answer wrong ones in a line."""

import enum
import inspect
import re
import types
from argparse import Action, ArgumentError
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

import yaml
from jsonargparse import DefaultHelpFormatter, Namespace, get_loader, set_dumper, set_loader
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from benchmark.config.choices import (
    CHOICES,
    LINKED,
    LINKED_OPTIONS,
    NOT_GIVEN,
    is_base,
    no_such_class,
    no_type,
)
from benchmark.config.given_files import check_file
from benchmark.config.overview import COMMANDS
from benchmark.config.yaml_files import check_yaml, dump_yaml
from benchmark.engine.refusals.trainer_settings import RANKS_CLASSES
from benchmark.errors import ConfigurationError, causes
from benchmark.ranges import expected

#: Options of earlier versions, which the configurations of their runs hold as null.
RETIRED = ("optimizer", "lr_scheduler", "weights_only")

REQUIRED = "the following arguments are required: "
#: what jsonargparse says of a class_path that is a number, and of init_args that are a list
NO_CLASS = ("is not iterable", "Not a valid subclass", "has no attribute 'keys'")
NO_FUNCTION = "a function cannot be named in a configuration; derive a class of your own that has it, and name that"


def whole_numbers_first(hint: Any) -> Any:
    """Have a type that takes whole numbers and others try the former first, so that a 1 stays a whole number.

    ``typing`` caches one ``Optional[Union[int, float]]`` for both orders, the one that the process used first: which
    number is meant would depend on earlier imports.
    """
    parts = get_args(hint) if _is_union(hint) else ()
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
        #: arguments that are functions, which no configuration can give
        self.functions: set[str] = set()
        super().__init__(*args, **kwargs)

    def add_class_arguments(
        self, theclass: Any, nested_key: str | None = None, *more: Any, **settings: Any
    ) -> list[str]:
        """Add a constructor's arguments; the help of a method leaves out what it takes from the data.

        Functions for Lightning's classes are not among them: a configuration that names one could import any module,
        and have any function called with the run.
        """
        if nested_key == "model":
            settings["skip"] = {*(settings.get("skip") or ()), *LINKED}
        added: list[str] = super().add_class_arguments(theclass, nested_key, *more, **settings)
        if _is_of_lightning(theclass):
            for action in self._actions:
                if action.dest in added and _has_function(hint := getattr(action, "_typehint", None)):
                    rest = tuple(part for part in get_args(hint) if not _has_function(part))
                    vars(action)["_typehint"] = reduce(or_, rest) if _is_union(hint) and rest else Literal[None]
                    self.functions.add(action.dest)
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
            missing = message.removeprefix(REQUIRED).split(", ")
            return _RefusedError([re.sub(f"^({'|'.join(COMMANDS)})\\.", "", name) for name in missing], NOT_GIVEN)
        found = re.match(r'Parser key "([\w.]+)"|--([\w.]+)\.help: ', message)
        key = (found[1] or found[2]) if found else ""
        if key in RETIRED:
            return _RefusedError([key], known=self._known())
        untyped = re.search(r"Parameter '(\w+)' from '(?:[\w.]+\.)?(\w+)\.__init__' does not specify a type", message)
        if untyped:
            return _RefusedError([key], no_type(untyped[2], untyped[1]))
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
        if key in self.functions:
            return _RefusedError([key], NO_FUNCTION)
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


def _is_of_lightning(named: Any) -> bool:
    """Return whether a class is Lightning's, or one's own callback or logger, which may take what Lightning's take."""
    return inspect.isclass(named) and (
        issubclass(named, Callback | Logger) or named.__module__.partition(".")[0] == "lightning"
    )


def _is_union(hint: Any) -> bool:
    return get_origin(hint) in (Union, types.UnionType)


def _has_function(hint: Any) -> bool:
    """Return whether values of a type are functions, or hold some."""
    return Callable in (hint, get_origin(hint)) or any(map(_has_function, get_args(hint)))


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
        """Return what the command line prints."""
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
    """Suggest options instead of one that does not exist: similar ones, else all that stand there."""
    for other, takes, suite in (("backbone", "clip", "digits_clip"), ("clip", "backbone", "digits")):
        if given == f"model.init_args.{other}" and f"model.init_args.{takes}" in known:
            return f"the method takes model.init_args.{takes}: take a suite for it, such as --config suites/{suite}"
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
    """A command line that names the strategy of which it gives an option, such as ``--trainer.strategy.timeout``."""
    places = [at for at, argument in enumerate(arguments) if argument.startswith("--trainer.strategy")]
    if not places or not arguments[places[0]].startswith("--trainer.strategy."):
        return [*arguments]
    return [*arguments[: places[0]], f"--trainer.strategy={RANKS_CLASSES[0]}", *arguments[places[0] :]]


_load = get_loader("yaml")


def load(text: str) -> Any:
    """Parse a value of the command line or of a configuration file.

    Raises:
        ConfigurationError: it means something else than its reader sees (see :func:`check_yaml`).
        yaml.YAMLError: it is a text and no YAML.
    """
    if text == "None":  # what jsonargparse makes of a null for an argument of a class
        return None
    check_yaml(text, repr(text if len(text) < 60 else text[:60] + "..."))
    return _load(text)


set_loader("yaml", load, exceptions=(yaml.YAMLError,))
set_dumper("yaml", partial(dump_yaml, default_flow_style=False, allow_unicode=True, sort_keys=False))
# A default such as that of Lightning's Timer, whose interval is a member of an enumeration of texts.
yaml.SafeDumper.add_multi_representer(enum.Enum, lambda dumper, member: dumper.represent_data(member.value))
