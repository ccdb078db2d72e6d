"""Types of the numbers that a constructor takes, with their ranges: a value out of range is refused.

The command line reads these types and refuses an unfit value by the option's name. :func:`checked` and
:class:`Checked` refuse the same values in a call from Python.
"""

import functools
import inspect
import math
import operator
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import InstanceOf, PlainValidator, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from benchmark.errors import ConfigurationError

C = TypeVar("C", bound=type)


@dataclass(frozen=True)
class Range:
    """The numbers of a kind from ``least`` to ``most``; called, it gives a value as such a number.

    Attributes:
        kind: ``int`` or ``float``.
        least: the smallest number, or what all of them lie above.
        most: the largest number, or what all of them lie below.
        above: ``least`` itself is none of them.
        below: ``most`` itself is none of them.
    """

    kind: type[int] | type[float]
    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False

    def __str__(self) -> str:
        said = f"a {'whole ' if self.kind is int else ''}number "
        said += f"above {self.least:,}" if self.above else f"from {self.least:,}"
        if self.most == math.inf:
            return said if self.above else f"{said} on"
        if self.below:
            return f"{said if self.above else f'{said} on'} and below {self.most:,}"
        return f"{said} and at most {self.most:,}" if self.above else f"{said} to {self.most:,}"

    def __call__(self, value: Any) -> Any:
        """The number that a value is; of a text, as on a command line, the number that stands there.

        Raises:
            ValueError: it is none, or out of range.
        """
        number = value if type(value) is self.kind else self._converted(value)
        large = number > self.least if self.above else number >= self.least
        small = number < self.most if self.below else number <= self.most
        if large and small and math.isfinite(number):
            return number
        # Of a plain ValueError pydantic keeps the frames, and with them parser and run, where no collector sees them.
        raise PydanticCustomError("range", "{reason}", {"reason": f"expected {self}, got {str(value)[:80]}"})

    def _converted(self, value: Any) -> Any:
        """NaN where the value is no number of this kind: it lies in no range."""
        numbers = (Integral, str) if self.kind is int else (Real, str)
        is_one = isinstance(value, numbers) and not isinstance(value, bool)
        try:
            return self.kind(value) if is_one else math.nan
        except (ValueError, OverflowError):
            return math.nan


NonNegativeFloat = Annotated[float, PlainValidator(Range(float, 0))]
PositiveFloat = Annotated[float, PlainValidator(Range(float, 0, above=True))]
#: from 0 to 1, and the same without one or both ends
UnitInterval = Annotated[float, PlainValidator(Range(float, 0, 1))]
AboveZero = Annotated[float, PlainValidator(Range(float, 0, 1, above=True))]
BelowOne = Annotated[float, PlainValidator(Range(float, 0, 1, below=True))]
InsideUnit = Annotated[float, PlainValidator(Range(float, 0, 1, above=True, below=True))]

NonNegativeInt = Annotated[int, PlainValidator(Range(int, 0, 10**9))]
PositiveInt = Annotated[int, PlainValidator(Range(int, 1, 10**9))]
#: clients are named one by one before anything else is known of them
NumClients = Annotated[int, PlainValidator(Range(int, 1, 10**6))]
#: what a network holds side by side, such as a prompt's tokens: attention grows with the square
Few = Annotated[int, PlainValidator(Range(int, 1, 1000))]
FewOrNone = Annotated[int, PlainValidator(Range(int, 0, 1000))]
#: pixels of an image's side, or units of a layer
Size = Annotated[int, PlainValidator(Range(int, 1, 10**4))]
#: of a Dirichlet distribution; smaller is more skewed, 0.1 to 1 is usual, and NumPy draws zeros from far larger ones
Concentration = Annotated[float, PlainValidator(Range(float, 0, 10**6, above=True))]
#: of a pixel's value in a file of 16
Bits = Annotated[int, PlainValidator(Range(int, 1, 16))]
#: what NumPy and torch take
Seed = Annotated[int, PlainValidator(Range(int, 0, 2**32 - 1))]


