"""Steps that were recorded once and are repeated: equal in every bit, recorded anew, or left as they are."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from federation import build, fit, learned
from repeated_steps import repeated_steps
from torch import Tensor, nn

import methods
from benchmark.contract import Client, Loss, MiniBatch, Stage
from benchmark.engine.repeat import recorded_step
from benchmark.engine.repeat.attributes import Attributes
from benchmark.engine.repeat.recording import equal
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Uploads, Values
from benchmark.server import ServerRule
from methods.fedavg import FedAvg

#: Clients one after the other, few of them: that is many steps of a kind.
ONE_BY_ONE = ("--data.clients_at_once=1", "--data.partition=federation.Few", "--data.clients_per_round=4")
#: Two cohorts of three.
BY_THREES = ("--data.clients_at_once=3", "--data.partition=federation.Few", "--data.clients_per_round=6")
QUICK = ("FedAvg", "FedBABU", "PFedPT")
#: which the quick test of autocast leaves out
OTHERS = sorted(set(methods.__all__) - {"FedAvg", "FedVPT", "TPFL", "ZeroShotCLIP"})


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record the second step of a kind, however large it is and whether or not that is faster."""
    monkeypatch.setattr(recorded_step, "BEFORE_RECORDING", 1)
    monkeypatch.setattr(recorded_step, "SMALL_STEP", float("inf"))
    monkeypatch.setattr(recorded_step, "WORTHWHILE", float("inf"))


@pytest.fixture
def repeated() -> Iterator[list[str]]:
    """Names of the methods whose steps were repeated, one a step."""
    with repeated_steps() as found:
        yield found


def results(
    conf: str,
    *overrides: str,
    recorded: bool,
    rounds: int = 3,
    change: Callable[[Any], None] | None = None,
    precision: str = "32-true",
) -> Values:
    """Return a method's learned values after some rounds of clients of different sizes."""
    torch.manual_seed(0)
    method, data = build(conf, *overrides)
    if change is not None:
        change(method)
    with pytest.MonkeyPatch.context() as patch:
        if not recorded:
            patch.setattr(recorded_step, "BEFORE_RECORDING", 10**9)
        fit(method, data, rounds, settings={"precision": precision, "check_val_every_n_epoch": rounds})
    return learned(method)


def require_equal(conf: str, *overrides: str, **settings: Any) -> None:
    """Every bit with records is as without."""
    plain = results(conf, *overrides, recorded=False, **settings)
    found = results(conf, *overrides, recorded=True, **settings)
    assert plain.keys() == found.keys()
    for name, value in plain.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("overrides", [ONE_BY_ONE, BY_THREES], ids=["1", "3"])
@pytest.mark.parametrize("conf", QUICK)
def test_a_repeated_step_is_equal_in_every_bit(conf: str, overrides: tuple[str, ...], repeated: list[str]) -> None:
    require_equal(conf, *overrides)
    assert len(repeated) > 8


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("conf", sorted(set(methods.__all__) - {*QUICK, "ZeroShotCLIP"}))
def test_so_it_is_with_every_method(conf: str, width: int, repeated: list[str]) -> None:
    require_equal(conf, f"--data.clients_at_once={width}")
    assert repeated


@pytest.mark.parametrize(
    "overrides",
    [
        ("--model.training.momentum=0.9", "--model.training.clip=0.1", "--model.training.weight_decay=0.01"),
        ("--model.training.optimizer=adam",),
        ("--data.drop_last=true", "--data.batch_size=4"),
    ],
    ids=["clipped", "adam", "drop_last"],
)
def test_so_it_is_whatever_a_phase_has(overrides: tuple[str, ...], repeated: list[str]) -> None:
    require_equal("FedAvg", *ONE_BY_ONE, *overrides)
    assert repeated


@pytest.mark.parametrize(
    "conf", ["FedAvg", "FedVPT", "TPFL", *(pytest.param(conf, marks=pytest.mark.slow) for conf in OTHERS)]
)
def test_so_it_is_where_autocast_chooses_the_types(conf: str, repeated: list[str]) -> None:
    """Parts of a loss are kept out of autocast, of those that take a text's features for example."""
    require_equal(conf, *BY_THREES, precision="bf16-mixed")
    assert repeated


class Warmed(ServerRule):
    """Sets an attribute of the method before each round, as a schedule would."""

    def __init__(self, method: "Scaled", last: int) -> None:
        super().__init__()
        object.__setattr__(self, "method", method)
        self.last = last

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        """The mean; the next round's weight grows up to that of the last one."""
        self.method.weights["loss"] = min(round.number, self.last) / 4
        return super().aggregate(round, shared, uploads)


OUTSIDE = {"weight": 1.0}


