"""Each check of methods fails where a method breaks what it asks, and on nothing else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from federation import build
from torch import Tensor

from benchmark.checks.methods import (
    MethodUnderCheck,
    check_clients_at_once,
    check_images,
    check_messages,
    check_order_of_clients,
    check_resting_clients,
    check_resume,
    check_roles,
)
from benchmark.checks.outcome import FailedCheck, NotCheckedError
from benchmark.contract import Client, LocalTraining, MiniBatch, Phase
from benchmark.engine.plan.round_plan import RoundPlan
from benchmark.errors import ConfigurationError
from benchmark.federation import Round, Terms, Uploads, Values
from benchmark.server import ServerRule
from methods.fedper import FedPer


class Handing(FedPer):
    """A client's loss is weighted with that of the client before it."""

    carried: Tensor | None = None

    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        loss = super().client_loss(client, batch)
        weight = 1.0 if self.carried is None else 1 + self.carried.sum()
        self.carried = loss.detach()
        return loss * weight


class Crowding(FedPer):
    """A client's loss is multiplied by how many clients are stepped together."""

    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        return super().client_loss(client, batch) * len(next(iter(self.slots.values())))


class MovingFrozen(FedPer):
    """Moves the server's value of a personal parameter, outside of any step."""

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.head.bias.data += 1.0


class Resting(FedPer):
    """The head is personal, and nobody trains it."""

    def local_phases(self) -> list[Phase]:
        phases = super().local_phases()
        return [
            replace(phase, groups=tuple(replace(group, parameters=("backbone",)) for group in phase.groups))
            for phase in phases
        ]


class Touching(FedPer):
    """Moves the heads of all clients after a round."""

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        everybody = range(self.num_clients)
        self.store.write("head.bias", everybody, self.store.all_rows("head.bias") + 1.0)


class Sending(FedPer):
    """Sends every client's head to the server."""

    uploads = ("copy",)

    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        return super().client_loss(client, batch), {"copy": self.head.weight.flatten()}


class Forgetting(ServerRule):
    """Goes on counting after a round, and begins anew after a resume."""

    rounds = 0

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        self.rounds += 1
        mean = super().aggregate(round, shared, uploads)
        return {name: value / self.rounds for name, value in mean.items()}


class WithForgettingServer(FedPer):
    """Has it as its server."""

    def make_server(self) -> ServerRule:
        return Forgetting()


class FewerAndOthers(ServerRule):
    """Selects other clients in every call, fewer than the protocol says, and none of the last ones twice."""

    def start(self, initial: Values, terms: Terms) -> None:
        super().start(initial, terms)
        self.register_buffer("asked", torch.tensor(0))

    def select(self, number: int) -> list[int]:
        self.asked += 1
        return [int(self.asked) % 3, 3 + int(self.asked) % 5]


class TrimmedMean(ServerRule):
    """Refuses so few uploads that nothing would be left.

    Args:
        trim: how many of the largest and of the smallest are left out.
    """

    def __init__(self, trim: int) -> None:
        super().__init__()
        self.trim = trim

    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        if len(uploads.clients) <= 2 * self.trim:
            raise ConfigurationError(f"TrimmedMean needs more than {2 * self.trim} uploads")
        rows = uploads.only(shared).values.items()
        return {name: value.sort(dim=0).values[self.trim : len(value) - self.trim].mean(0) for name, value in rows}


def with_rule(rule: Callable[[], ServerRule]) -> type[FedPer]:
    """FedPer with another server."""

    class Served(FedPer):
        def make_server(self) -> ServerRule:
            return rule()

    return Served


def subject(kind: type[FedPer], *fixed: str, steps: int | None = None) -> MethodUnderCheck:
    """A method of this class on the tiny federation."""

    def make(*options: str) -> tuple[Any, Any]:
        template, data = build("FedPer", *fixed, *options)
        torch.manual_seed(0)
        return kind(8, 11, template.backbone, training=LocalTraining(lr=0.02, epochs=1, steps=steps)), data

    return MethodUnderCheck(make)


FAULTS: dict[str, tuple[Callable[[MethodUnderCheck], None], MethodUnderCheck, str]] = {
    "order": (check_order_of_clients, subject(Handing), "clients hand something on to those after them"),
    "width": (check_clients_at_once, subject(Crowding), "a client's step must depend on its own tensors alone"),
    "frozen": (check_roles, subject(MovingFrozen), "head.bias is not shared but moved on the server"),
    "untrained": (check_roles, subject(Resting), r"\['head.weight', 'head.bias'\] are never trained"),
    "resting": (check_resting_clients, subject(Touching), "head.bias of clients that were not selected moved"),
    "sent": (check_messages, subject(Sending), "copy, which is uploaded, is head.weight of a client"),
    "resume": (check_resume, subject(WithForgettingServer), "something that lasts between rounds is not in the"),
}
CHECKS = {check: name for name, (check, _, _) in FAULTS.items()} | {check_images: "images"}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_check(fault: str) -> None:
    check, faulty, message = FAULTS[fault]
    with pytest.raises(FailedCheck, match=message):
        check(faulty)


#: What the contract allows; once refused by these checks.
ALLOWED: dict[str, tuple[Callable[[MethodUnderCheck], None], MethodUnderCheck]] = {
    "steps below an epoch": (check_images, subject(FedPer, steps=2)),
    "whole batches": (check_images, subject(FedPer, "--data.drop_last=true")),
    "lots": (check_images, subject(FedPer, "--data.record_privacy={clip: 1.0, noise_multiplier: 1.0}")),
    "fewer clients, images": (check_images, subject(with_rule(FewerAndOthers))),
    "fewer clients, messages": (check_messages, subject(with_rule(FewerAndOthers))),
    "fewer clients, resting": (check_resting_clients, subject(with_rule(FewerAndOthers))),
    "trimmed": (check_resting_clients, subject(with_rule(lambda: TrimmedMean(4)))),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_the_contract_allows_passes(case: str) -> None:
    check, allowed = ALLOWED[case]
    check(allowed)


def test_a_rule_that_needs_every_client_is_not_checked_with_fewer() -> None:
    with pytest.raises(NotCheckedError, match="with 10 of 11 clients: TrimmedMean needs more than 10 uploads"):
        check_resting_clients(subject(with_rule(lambda: TrimmedMean(5))))


@pytest.mark.parametrize(
    ("shown", "steps"),
    [
        (lambda client, rows: rows[(client + 1) % 11], 2),
        (lambda client, rows: rows[client][1:] if client == 0 else rows[client], None),
    ],
    ids=["foreign, of some steps", "left out"],
)
def test_wrong_images_are_found(shown: Any, steps: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    lay_out = RoundPlan.__init__

    def otherwise(self: Any, clients: Any, indices: Any, *rest: Any, **named: Any) -> None:
        lay_out(self, clients, {client: shown(client, indices) for client in clients}, *rest, **named)

    monkeypatch.setattr(RoundPlan, "__init__", otherwise)
    with pytest.raises(FailedCheck, match="images train that should not"):
        check_images(subject(FedPer, steps=steps))


def test_images_that_are_held_out_need_not_train() -> None:
    def make(*options: str) -> tuple[Any, Any]:
        template, data = build("FedPer", "--data.partition=federation.Even", "--data.val_fraction=0.3", *options)
        return FedPer(8, 6, template.backbone, training=LocalTraining(lr=0.02, epochs=1)), data

    check_images(MethodUnderCheck(make))


@pytest.mark.parametrize("check", CHECKS, ids=CHECKS.values())
def test_the_method_without_it_passes(check: Callable[[MethodUnderCheck], None]) -> None:
    check(subject(FedPer))
