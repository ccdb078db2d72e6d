"""Mistakes in a method of one's own: each ends in one line that names the function, and where it is known its line."""

import inspect
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from federation import CONF, build, fit
from refusal import refused
from torch import Tensor, nn

from benchmark.cli import main
from benchmark.errors import ConfigurationError
from benchmark.method import Client, LocalTraining, MiniBatch
from benchmark.server import Message, Server
from methods.fedvpt import FedVPT


class NoPhases(FedVPT):
    def local_phases(self) -> Any:
        self.training_settings.phase("prompt", "head")


class KeepsANumber(FedVPT):
    def kept_state(self) -> Any:
        return {"best": 0.0}


class PreparesNothing(FedVPT):
    def prepare(self, client: Client, kind: str, split: str) -> Any:
        self.prompt()


class ForgetsAPart(FedVPT):
    def kept_state(self) -> dict[str, Tensor]:
        return {"rounds": torch.zeros(()), "best": torch.zeros(2)}

    def after_local_training(self, client: Client) -> dict[str, Tensor]:
        return {"rounds": client.kept["rounds"] + 1}


class AsksWhoItIs(FedVPT):
    def client_loss(self, client: Any, batch: MiniBatch) -> Tensor:
        return super().client_loss(client, batch) * client.id


class AsksForLabels(FedVPT):
    def client_logits(self, client: Client, batch: Any) -> Tensor:
        return self(batch.x) + batch.labels


class TakesANumber(FedVPT):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * x.mean().item()


class Decides(FedVPT):
    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        loss = super().client_loss(client, batch)
        return loss if loss > 1 else 2 * loss


class Chooses(FedVPT):
    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        return super().client_loss(client, batch) + batch.x[batch.mask].mean()


class Logs(FedVPT):
    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        loss = super().client_loss(client, batch)
        self.log("mine", loss)
        return loss


class LossOfEachImage(FedVPT):
    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        return nn.functional.cross_entropy(self(batch.x), batch.y, reduction="none")


class NoLoss(FedVPT):
    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        super().client_loss(client, batch)


class LogitsOfOneImage(FedVPT):
    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        return self(batch.x).mean(0)


class UploadsANumber(FedVPT):
    def client_upload(self, client: Client, totals: dict[str, Tensor]) -> Any:
        return {"count": 3}


class SendsAPrefix(Server):
    def broadcast(self, method: Any, clients: Sequence[int]) -> Message:
        return {"prompt": torch.zeros(2, 64)}


class SendsTooMany(Server):
    def broadcast(self, method: Any, clients: Sequence[int]) -> Message:
        return {"prompt.tokens": method.template("prompt.tokens").expand(100, -1, -1)}


class AsksForAPrefix(Server):
    def broadcast(self, method: Any, clients: Sequence[int]) -> Message:
        return {"prompt.tokens": method.template("prompt")}


MISTAKES = [
    (NoPhases, r"NoPhases.local_phases must return a list of phases, .*; it returns None"),
    (KeepsANumber, r"KeepsANumber.kept_state must return a dict of tensors; it returns {'best': 'float'}"),
    (PreparesNothing, r"PreparesNothing.prepare .*must return tensors alone"),
    (
        ForgetsAPart,
        r"ForgetsAPart.after_local_training must return all of kept_state, {'rounds': \(\), 'best': \(2,\)} .*; it "
        r"returns {'rounds': \(\)}",
    ),
    (AsksWhoItIs, r"AsksWhoItIs.client_loss, LINE asks for client.id; a client has parameters, received, kept, "),
    (AsksForLabels, r"AsksForLabels.client_logits, LINE asks for batch.labels; a batch has x, y, mask"),
    (TakesANumber, r"TakesANumber.client_l\w+, LINE makes a Python number of a tensor"),
    (Decides, r"Decides.client_loss, LINE decides by a tensor's value"),
    (Chooses, r"Chooses.client_loss, LINE makes a tensor whose shape depends on values"),
    (Logs, r"Logs.client_loss, LINE calls self.log; return named tensors beside the loss"),
    (LossOfEachImage, r"LossOfEachImage.client_loss .*must return a scalar, .*; it returns shape \(4,\)"),
    (NoLoss, r"NoLoss.client_loss .*must return tensors alone"),
    (LogitsOfOneImage, r"LogitsOfOneImage.client_logits .*must return logits \[B, C\] .*; it returns \(8,\)"),
    (UploadsANumber, r"UploadsANumber.client_upload .*must return tensors alone"),
    (
        SendsAPrefix,
        r"SendsAPrefix.broadcast gives 'prompt' of shape .* the whole name of a parameter, such as 'prompt.t",
    ),
    (
        SendsTooMany,
        r"SendsTooMany.broadcast gives 'prompt.tokens' of shape \(100, 3, 64\) to \d+ clients; expected \(3, ",
    ),
    (AsksForAPrefix, r"FedVPT has no parameter 'prompt'; below it are prompt.tokens"),
]


@pytest.mark.parametrize(("kind", "said"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_in_a_method_is_named_in_one_line(kind: type, said: str) -> None:
    template, data = build("FedVPT")
    method, callbacks = template, [kind()] if issubclass(kind, Server) else []
    if not callbacks:
        method = kind(8, 11, template.backbone, 2, LocalTraining(lr=0.1, epochs=1))
    with pytest.raises(ConfigurationError) as error:
        fit(method, data, 1, callbacks)
    line = str(error.value)
    assert "\n" not in line
    assert re.search(said.replace("LINE", rf"line \d+ of {re.escape(__file__)},"), line), line
    if "LINE" in said:
        source, first = inspect.getsourcelines(kind)
        named = int(re.search(r"line (\d+) of", line)[1])  # type: ignore[index]
        assert first < named <= first + len(source), "the line is the mistake's own"


class Forgetful(FedVPT):
    """Does not call its base's constructor."""

    def __init__(self, num_classes: int, num_clients: int) -> None:
        self.head = nn.Linear(64, num_classes)


def test_a_constructor_that_forgets_its_base_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", "--config", str(CONF / "base.yaml"), f"--model={__name__}.Forgetful"]
    said = refused(capsys, main, arguments)
    assert said == "error: Forgetful.__init__ sets 'head' before super().__init__(num_clients); call that first"