def checked(cls: C) -> C:
    """Class decorator: the constructor refuses arguments out of the range of their types.

    Checked are numbers of this module, ``Literal`` and classes of the project, alone, in unions with each other, None
    and bool, and in tuples. Numbers arrive as what the types say, an int as a float for example. Other types are as
    Python leaves them.

    Raises:
        ConfigurationError: from the constructor; names class and argument.
    """
    constructor = cls.__init__  # type: ignore[misc]
    names = _positional(constructor)

    @functools.wraps(constructor)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        checks, kind = _checks(constructor), type(self).__name__
        args = (*(_taken(kind, checks, *given) for given in zip(names, args, strict=False)), *args[len(names) :])
        kwargs = {name: _taken(kind, checks, name, value) for name, value in kwargs.items()}
        _remember(self, args, kwargs)
        constructor(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


#: By an object's id: the object, and what its constructor was given. Not an attribute: methods' are watched and copied.
_GIVEN: dict[int, tuple[weakref.ref[Any], dict[str, Any] | None]] = {}


def _remember(made: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Keep an object's arguments while it lives; a base's constructor, which its own calls, changes nothing."""
    at = id(made)
    if at in _GIVEN or not type(made).__weakrefoffset__:
        return
    names: list[str] = []
    for base in type(made).__mro__:
        if "__init__" in vars(base):
            names = _positional(base.__init__)  # type: ignore[misc]
            kinds = {p.kind for p in inspect.signature(base.__init__).parameters.values()}  # type: ignore[misc]
            if names or inspect.Parameter.VAR_POSITIONAL not in kinds:
                break  # else it hands on all of them
    arguments = dict(zip(names, args, strict=False)) | named if len(args) <= len(names) else None
    _GIVEN[at] = weakref.ref(made, lambda _: _GIVEN.pop(at, None)), arguments


def _positional(constructor: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments that a constructor takes by position, but for the object itself."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, p in inspect.signature(constructor).parameters.items() if p.kind in kinds][1:]


def arguments_of(made: Any) -> dict[str, Any] | None:
    """Return what the constructor of a :class:`Checked` class was given, by name; None where nothing is known of it.

    A class whose constructor is Python's or torch's own was given nothing.

    Args:
        made: the object; a copy of one has not been constructed.
    """
    known = _GIVEN.get(id(made))
    if known is not None and known[0]() is made:
        return known[1]
    constructor = next(base for base in type(made).__mro__ if "__init__" in vars(base))
    plain = constructor is object or constructor.__module__ == "torch.nn.modules.module"
    return {} if plain and isinstance(made, Checked) else None


class Checked:
    """Base of classes whose constructors, and those of classes that derive from them, are :func:`checked`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            checked(cls)


def check_fields(instance: Any) -> None:
    """Refuse a dataclass that is made too often to be :func:`checked` each time, and whose types are the same.

    Raises:
        ConfigurationError: names class and field.
    """
    checks = _checks(type(instance).__init__)
    for name in checks:
        _taken(type(instance).__name__, checks, name, getattr(instance, name))


@dataclass(frozen=True)
class _Check:
    adapter: TypeAdapter[Any]
    expected: str


def _taken(kind: str, checks: dict[str, _Check], name: str, value: Any) -> Any:
    if name not in checks:
        return value
    try:
        return checks[name].adapter.validate_python(value)
    except ValidationError as error:
        raise ConfigurationError(f"{kind}: {name}: expected {checks[name].expected}, got {str(value)[:80]}") from error


@functools.cache
def _checks(constructor: Callable[..., Any]) -> dict[str, _Check]:
    """A check for each argument that has one."""
    try:
        hints = get_type_hints(constructor, include_extras=True)
    except NameError:  # a type that is imported for type checkers alone
        hints = {name: hint for name, hint in constructor.__annotations__.items() if not isinstance(hint, str)}
    taken = {name: hint for name, hint in hints.items() if name != "return" and _is_checked(hint)}
    return {name: _Check(TypeAdapter(_of_instances(hint)), _in_words(hint)) for name, hint in taken.items()}


def _of_instances(hint: Any) -> Any:
    """Return the type with a class replaced by its objects: pydantic would make a dataclass of a mapping, too."""
    if _is_class(hint):
        return Annotated[hint, InstanceOf()]
    if get_origin(hint) in (Union, types.UnionType):
        return functools.reduce(operator.or_, map(_of_instances, get_args(hint)))
    return hint


def _in_words(hint: Any) -> str:
    """Describe the values that a type takes, in words; classes included."""
    if _is_class(hint):
        return f"an object of {hint.__name__}"
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(map(_in_words, get_args(hint)))
    return str(expected(hint))


def _is_class(hint: Any) -> bool:
    """Return whether a type is a class of the project, so that an object of it is expected."""
    ours = ("benchmark", "methods", "datamodules")
    return inspect.isclass(hint) and get_origin(hint) is None and hint.__module__.partition(".")[0] in ours


def _is_checked(hint: Any) -> bool:
    """Return whether :func:`checked` checks values of this type."""
    if get_origin(hint) in (Union, types.UnionType, tuple):
        parts = [part for part in get_args(hint) if part not in (type(None), bool, Ellipsis)]
        return bool(parts) and all(map(_is_checked, parts))
    return get_origin(hint) is Literal or _is_class(hint) or _range(hint) is not None


def _range(hint: Any) -> Range | None:
    metadata = [part.func for part in getattr(hint, "__metadata__", ()) if isinstance(part, PlainValidator)]
    return next((part for part in metadata if isinstance(part, Range)), None)


#: what types without bounds are called
WORDS = {type(None): "null", bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def expected(hint: Any) -> str | None:
    """In words, which values a type takes; None of one that takes others than numbers, texts and the like."""
    if (found := _range(hint)) is not None:
        return str(found)
    if get_origin(hint) is Literal:
        return " or ".join(map(str, get_args(hint)))
    parts = [expected(part) for part in get_args(hint) if part is not Ellipsis]
    if get_origin(hint) in (Union, types.UnionType) and None not in parts:
        return " or ".join(map(str, parts))
    if get_origin(hint) in (tuple, list) and len(set(parts)) == 1 and parts[0] is not None:
        return f"a list, each of it {parts[0]}"
    return WORDS.get(hint) if isinstance(hint, type) else None


def check_share(option: str, share: float | None, count: int, clients: int) -> None:
    """Refuse a share of the clients that is above zero and yet is none of them.

    Args:
        option: of the data.
        share: its value.
        count: clients that it gives.
        clients: of which it is a share.

    Raises:
        ConfigurationError: it is so.
    """
    if share and not count:
        enough = f"give more, for example {math.ceil(100 / clients) / 100}, or " if clients > 1 else ""
        of = f"{clients} client{'s' * (clients != 1)}"
        raise ConfigurationError(
            f"data.{option}={share} of {of} is no client, and so without effect; {enough}leave it out"
        )
