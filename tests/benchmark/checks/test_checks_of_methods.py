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
    check_cohort_width,
    check_images,
    check_messages,
    check_order_of_clients,
    check_resting_clients,
    check_resume,
    check_roles,
)
from benchmark.checks.outcome import FailedCheck
from benchmark.contract import Client, LocalTraining, MiniBatch, Phase
from benchmark.federation import Round, Uploads, Values
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
        assert self.simulation.cohort is not None
        return super().client_loss(client, batch) * len(self.simulation.cohort.clients)


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


def subject(kind: type[FedPer], *fixed: str) -> MethodUnderCheck:
    """A method of this class on the tiny federation."""

    def make(*options: str) -> tuple[Any, Any]:
        template, data = build("FedPer", *fixed, *options)
        torch.manual_seed(0)
        return kind(8, 11, template.backbone, training=LocalTraining(lr=0.02, epochs=1)), data

    return MethodUnderCheck(make)


FAULTS: dict[str, tuple[Callable[[MethodUnderCheck], None], MethodUnderCheck, str]] = {
    "order": (check_order_of_clients, subject(Handing), "clients hand something on to those after them"),
    "width": (check_cohort_width, subject(Crowding), "a client's step must depend on its own tensors alone"),
    "frozen": (check_roles, subject(MovingFrozen), "head.bias is not shared but moved on the server"),
    "untrained": (check_roles, subject(Resting), r"\['head.weight', 'head.bias'\] are never trained"),
    "resting": (check_resting_clients, subject(Touching), "head.bias of clients that were not selected moved"),
    "sent": (check_messages, subject(Sending), "copy, which is uploaded, is head.weight of a client"),
    "left out": (check_images, subject(FedPer, "--data.drop_last=true"), "images train that should not"),
    "resume": (check_resume, subject(WithForgettingServer), "something that lasts between rounds is not in the"),
}
CHECKS = {check: name for name, (check, _, _) in FAULTS.items()}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_check(fault: str) -> None:
    check, faulty, message = FAULTS[fault]
    with pytest.raises(FailedCheck, match=message):
        check(faulty)


@pytest.mark.parametrize("check", CHECKS, ids=CHECKS.values())
def test_the_method_without_it_passes(check: Callable[[MethodUnderCheck], None]) -> None:
    check(subject(FedPer))
