"""Classes that are chosen by name: which there are, why a name is not one of theirs, and what a choice lacks."""

import inspect
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pydoc import locate
from typing import Any, Literal, get_args, get_origin

from jsonargparse import Namespace

import datamodules
import methods
from benchmark import compression, faults, privacy, robust
from benchmark.config.class_names import file_of_name
from benchmark.delivery import Delivery
from benchmark.errors import ConfigurationError, did_you_mean
from benchmark.method import FederatedMethod
from benchmark.server import ServerRule
from datamodules.partition import Partition
from datamodules.source import ImageSource
from methods import servers

#: Where a class is chosen by name, and what it must derive from.
CHOICES: dict[str, type] = {
    "model": FederatedMethod,
    "server": ServerRule,
    "delivery": Delivery,
    "data.source": ImageSource,
    "data.partition": Partition,
}

#: What a method must know of the data, and takes from there.
LINKED = ("num_classes", "num_clients", "class_names", "class_templates")
LINKED_OPTIONS = frozenset(f"model.init_args.{name}" for name in LINKED)

NOT_GIVEN = "must be given, there is no default"


def choices_asked_for(arguments: Sequence[str]) -> str | None:
    """The classes that there are, where a command line asks for help on one and names none; else None."""
    for place, base in CHOICES.items():
        asked = [at for at, argument in enumerate(arguments) if argument == f"--{place}.help"]
        following = arguments[asked[0] + 1 :] if asked else ()
        if asked and (not following or following[0].startswith("-")):
            names = _names(base)
            if not names:
                return f"--{place} is the dotted path of a class of your own; none comes with the suite"
            width = max(map(len, names))
            shown = (f"  {name:{width}}  {_summary(named)}" for name, named in names.items())
            example = shlex.join(["lightning-cli", arguments[0], f"--{place}.help", next(iter(names))])
            title = f"--{place} is one of these, or the dotted path of a class of your own:"
            return "\n".join([title, "", *shown, "", f"The arguments of one: {example}"])
    return None


def is_base(class_path: str) -> bool:
    """Return whether a class cannot be chosen: it is a base class of choices, or an internal class of the project."""
    named = locate(class_path)
    module = getattr(named, "__module__", "")
    of_the_project = module.partition(".")[0] in ("benchmark", "methods", "datamodules")
    of_the_project &= not module.startswith(("benchmark.checks.", "benchmark.speed."))
    between = (*servers.__all__, *privacy.__all__, *robust.__all__, *faults.__all__, *compression.__all__)
    public = (*methods.__all__, *between, *datamodules.__all__)
    return named in CHOICES.values() or (of_the_project and getattr(named, "__name__", "") not in public)


def no_such_class(given: str, hint: Any) -> str:
    """Explain why a name cannot be chosen as a class, and list the names that can.

    Args:
        given: the name, or a dotted path.
        hint: the type of the argument.
    """
    chosen = hint in CHOICES.values()
    names = _names(hint) if chosen else {child.__name__: child for base in _classes(hint) for child in _below(base)}
    said = f"there is no {given!r}"
    if chosen and is_base(given):
        found: Any = locate(given)
        said = f"{given} is a base of others" if _below(found) else f"{given} belongs to a method"
    else:
        by_letters = {name.lower(): name for name in names}
        like = get_close_matches(given.rpartition(".")[2].lower(), by_letters)
        said += did_you_mean(by_letters[name] for name in like)
        said += file_of_name(given, next((place for place, base in CHOICES.items() if base is hint), None))
    words = [str(word) for part in get_args(hint) if get_origin(part) is Literal for word in get_args(part)]
    listed = f"one of {', '.join(names)}, or " if chosen and names else ""
    listed = f"{', '.join(words)}, or " if words else listed
    return f"{said}; expected {listed}the dotted path of a class{' of your own' if chosen else ''}"