class Scaled(FedAvg):
    """FedAvg, its loss weighted with a number that Python holds."""

    last = 0
    outside = False
    asks = False
    asks_trainer = False

    def client_loss(self, client: Client, batch: MiniBatch) -> Loss:
        """Cross-entropy times the number."""
        if not hasattr(self, "weights"):
            self.weights = {"loss": 0.25}
        weight = OUTSIDE["weight"] if self.outside else self.weights["loss"]
        if self.asks:
            weight = 1.0 / client.round.number
        if self.asks_trainer:
            weight = 1.0 / (1 + self.trainer.current_epoch)
        loss = super().client_loss(client, batch)
        assert isinstance(loss, Tensor)
        return loss * weight

    def make_server(self) -> ServerRule:
        """A server that changes it."""
        return Warmed(self, self.last) if self.last else ServerRule()


def become(**attributes: Any) -> Callable[[FedAvg], None]:
    """Make a FedAvg a Scaled one with these attributes."""

    def change(method: FedAvg) -> None:
        method.__class__ = Scaled
        method.weights = {"loss": 0.25}
        for name, value in attributes.items():
            setattr(method, name, value)

    return change


def test_an_attribute_that_changes_is_seen(repeated: list[str]) -> None:
    require_equal("FedAvg", *ONE_BY_ONE, rounds=5, change=become(last=3))
    assert repeated


def test_steps_of_a_method_whose_attributes_keep_changing_are_left_as_they_are(
    repeated: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "benchmark"):
        require_equal("FedAvg", *ONE_BY_ONE, rounds=8, change=become(last=99))
    assert "steps of Scaled are not recorded: its attributes change" in caplog.text


def test_what_the_engine_keeps_is_none_of_the_methods_attributes() -> None:
    # what visits a rank for a round, and what the first checkpoint asks for
    method, data = build("PFedPT")
    fit(method, data, 1)
    attributes = Attributes(method, (method.slots, method.store))
    attributes.unchanged(Stage.TRAIN)
    method.store.visiting = {"visual_prompt.up": torch.zeros(1)}
    assert method.frozen_hash
    assert attributes.unchanged(Stage.TRAIN)
    method.visual_prompt.size = 99
    assert not attributes.unchanged(Stage.TRAIN)


@dataclass
class Settings:
    """A data class in which an author may keep numbers."""

    weight: float = 1.5


@dataclass(slots=True)
class Slotted:
    """The same without a dict of its own."""

    weight: float = 1.5


class Schedule:
    """An object of an author's own, which knows itself."""

    def __init__(self) -> None:
        self.weight = 1.5
        self.known = {"self": self}


