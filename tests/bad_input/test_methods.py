"""Mistakes in a custom method: each ends in one line that names the function, and where it is known its line."""

import inspect
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from federation import CONF, EACH_ROUND, build, fit
from refusal import refused
from torch import Tensor, nn

from benchmark.contract import Client, LocalTraining, MiniBatch, Phase, Stage
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round, Terms, Uploads, Values
from benchmark.method import FederatedMethod
from benchmark.run.cli import main
from benchmark.server import ServerRule
from methods.fedvpt import FedVPT


class NoPhases(FedVPT):
    def local_phases(self) -> Any:
        self.training_settings.phase("prompt", "head")


class Unwritten(FedVPT):
    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        del self.training_settings


class UnwrittenForward(FedVPT):
    forward = FederatedMethod.forward


class RemembersANumber(FedVPT):
    remembers = ("best",)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.best = 0.0


class PreparesNothing(FedVPT):
    def prepare(self, client: Client, stage: Stage, split: str) -> Any:
        self.prompt()


class Transforms(FedVPT):
    def local_phases(self) -> list[Phase]:
        return [replace(phase, transform=self.changed) for phase in super().local_phases()]

    def changed(self, client: Client, update: Values) -> Any:
        raise NotImplementedError


class ChangesToANumber(Transforms):
    def changed(self, client: Client, update: Values) -> Any:
        return {"prompt.tokens": 0.0}


class ChangesByItself(Transforms):
    def changed(self, client: Client, update: Values) -> Any:
        return update["prompt.tokens"] / 2


class ChangesAPrefix(Transforms):
    def changed(self, client: Client, update: Values) -> Any:
        return {"prompt": update["prompt.tokens"] / 2}


class ChangesItsShape(Transforms):
    def changed(self, client: Client, update: Values) -> Any:
        return {"prompt.tokens": update["prompt.tokens"].sum(0)}


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


class Draws(FedVPT):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x))


class DrawsWithNumPy(FedVPT):
    def forward(self, x: Tensor) -> Tensor:
        scale = float(np.random.rand())  # noqa: NPY002
        return super().forward(scale * x)


class LossOfEachImage(FedVPT):
    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        return nn.functional.cross_entropy(self(batch.x), batch.y, reduction="none")


class LossOfNothing(FedVPT):
    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        loss = super().client_loss(client, batch)
        assert isinstance(loss, Tensor)
        return loss.detach()


class ReportsALoss(FedVPT):
    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        loss = super().client_loss(client, batch)
        return loss, {"loss": loss}


class ReportsEachImage(FedVPT):
    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        return super().client_loss(client, batch), {"label": batch.y.float()}


class NoLoss(FedVPT):
    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        super().client_loss(client, batch)


class LogitsOfOneImage(FedVPT):
    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        return self(batch.x).mean(0)


class TooManyClasses(FedVPT):
    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        return nn.functional.pad(self(batch.x), (2, 0), value=9.0)


class TooFewClasses(FedVPT):
    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        return self(batch.x)[:, :3]


class MisspellsAPart(FedVPT):
    def local_phases(self) -> list[Phase]:
        return [self.training_settings.phase("prompt", "haed")]


class NamesAString(FedVPT):
    personal: Any = "head"


class KeepsItsTraining(FedVPT):
    def __init__(self, *arguments: Any, training: LocalTraining, **named: Any) -> None:
        super().__init__(*arguments, training=training, **named)
        self.training = training  # type: ignore[assignment]


class UploadsANumber(FedVPT):
    uploads = ("count",)

    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        return super().client_loss(client, batch), {"count": 3}


class UploadsNothing(FedVPT):
    uploads = ("count",)


class SendsAPrefix(ServerRule):
    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        return Broadcast({"prompt": torch.zeros(2, 64)})


class SendsTooMany(ServerRule):
    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        return Broadcast(own={"prompt.tokens": shared["prompt.tokens"].expand(100, -1, -1)})


class SendsEachTheSame(ServerRule):
    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        return Broadcast(own={"advice": torch.zeros(2)})