def _names(base: type) -> dict[str, type]:
    """The classes of the project to choose from, by name."""
    product = ("benchmark", "methods", "datamodules")
    ours = [child for child in _below(base) if child.__module__.split(".")[0] in product]
    found = {child.__name__: child for child in ours if not is_base(f"{child.__module__}.{child.__name__}")}
    return dict(sorted(found.items()))


def _classes(hint: Any) -> Iterator[type]:
    """The classes of which a type is made."""
    if inspect.isclass(hint) and hint.__module__ != "builtins":
        yield hint
    for part in get_args(hint):
        yield from _classes(part)


def _below(base: type) -> set[type]:
    """All known classes that derive from ``base``."""
    children: list[type] = base.__subclasses__()
    return {*children}.union(*map(_below, children))


def _summary(named: type) -> str:
    """The beginning of a class's description."""
    first = (inspect.getdoc(named) or "").partition("\n\n")[0]
    return textwrap.shorten(first.replace("``", ""), 90, placeholder=" ...")


def check_classes(config: Namespace) -> None:
    """Refuse what only shows when a configuration is whole.

    Raises:
        ConfigurationError: a base instead of a class that can be chosen, an argument that comes from the data, none
            where a class has no default, or one that nothing checks.
    """
    for place, base in CHOICES.items():
        if place in config and is_base(config[place].class_path):
            raise ConfigurationError(f"{place}: {no_such_class(config[place].class_path, base)}")
    for name in LINKED:
        if config.model.get("init_args", Namespace()).get(name) is not None:
            raise ConfigurationError(f"model.init_args.{name} comes from the data and is not given; leave it out")
    plain = config.as_dict()
    _check_given(plain, "")
    for place in ("model", "server", "delivery", "data"):
        _check_annotated(plain.get(place), place)


def _check_annotated(value: Any, place: str) -> None:
    """Refuse what is given to an argument without a type: any text would do."""
    if not isinstance(value, dict):
        return
    named: Any = locate(value["class_path"]) if isinstance(value.get("class_path"), str) else None
    given = value.get("init_args") or {}
    for parameter in constructor_parameters(named) if inspect.isclass(named) else ():
        bare = parameter.annotation is inspect.Parameter.empty and parameter.name in given
        option = f"{place}.init_args.{parameter.name}"
        default = None if parameter.default is inspect.Parameter.empty else parameter.default
        if bare and given[parameter.name] != default and option not in LINKED_OPTIONS:
            raise ConfigurationError(f"{option}: {no_type(named.__name__, parameter.name)}")
    for name, entry in value.items():
        _check_annotated(entry, f"{place}.{name}")


def no_type(of: str, name: str) -> str:
    """Explain that an argument of a class has no type, and how its author adds one."""
    return (
        f"{of} gives its argument {name} no type, so that nothing checks its value; write one there, such as "
        f"{name}: float (every argument has an annotation)"
    )


def _check_given(value: Any, place: str) -> None:
    """Refuse a class's argument without type and without default that is not given: it would arrive as None."""
    if isinstance(value, list):
        for number, entry in enumerate(value):
            _check_given(entry, f"{place}[{number}]")
    if not isinstance(value, dict):
        return
    named: Any = locate(value["class_path"]) if isinstance(value.get("class_path"), str) else None
    if inspect.isclass(named):
        given = value.get("init_args") or {}
        for parameter in constructor_parameters(named):
            bare = parameter.annotation is parameter.default is inspect.Parameter.empty
            option = f"{place}.init_args.{parameter.name}"
            if bare and given.get(parameter.name, ...) is None and option not in LINKED_OPTIONS:
                raise ConfigurationError(f"{option}: {NOT_GIVEN}")
    for name, entry in value.items():
        _check_given(entry, f"{place}.{name}" if place else str(name))


def constructor_parameters(named: type) -> Iterator[inspect.Parameter]:
    """Yield what a constructor takes, and what its bases' take as long as they hand on all that is not their own."""
    for base in (base for base in named.__mro__ if "__init__" in vars(base)):
        own = list(inspect.signature(base.__init__).parameters.values())[1:]  # type: ignore[misc]
        yield from own
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in own):
            return
