"""Numbers as types: what a constructor takes, and what it says of the rest."""

import gc
import weakref
from typing import Any, Literal

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from benchmark.contract import Group, Phase
from benchmark.errors import ConfigurationError
from benchmark.ranges import AboveZero, BelowOne, Checked, Few, FewOrNone, InsideUnit, PositiveFloat, Seed, check_fields


class Base(Checked):
    def __init__(
        self,
        rate: BelowOne,
        clip: PositiveFloat | None = None,
        weight: PositiveFloat | Literal["1/D"] = 1.0,
        blocks: tuple[FewOrNone, ...] = (0,),
        seed: Seed = 0,
        words: str | None = None,
    ) -> None:
        self.given = (rate, clip, weight, blocks, seed, words)


class Derived(Base):
    def __init__(self, share: AboveZero, **others: Any) -> None:
        super().__init__(0.5, **others)
        self.share = share


def test_values_arrive_as_what_the_types_say() -> None:
    assert Base(0, np.float32(2), "1/D", [1, 2], np.int64(3), "text").given == (0.0, 2.0, "1/D", (1, 2), 3, "text")
    assert [type(value) for value in Base(0, 1, 1).given[:3]] == [float] * 3
    assert Derived(1, clip=3).given == (0.5, 3.0, 1.0, (0,), 0, None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rate": 1}, "Base: rate: expected a number from 0 on and below 1, got 1"),
        ({"rate": True}, "Base: rate: expected a number from 0 on and below 1, got True"),
        ({"rate": 10**400}, "Base: rate: expected a number from 0 on and below 1, got 1000"),
        ({"rate": 0, "clip": float("inf")}, "Base: clip: expected a number above 0 or null, got inf"),
        ({"rate": 0, "weight": "D"}, "Base: weight: expected a number above 0 or 1/D, got D"),
        ({"rate": 0, "blocks": (1, -1)}, "Base: blocks: expected a list, each of it a whole number from 0 to 1,000, "),
        ({"rate": 0, "seed": 1.0}, "Base: seed: expected a whole number from 0 to 4,294,967,295, got 1.0"),
    ],
)
def test_what_is_out_of_range_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Base(**given)
    assert str(refused.value).startswith(message)


def test_a_derived_class_is_named_whoever_checks() -> None:
    with pytest.raises(ConfigurationError, match="Derived: share: expected a number above 0 and at most 1, got 0"):
        Derived(0)
    with pytest.raises(ConfigurationError, match="Derived: clip: expected a number above 0 or null, got 0"):
        Derived(1, clip=0)


class HandedOn(Base):
    """Takes its base's arguments as they come, beside one of its own."""

    def __init__(self, *arguments: Any, own: PositiveFloat = 1.0, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.own = own


def test_arguments_handed_on_are_checked_where_they_are_declared() -> None:
    made = HandedOn(0, None, own=3)
    assert (made.given[:2], made.own) == ((0.0, None), 3.0)
    for given, message in (((1.0,), "HandedOn: rate: expected"), ((0.5, -1.0), "HandedOn: clip: expected")):
        with pytest.raises(ConfigurationError, match=message):
            HandedOn(*given)
    with pytest.raises(ConfigurationError, match="HandedOn: own: expected"):
        HandedOn(0.5, own=0)


def test_arguments_that_are_missing_or_unknown_are_left_to_python() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'rate'"):
        Base()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        Base(0, other=1)  # type: ignore[call-arg]


def test_what_a_method_trains_is_checked_where_it_is_used() -> None:
    check_fields(Phase((Group(("head",), 0.0),), epochs=0))
    with pytest.raises(ConfigurationError, match="Group: lr: expected a number from 0 on, got -1"):
        check_fields(Group(("head",), -1))
    with pytest.raises(ConfigurationError, match=r"Phase: steps: expected a whole number from 1 to .* or null, got 0"):
        check_fields(Phase((), epochs=1, steps=0))


def test_the_words_of_a_range() -> None:
    words = [str(kind.__metadata__[0].func) for kind in (AboveZero, BelowOne, InsideUnit, PositiveFloat)]
    assert words == [
        "a number above 0 and at most 1",
        "a number from 0 on and below 1",
        "a number above 0 and below 1",
        "a number above 0",
    ]


def test_a_refused_number_keeps_nothing_alive() -> None:
    class Holder:
        """An object that the frame holds which asks for the number."""

    def ask() -> weakref.ref[Holder]:
        holder = Holder()
        with pytest.raises(ValidationError) as refused:  # this frame holds the error, as those of a parser do
            TypeAdapter(Few | Literal["auto"]).validate_python("many")
        assert refused.value.error_count() == 2
        return weakref.ref(holder)

    kept = ask()
    gc.collect()
    assert kept() is None