CHANGES: dict[str, Callable[[Any], object]] = {
    "a number": lambda held: setattr(held, "number", 2.5),
    "a new attribute": lambda held: setattr(held, "other", 1),
    "an attribute that is gone": lambda held: delattr(held, "number"),
    "another name": lambda held: setattr(held, "renamed", held.__dict__.pop("number")),
    "a list": lambda held: held.list.append(1),
    "a list's element": lambda held: held.list.__setitem__(0, 7),
    "a dict in a tuple": lambda held: held.tuple[0].update(weight=2.5),
    "a dict's key": lambda held: held.tuple[0].update(other=held.tuple[0].pop("weight")),
    "a set": lambda held: held.set.add(9),
    "a data class": lambda held: setattr(held.settings, "weight", 2.5),
    "one with slots": lambda held: setattr(held.slotted, "weight", 2.5),
    "an object's": lambda held: setattr(held.schedule, "weight", 2.5),
    "an object": lambda held: setattr(held, "schedule", Schedule()),
    "a namespace's": lambda held: setattr(held.namespace, "weight", 2.5),
    "an array's": lambda held: held.array.__setitem__(0, 2.5),
    "a queue's": lambda held: held.queue.append(2.5),
    "a submodule's": lambda held: setattr(held.inner, "p", 0.9),
    "a buffer": lambda held: setattr(held, "buffer", torch.zeros(1)),
    "training": lambda held: held.eval(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_whatever_changes_is_seen_once(change: Callable[[Any], object]) -> None:
    held: Any = nn.Module()
    held.number, held.list, held.tuple, held.set = 1.5, [1, [2]], ({"weight": 1.5},), {1}
    held.settings, held.slotted, held.inner = Settings(), Slotted(), nn.Dropout(0.5)
    held.schedule, held.namespace = Schedule(), SimpleNamespace(weight=1.5)
    held.array, held.queue = np.array([1.5, np.nan]), deque([1.5])
    held.register_buffer("buffer", torch.ones(1))
    attributes = Attributes(held, ())
    assert not attributes.unchanged(Stage.TRAIN)
    assert attributes.unchanged(Stage.TRAIN)
    held.number, held.list[1] = float("1.5"), [2]  # other objects that are equal
    assert attributes.unchanged(Stage.TRAIN)
    change(held)
    assert not attributes.unchanged(Stage.TRAIN)
    assert attributes.unchanged(Stage.TRAIN)


def test_attributes_are_compared_by_content_where_a_quick_look_sees_no_change() -> None:
    held: Any = nn.Module()
    held.schedule, held.namespace, held.list = Schedule(), SimpleNamespace(weights=[1.5]), []
    attributes = Attributes(held, ())
    assert not attributes.unchanged(Stage.TRAIN)
    for change in (
        lambda: setattr(held.schedule, "weight", 2.5),
        lambda: held.schedule.known.update(other=1),
        lambda: held.namespace.weights.append(1),
        lambda: held.list.append(1),
    ):
        assert attributes.unchanged(Stage.TRAIN)
        change()
        assert not attributes.unchanged(Stage.TRAIN)


def test_a_record_that_is_given_up_as_slow_is_not_compared_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bool] = []
    monkeypatch.setattr(recorded_step, "WORTHWHILE", 0.0)
    monkeypatch.setattr(recorded_step, "equal", lambda *made: compared.append(True) or len(compared) == 1)
    results("FedAvg", "--data.clients_at_once=1", recorded=True, rounds=9)
    assert compared


def test_a_loss_that_reads_the_round_is_left_as_it_is(repeated: list[str], caplog: pytest.LogCaptureFixture) -> None:
    for asks, reads in (("asks", "client.round.number"), ("asks_trainer", "self.trainer.current_epoch")):
        with caplog.at_level(logging.DEBUG, "benchmark"):
            require_equal("FedAvg", "--data.clients_at_once=1", change=become(**{asks: True}))
        assert not repeated
        assert f"the loss reads {reads}, where prepare could" in caplog.text


def test_kernels_that_add_in_a_changing_order_are_no_fault_of_the_method(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def unsteady(*given: Any) -> Any:
        program = record(*given)

        def carried_out(*tensors: torch.Tensor) -> Any:
            losses, named, gradients = program(*tensors)
            calls.append(1)
            return losses + (1e-7 * len(calls) if len(calls) > 8 else 0.0), named, gradients

        return carried_out

    record = recorded_step.recorded
    monkeypatch.setattr(recorded_step, "recorded", unsteady)
    with caplog.at_level(logging.DEBUG, "benchmark"):
        results("FedAvg", "--data.clients_at_once=1", recorded=True, rounds=9, change=become())
    assert "is taken as it is written: its kernels give other bits each time" in caplog.text
    assert len(calls) > 8


class Unsteady(Scaled):
    """As on a GPU, where an addition in another order shows in some calls and not in others."""

    def client_loss(self, client: Client, batch: MiniBatch) -> Loss:
        """Cross-entropy, other in its last digits in each call but the first ones."""
        OUTSIDE["calls"] += 1  # by a record no more
        loss = super().client_loss(client, batch)
        assert isinstance(loss, Tensor)
        return loss * (1 + 1e-6 * max(0, OUTSIDE["calls"] - 4))


def test_nor_is_a_step_whose_record_alone_gives_the_same_bits_each_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(OUTSIDE, "calls", 0)

    def change(method: FedAvg) -> None:
        become()(method)
        method.__class__ = Unsteady

    with caplog.at_level(logging.DEBUG, "benchmark"):
        results("FedAvg", "--data.clients_at_once=1", recorded=True, rounds=9, change=change)
    assert "is taken as it is written: its kernels give other bits each time" in caplog.text


def test_what_is_no_number_in_both_is_equal() -> None:
    def gradients(*numbers: float) -> Any:
        return torch.tensor(numbers), {}, {"head": None}

    nan = float("nan")
    assert equal(gradients(1.0, nan), gradients(1.0, nan))
    assert not equal(gradients(1.0, nan), gradients(1.0, 2.0))
    assert not equal(gradients(nan, 1.0), gradients(1.0, nan))
    assert not equal(gradients(1.0, 1.0), gradients(1.0, 1.0 + 2**-23))


@pytest.mark.parametrize("last", [9, 4], ids=["at one of its looks", "in the last round"])
def test_what_changes_outside_of_the_method_is_refused(last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if last == 4:
        monkeypatch.setattr(recorded_step, "TIMED", 10**9)  # no other look

    class Moving(ServerRule):
        """Changes a number that nobody but Python knows of."""

        def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
            """The mean."""
            if round.number == 3:
                monkeypatch.setitem(OUTSIDE, "weight", 0.5)
            return super().aggregate(round, shared, uploads)

    monkeypatch.setattr(Scaled, "make_server", lambda self: Moving())
    with pytest.raises(ConfigurationError, match=r"Scaled\.client_loss depends on something outside of the method"):
        results("FedAvg", "--data.clients_at_once=1", recorded=True, rounds=last, change=become(outside=True))