class MasksWithNumbers(ServerRule):
    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        return Broadcast(own={"advice": torch.zeros(len(clients), 2)}, masks={"advice": torch.ones(2)})


class MakesAPrefix(ServerRule):
    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        return {"prompt": shared["prompt.tokens"]}


class MakesPersonalValues(ServerRule):
    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        return {"head.bias": torch.zeros(8)}


class SelectsTwice(ServerRule):
    def select(self, number: int) -> list[int]:
        return [3, 1, 3]


class SelectsAStranger(ServerRule):
    def select(self, number: int) -> list[int]:
        return [1, 99]


class MakesNothing(ServerRule):
    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Any:
        super().aggregate(round, shared, uploads)


class SendsValues(ServerRule):
    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Any:
        return shared


class MakesOneRow(ServerRule):
    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        return {"prompt.tokens": shared["prompt.tokens"][:1]}


class AsksAutograd(FedVPT):
    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        loss = super().client_loss(client, batch)
        assert isinstance(loss, Tensor)
        return loss + torch.autograd.grad(loss, [self.head.weight])[0].square().sum()


class GoesBackward(FedVPT):
    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        loss = super().client_loss(client, batch)
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss


class RemembersNothing(FedVPT):
    def client_loss(self, client: Client, batch: MiniBatch) -> Any:
        away = self.head.bias - client.previous["head.bias"]
        return super().client_loss(client, batch), {"away": away.square().sum()}


class AsksForNoise(FedVPT):
    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        return self(batch.x) + batch.noise["shift"]


class ReadsNoImages(FedVPT):
    inputs = ("features",)

    def frozen_features(self, x: Tensor) -> Values:
        return {"mean": x.mean((2, 3))}

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        return self(batch.x)


class StartsNothing(ServerRule):
    def start(self, initial: Values, terms: Terms) -> None:
        self.rounds = 0


class SelectsAtTheStart(ServerRule):
    def start(self, initial: Values, terms: Terms) -> None:
        self.first = self.select(1)
        super().start(initial, terms)


class Wraps(ServerRule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ServerRule()


class WritesAggregate(ServerRule):
    def aggregate(self, round: Round, shared: Values, uploads: Uploads) -> Values:
        for value in shared.values():
            value.mul_(0)
        return {}


class WritesAMean(WritesAggregate):
    @property
    def takes_the_mean(self) -> bool:
        return True


class WritesBroadcast(ServerRule):
    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        torch._foreach_mul_([*shared.values()], 0.5)
        return super().broadcast(round, shared, clients)


IN_PLACE = r"changes 'prompt.tokens' in place, which it is given to read; make a new tensor and return it"
MISTAKES = [
    (AsksAutograd, r"AsksAutograd.client_loss, LINE asks autograd for a gradient .*; write torch.func.grad of a func"),
    (GoesBackward, r"GoesBackward.client_loss, LINE asks autograd for a gradient .*; write torch.func.grad of a func"),
    (
        RemembersNothing,
        r'RemembersNothing.client_loss, LINE asks for client.previous\["head.bias"\], and there is nothing; name it in '
        "remembers",
    ),
    (
        AsksForNoise,
        r'AsksForNoise.client_logits, LINE asks for batch.noise\["shift"\], and there is nothing; have draw_noise ret',
    ),
    (
        ReadsNoImages,
        r"ReadsNoImages.client_logits, LINE reads batch.x, and inputs is \('features',\): read batch.features, or add",
    ),
    (StartsNothing, r"StartsNothing.start must call super\(\).start\(initial, terms\) before anything else"),
    (
        SelectsAtTheStart,
        r"SelectsAtTheStart.start must call super\(\).start\(initial, terms\) before anything else",
    ),
    (Wraps, r"Wraps.start must call self.inner.start\(initial, terms\), or the rule inside never starts"),
    (WritesAggregate, f"WritesAggregate.aggregate {IN_PLACE}"),
    (WritesAMean, f"WritesAMean.aggregate {IN_PLACE}"),
    (WritesBroadcast, f"WritesBroadcast.broadcast {IN_PLACE}"),
    (NoPhases, r"NoPhases.local_phases must return a list of phases, .*; it returns None"),
    (Unwritten, r"Unwritten must define local_phases: what a client trains in a round"),
    (UnwrittenForward, r"UnwrittenForward must define forward: images \[B, 3, H, W\] to logits \[B, C\]"),
    (RemembersANumber, r"RemembersANumber: remembers names 'best', which has no parameter"),
    (PreparesNothing, r"PreparesNothing.prepare .*must return tensors alone"),
    (ChangesToANumber, r"ChangesToANumber.changed .*must return tensors alone"),
    (ChangesByItself, r"ChangesByItself.changed must return a dict of tensors; it returns Tensor"),
    (
        ChangesAPrefix,
        r"ChangesAPrefix.changed gives 'prompt' of shape \(2, 64\); expected .*: head.bias, head.weight, prompt.tokens",
    ),
    (
        ChangesItsShape,
        r"ChangesItsShape.changed gives 'prompt.tokens' of shape \(64,\); expected \(2, 64\)",
    ),
    (
        AsksWhoItIs,
        r"AsksWhoItIs.client_loss, LINE asks for client.id; a client has parameters, received, class_counts, round, ",
    ),
    (AsksForLabels, r"AsksForLabels.client_logits, LINE asks for batch.labels; a batch has x, y, mask"),
    (TakesANumber, r"TakesANumber.client_l\w+, LINE makes a Python number of a tensor"),
    (Decides, r"Decides.client_loss, LINE decides by a tensor's value"),
    (Chooses, r"Chooses.client_loss, LINE makes a tensor whose shape depends on values"),
    (Logs, r"Logs.client_loss, LINE calls self.log; return named tensors beside the loss"),
    (Draws, r"Draws.client_l\w+, LINE draws random numbers from a global generator; draw them in draw_noise"),
    (DrawsWithNumPy, r"DrawsWithNumPy.client_l\w+, LINE draws random numbers from a global generator"),
    (LossOfEachImage, r"LossOfEachImage.client_loss .*must return a scalar, .*; it returns shape \(4,\)"),
    (LossOfNothing, r"LossOfNothing.client_loss .*returns a loss that depends on nothing that is trained"),
    (ReportsALoss, r"ReportsALoss.client_loss .*reports a tensor named 'loss', by which the loss itself is recorded"),
    (NoLoss, r"NoLoss.client_loss .*must return tensors alone; it returns NoneType"),
    (LogitsOfOneImage, r"LogitsOfOneImage.client_logits .*must return logits \[B, C\] .*; it returns \(8,\)"),
    (
        TooManyClasses,
        r"TooManyClasses.client_logits .*logits \[B, C\] of the \d+ images .* and 8 classes; it returns \(\d+, 10",
    ),
    (
        TooFewClasses,
        r"TooFewClasses.client_logits .*logits \[B, C\] of the \d+ images .* and 8 classes; it returns \(\d+, 3\)",
    ),
    (MisspellsAPart, r"MisspellsAPart trains 'haed', which has no parameter"),
    (NamesAString, r"NamesAString.personal is a string; write \('head',\)"),
    (
        KeepsItsTraining,
        r"KeepsItsTraining.training is torch's own flag of a module, and LocalTraining was put there; keep",
    ),
    (UploadsANumber, r"UploadsANumber.client_loss .*must return tensors alone"),
    (UploadsNothing, r"UploadsNothing: uploads names 'count', which is no parameter and which client_loss does not re"),
    (SendsAPrefix, r"SendsAPrefix.broadcast gives 'prompt'; expected the whole name, such as 'prompt.tokens'"),
    (
        SendsTooMany,
        r"SendsTooMany.broadcast gives 'prompt.tokens' of shape \(100, 3, 64\) to \d+ clients; expected \(3, ",
    ),
    (
        SendsEachTheSame,
        r"SendsEachTheSame.broadcast gives 'advice' of shape \(2,\) as \d+ clients' own; expected a row",
    ),
    (
        MasksWithNumbers,
        r"MasksWithNumbers.broadcast gives a mask of 'advice', float32 \(2,\); expected bool \(\d+, 2\)",
    ),
    (MakesAPrefix, r"MakesAPrefix.aggregate gives 'prompt', which is not shared; expected .*: prompt.tokens"),
    (MakesPersonalValues, r"MakesPersonalValues.aggregate gives 'head.bias', which is not shared; expected .*: prompt"),
    (
        SelectsTwice,
        r"SelectsTwice.select gives client 3 twice in round 1; expected some of training_clients, each",
    ),
    (SelectsAStranger, r"SelectsAStranger.select gives client 99, which does not train, in round 1; expected some of"),
    (MakesNothing, r"MakesNothing.aggregate must return new values of shared parameters, .*; it returns NoneType"),
    (SendsValues, r"SendsValues.broadcast must return a Broadcast of what clients receive; it returns dict"),
    (MakesOneRow, r"MakesOneRow.aggregate gives 'prompt.tokens' of shape \(1, 64\); expected \(3, 64\)"),
]


@pytest.mark.parametrize(("kind", "said"), MISTAKES, ids=lambda value: getattr(value, "__name__", ""))
def test_a_mistake_in_a_method_is_named_in_one_line(kind: type, said: str) -> None:
    template, data = build("FedVPT")
    method, callbacks = template, [Server(kind())] if issubclass(kind, ServerRule) else []
    if not callbacks:
        method = kind(8, 11, template.backbone, num_prompts=2, training=LocalTraining(lr=0.1, epochs=1))
    with pytest.raises(ConfigurationError) as error:
        fit(method, data, 1, callbacks, settings=EACH_ROUND)
    line = str(error.value)
    assert "\n" not in line
    assert re.search(said.replace("LINE", rf"line \d+ of {re.escape(__file__)},"), line), line
    if "LINE" in said:
        source, first = inspect.getsourcelines(kind)
        named = int(re.search(r"line (\d+) of", line)[1])  # type: ignore[index]
        assert first < named <= first + len(source), "the line is the mistake's own"


def test_what_is_reported_of_each_image_is_refused_before_training() -> None:
    template, data = build("FedVPT", "--data.clients_at_once=auto")
    method = ReportsEachImage(8, 11, template.backbone, num_prompts=2, training=LocalTraining(lr=0.1, epochs=1))
    said = r"client_loss reports 'label' of shape \(\d+,\), and of \(1,\) in another step; .* on the mini-batch"
    with pytest.raises(ConfigurationError, match=said):
        fit(method, data, 1)


def test_a_part_that_no_phase_trains_is_named() -> None:
    class HeadAlone(FedVPT):
        def local_phases(self) -> list[Phase]:
            return [self.training_settings.phase("head")]

    template, data = build("FedVPT")
    method = HeadAlone(8, 11, template.backbone, num_prompts=2, training=LocalTraining(lr=0.1, epochs=1))
    with pytest.warns(UserWarning, match=r"HeadAlone names prompt\.tokens in shared or personal, and none"):
        fit(method, data, 1)


class Forgetful(FedVPT):
    """Does not call its base's constructor."""

    def __init__(self, num_classes: int, num_clients: int) -> None:
        self.head = nn.Linear(64, num_classes)


class ForgetfulOfANumber(FedVPT):
    """Nor does this one, and it keeps no tensor."""

    def __init__(self, num_classes: int, num_clients: int) -> None:
        self.head = num_classes


def test_a_constructor_that_forgets_its_base_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["fit", "--config", str(CONF / "base.yaml"), f"--model={__name__}.Forgetful"]
    said = refused(capsys, main, arguments)
    line = inspect.getsourcelines(Forgetful.__init__)[1] + 1
    where = f"error: Forgetful.__init__, line {line} of {__file__},"
    assert said == f"{where} sets 'head' before super().__init__(num_clients); call that first"
    arguments[-1] += "OfANumber"
    said = refused(capsys, main, arguments)
    where = f"{__file__}:{inspect.getsourcelines(ForgetfulOfANumber.__init__)[1]}"
    assert said == f"error: ForgetfulOfANumber.__init__ ({where}) must call super().__init__(num_clients) first"
