"""The hooks of the contract that only some families use: each on a small method made for it."""

import gc
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import EACH_ROUND, Ragged, TinyImages, Witness, build, first_step, fit, learned
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from benchmark.checks.outcome import require_equal
from benchmark.contract import Client, LocalTraining, MiniBatch, Phase, Stage
from benchmark.engine.batches.noise import drawn_noise
from benchmark.engine.plan.work import Step
from benchmark.engine.rounds import Server
from benchmark.errors import ConfigurationError
from benchmark.federation import Broadcast, Round, Values
from benchmark.records.hashes import manifest_hash
from benchmark.server import ServerRule
from datamodules.federated import FederatedDataModule
from datamodules.manifest import FromManifest, write_manifest
from datamodules.partition import ClientSplits
from datamodules.source import ImagePool
from methods.fedavg import FedAvg
from methods.fedvpt import FedVPT
from methods.losses import cross_entropy

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*eval mode.*")


def fedavg(kind: type, *overrides: str) -> tuple[Any, Any]:
    template, data = build("FedAvg", *overrides)
    return kind(8, 11, template.backbone, training=LocalTraining(lr=0.02, epochs=1)), data


def fedvpt(kind: type, *overrides: str, **training: Any) -> tuple[Any, Any]:
    template, data = build("FedVPT", *overrides)
    settings = LocalTraining(**{"lr": 0.1, "epochs": 1, **training})
    return kind(8, 11, template.backbone, num_prompts=2, training=settings), data


class Disclosing(FedVPT):
    """The prompt stays with its client, and the server sees it."""

    shared = ()
    personal = ("prompt", "head")
    uploads = ("prompt",)

    def make_server(self) -> ServerRule:
        return Watching()


class Watching(Witness):
    """Remembers uploads, and sends everybody sevens in the prompt's name."""

    def broadcast(self, round: Round, shared: Values, clients: tuple[int, ...]) -> Broadcast:
        return Broadcast({"prompt.tokens": torch.full((2, 64), 7.0)})


def test_personal_parameters_that_are_uploaded_stay_with_their_client() -> None:
    method, data = fedvpt(Disclosing, "--data.clients_per_round=4")
    fit(method, data, 2)
    rows = method.store.all_rows("prompt.tokens")
    last = method.server.rule.last
    for client in range(11):
        if client in last:
            assert set(last[client]) == {"prompt.tokens"}
            assert torch.equal(last[client]["prompt.tokens"], rows[client])
            assert rows[client].abs().max() < 5, "a broadcast never overwrites what is personal"
        else:
            assert torch.equal(rows[client], method.get_parameter("prompt.tokens"))
    assert method.server.traffic.per_client()["up_floats"] == method.get_parameter("prompt.tokens").numel()


class Preparing(FedVPT):
    """Keeps the prompt that a client starts from in ``prepared``, and pulls towards it."""

    calls: list[tuple[Stage, str]]

    def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
        self.calls.append((stage, split))
        return {"anchor": self.prompt() * 2, "head": client.parameters["head.weight"].clone()}

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        assert not client.prepared["anchor"].requires_grad
        return super().client_loss(client, batch) + (self.prompt() - client.prepared["anchor"]).square().sum()


def test_nothing_that_prepare_does_is_differentiated() -> None:
    seen: list[bool] = []

    class Asking(Preparing):
        def prepare(self, client: Client, stage: Stage, split: str) -> dict[str, Tensor]:
            seen.append(torch.is_grad_enabled())
            return super().prepare(client, stage, split)

    method, data = fedvpt(Asking, "--data.clients_per_round=2")
    method.calls = []
    fit(method, data, 1)
    assert seen
    assert not any(seen)


class Drawing(FedVPT):
    """Draws two numbers a step."""

    def draw_noise(self, generator: torch.Generator, batch_size: int, stage: Stage) -> dict[str, Tensor]:
        return {"numbers": torch.rand(2, generator=generator)}


def test_draws_are_a_clients_own_in_each_step_whoever_is_stepped_with_it() -> None:
    method, _ = fedvpt(Drawing)

    def drawn(clients: tuple[int, ...], seed: int = 0, round: int = 1, phase: int = 0, number: int = 0) -> Tensor:
        step = Step(clients, clients, Stage.TRAIN, round, phase, number)
        return drawn_noise(method, seed, step, 3, torch.zeros(1))["numbers"]

    others = (drawn((0, 1, 2)), drawn((0,), seed=1), drawn((0,), round=2), drawn((0,), phase=1), drawn((0,), number=1))
    assert len(torch.cat(others).unique()) == 2 * 7
    assert torch.equal(drawn((2, 0)), others[0][[2, 0]])


def test_prepare_is_called_once_a_round_and_once_an_evaluation() -> None:
    results = []
    for width in (1, 4):
        sizes = (f"--data.clients_at_once={width}", "--data.eval_batch_size=10000")
        method, data = fedvpt(Preparing, *sizes, "--data.clients_per_round=4", lr=0.01)
        method.calls = []
        # in float64, where a product's rounding by its number of rows cannot hide what a client's step depends on
        fit(method, data, 1, settings={**EACH_ROUND, "precision": "64-true"})
        # in round 0 once, in round 1 at the points server and local; all clients fit into one step
        assert method.calls.count((Stage.EVALUATE, "test")) == 1 + 2
        assert method.calls.count((Stage.TRAIN, "train")) == math.ceil(4 / width)
        results.append(learned(method))
    require_equal(*results, "what is prepared depends on who else is stepped", tolerance=1e-12)


class LinearProbe(FedVPT):
    """A head on the frozen ViT's features, which may be cached."""

    inputs = ("features",)

    def frozen_features(self, x: Tensor) -> dict[str, Tensor]:
        return {"cls": self.backbone(x)}

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        return cross_entropy(self.head(batch.features["cls"]), batch.y, batch.mask)

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        return self.head(batch.features["cls"])


@pytest.mark.parametrize("overrides", [[], ["--data.transform.augment=fedbn"]])
def test_cached_features_change_nothing(overrides: list[str]) -> None:
    results, touched = [], []
    for cached in ("true", "false", "auto"):
        method, data = fedvpt(LinearProbe, f"--data.cache_features={cached}", *overrides)
        shapes: list[torch.Size] = []
        loss = method.client_loss

        def spy(client: Client, batch: MiniBatch, loss: Any = loss, shapes: Any = shapes) -> Tensor:
            shapes.append(batch.x.shape)
            return loss(client, batch)

        method.client_loss = spy
        fit(method, data, 2)
        touched.append(any(shape[1] for shape in shapes))
        results.append(learned(method))
    assert touched == [bool(overrides), True, bool(overrides)], "cached runs do not touch training images"
    for name, value in results[0].items():
        for other in results[1:]:
            torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-5, equal_nan=True)


class SharedModule(FedVPT):
    """Has the module of its prompt under a second name."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.twin = self.prompt

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        assert self.twin() is self.prompt()
        return super().client_loss(client, batch) + 0 * self.twin().sum()


class TiedWeights(FedVPT):
    """Has its prompt's parameter in a second module too."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.twin = torch.nn.ParameterDict({"tokens": self.prompt.tokens})

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        assert self.twin["tokens"] is self.prompt.tokens
        return super().client_loss(client, batch) + 0 * self.twin["tokens"].sum()


@pytest.mark.parametrize("kind", [SharedModule, TiedWeights])
def test_a_parameter_with_two_names_is_the_clients_under_both(kind: type) -> None:
    method, data = fedvpt(kind)
    start = method.prompt.tokens.detach().clone()
    fit(method, data, 1)
    plain, data = fedvpt(FedVPT)
    fit(plain, data, 1)
    assert torch.equal(method.get_parameter("prompt.tokens"), plain.get_parameter("prompt.tokens"))
    assert not torch.equal(method.get_parameter("prompt.tokens"), start)


class Hoarding(FedVPT):
    """Keeps its last loss, with the graph that made it."""

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        self.last_loss = super().client_loss(client, batch)
        return self.last_loss


def test_a_tensor_kept_with_its_graph_is_refused_before_it_spoils_a_gradient() -> None:
    # cohorts of 4 and 3 clients: torch would sum the second's gradients over its clients
    method, data = fedvpt(Hoarding, "--data.clients_at_once=4")
    with pytest.raises(RuntimeError, match="Hoarding holds a tensor of an earlier cohort with the graph that made it"):
        fit(method, data, 1)


class Circling(FedVPT):
    """Leaves its loss in something that refers to itself, as torch.compile may."""

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        loss = super().client_loss(client, batch)
        circle: list[Any] = [loss]
        circle.append(circle)
        return loss


def test_a_tensor_that_is_garbage_is_let_go() -> None:
    found = []
    for kind in (Circling, FedVPT):
        method, data = fedvpt(kind, "--data.clients_at_once=4")
        gc.disable()  # as commands do
        try:
            fit(method, data, 1)
        finally:
            gc.enable()
        found.append(method.get_parameter("prompt.tokens"))
    assert torch.equal(*found)


class Counting(FedAvg):
    """Counts the labels it meets, and uploads the counts beside how many of each it holds."""

    uploads = ("counts", "held")

    def client_loss(self, client: Client, batch: MiniBatch) -> tuple[Tensor, dict[str, Tensor]]:
        classes = torch.arange(8)
        counts = ((batch.y[:, None] == classes) & batch.mask[:, None]).sum(0).float()
        named = {"counts": counts, "held": client.class_counts.float(), "images": batch.mask.sum().float()}
        return super().client_loss(client, batch), named


@pytest.mark.parametrize("width", [1, 3])
def test_totals_of_a_round_are_uploaded_and_scalars_recorded(width: int) -> None:
    method, data = fedavg(Counting, f"--data.clients_at_once={width}", "--data.clients_per_round=11")
    witness = Witness()
    trainer = fit(method, data, 1, [Server(witness)])
    (uploads,) = witness.seen
    assert uploads.clients == tuple(range(11))
    for client, rows in enumerate(data.splits.train):
        expected = np.bincount(data.pool.labels.numpy()[rows], minlength=8)
        assert uploads.values["counts"][client].tolist() == expected.tolist()
        steps = math.ceil(len(rows) / data.batch_size)
        assert uploads.values["held"][client].tolist() == (steps * expected).tolist()
    recorded = trainer.callbacks[0].values[1, "local", "train", "images"]
    steps = [math.ceil(len(rows) / data.batch_size) for rows in data.splits.train]
    assert recorded.tolist() == pytest.approx([len(r) / s for r, s in zip(data.splits.train, steps, strict=True)])
    assert (1, "local", "train", "loss") in trainer.callbacks[0].values
    assert set(uploads.values) == {*method.roles.shared, "counts", "held"}, "what is reported alone is not sent"
    numbers = sum(value[0].numel() for value in uploads.values.values())
    assert method.server.traffic.per_client()["up_floats"] == numbers


def test_an_upload_may_not_take_the_name_of_a_parameter_that_is_not_personal() -> None:
    class Clashing(FedAvg):
        uploads = ("head.weight",)

        def client_loss(self, client: Client, batch: MiniBatch) -> tuple[Tensor, dict[str, Tensor]]:
            return super().client_loss(client, batch), {"head.weight": client.parameters["head.weight"]}

    method, data = fedavg(Clashing)
    with pytest.raises(ConfigurationError, match=r"Clashing: uploads names 'head.weight', which is not personal"):
        fit(method, data, 1)


class Halved(FedVPT):
    """Takes half of every step on the prompt."""

    def local_phases(self) -> list[Phase]:
        return [replace(phase, transform=self.halved) for phase in super().local_phases()]

    def halved(self, client: Client, update: Values) -> Values:
        assert set(update) == {"prompt.tokens", "head.weight", "head.bias"}
        return {"prompt.tokens": 0.5 * update["prompt.tokens"]}


def test_an_update_can_be_transformed() -> None:
    overrides = ["--data.batch_size=64", "--data.clients_per_round=11", "--data.clients_at_once=4"]
    (plain, data), (halved, other) = (fedvpt(kind, *overrides) for kind in (FedVPT, Halved))
    start = plain.prompt.tokens.detach().clone()
    fit(plain, data, 1)
    fit(halved, other, 1)
    # One step a client: every client's prompt moves half as far, and so does their mean; heads are untouched by it.
    torch.testing.assert_close(
        halved.get_parameter("prompt.tokens") - start, 0.5 * (plain.get_parameter("prompt.tokens") - start)
    )
    assert torch.equal(halved.store.all_rows("head.weight"), plain.store.all_rows("head.weight"))


class Cosine(FedVPT):
    def local_phases(self) -> list[Phase]:
        return [LocalTraining(lr=0.4, epochs=1, schedule="cosine").phase("prompt", "head")]


class Rates(Callback):
    """Notes the learning rate of each step, and ends the run after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.seen: dict[float, None] = {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        def note(cohort: Any, step: Any) -> None:
            self.seen[trainer.optimizers[0].param_groups[0]["lr"]] = None

        pl_module.simulation.local_steps.on_step.append(note)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.rounds


def test_a_cosine_schedule_runs_over_the_rounds_and_survives_a_resume(tmp_path: Path) -> None:
    expected = [0.4 * 0.5 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]
    first, rest = Rates(2), Rates(4)
    method, data = fedvpt(Cosine)
    fit(method, data, 4, [first], save_to=tmp_path)
    assert list(first.seen) == pytest.approx(expected[:2])
    method, data = fedvpt(Cosine)
    fit(method, data, 4, [rest], ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"))
    assert list(rest.seen) == pytest.approx(expected[2:])


class Rescaled(FedVPT):
    """Clients that never train fit their head, and the server then doubles it."""

    def finetune_phases(self, new: bool) -> list[Phase]:
        return [LocalTraining(lr=0.5, epochs=2).phase("head"), LocalTraining(lr=0.0, epochs=1).phase("head")]

    def make_server(self) -> ServerRule:
        return Doubling()


class Doubling(ServerRule):
    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def adapt(self, round: Round, clients: tuple[int, ...], phase: int, values: Values) -> Values:
        assert set(values) == {"prompt.tokens"}, "the head is the client's own"
        self.norms.append(values["prompt.tokens"].norm().item())
        return {"prompt.tokens": 2 * values["prompt.tokens"]} if phase == 0 else {}


def test_new_clients_never_train_and_are_fitted_on_a_copy_before_their_test() -> None:
    method, data = fedvpt(Rescaled, "--data.new_clients=0.5", "--data.clients_per_round=3")
    new, old = data.new_clients, data.training_clients
    assert (len(new), sorted(new + old)) == (6, list(range(11)))
    trainer = fit(method, data, 2)
    assert all(set(method.server.rule.select(r)) <= set(old) for r in range(1, 20))
    rows = method.store.all_rows("head.weight")
    fresh, _ = fedvpt(Rescaled)
    assert all(torch.equal(rows[c], fresh.head.weight) for c in new), "the copy is thrown away"
    values = trainer.callbacks[0].values
    tested, fitted = values[2, "server", "test", "accuracy"], values[2, "server", "new", "accuracy"]
    assert (~tested.isnan()).nonzero().flatten().tolist() == old
    assert (~fitted.isnan()).nonzero().flatten().tolist() == new
    first, second = method.server.rule.norms[-2:]
    assert second == pytest.approx(2 * first)
    assert not any(point == "local" and split == "new" for _, point, split, _ in values)


class TwoSpaces(Ragged):
    """Classes 0 to 4 are trained, 5 to 7 are only tested, in an order of their own."""

    further_splits = ("novel",)

    def assign(self, pool: ImagePool, rng: np.random.Generator) -> ClientSplits:
        labels, test = pool.labels.numpy(), pool.test.numpy()
        base, novel = (6, 2, 1, 0, 4), (7, 3, 5)
        train = np.flatnonzero(np.isin(labels, base) & ~test)
        held = np.flatnonzero(np.isin(labels, base) & test)
        other = np.flatnonzero(np.isin(labels, novel) & test)
        cut = [rows.astype(np.int64) for rows in np.array_split(train, 11)]
        return ClientSplits(
            cut,
            [held] * 11,
            {"novel": [other] * 11},
            {"train": base, "test": base, "novel": novel},
        )


class AnyClasses(FedVPT):
    open_vocabulary = True

    def client_logits(self, client: Client, batch: MiniBatch) -> Tensor:
        return self(batch.x)[:, list(self.label_spaces[batch.split])]

    def client_loss(self, client: Client, batch: MiniBatch) -> Tensor:
        return cross_entropy(self.client_logits(client, batch), batch.y, batch.mask)


@pytest.mark.parametrize(("conf", "width"), [("FedAvg", 1), ("FedVPT", 3)])
def test_few_frames_lie_between_a_step_and_client_loss_and_phases_are_made_once(conf: str, width: int) -> None:
    method, data = build(conf, f"--data.clients_at_once={width}")
    client_loss, local_phases = method.client_loss, method.local_phases
    stacks: list[list[str]] = []

    def own_frames() -> list[str]:
        frames, frame = [], sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_name != "training_step":
            if "benchmark" in Path(frame.f_code.co_filename).parts:
                frames.append(frame.f_code.co_qualname)
            frame = frame.f_back
        return frames if frame.f_code.co_name == "training_step" else ["no step"]

    def loss(client: Client, batch: MiniBatch) -> Any:
        stacks.append(own_frames())
        return client_loss(client, batch)

    def phases() -> list[Phase]:
        assert own_frames() == ["no step"]
        return local_phases()

    method.client_loss, method.local_phases = loss, phases
    fit(method, data, 1)
    assert stacks
    # The call that records a step comes from further below, once.
    as_written = [frames for frames in stacks if "recorded.<locals>.gradients" not in frames]
    assert {len(frames) for frames in as_written} == {4}, as_written[0]


def test_labels_count_within_the_label_space_of_their_split() -> None:
    method, _ = fedvpt(AnyClasses)
    data = FederatedDataModule(TinyImages(), TwoSpaces(), batch_size=4)
    fit(method, data, 1)
    step = first_step(data.val_dataloader())
    assert step.split == "test"
    batch = method.simulation.images.fill(step)
    classes = data.pool.labels[step.index[0][step.mask[0]]]
    assert [(6, 2, 1, 0, 4)[i] for i in batch.y[0][batch.mask[0]]] == classes.tolist()
    assert method.evaluation.scores["server", "test"].num_classes == 5
    assert method.evaluation.scores["server", "novel"].num_classes == 3
    assert data.manifest["label_spaces"]["novel"] == [7, 3, 5]


def test_label_spaces_survive_a_manifest(tmp_path: Path) -> None:
    data = FederatedDataModule(TinyImages(), TwoSpaces())
    data.setup()
    write_manifest(tmp_path / "split.json", data.manifest)
    again = FederatedDataModule(TinyImages(), FromManifest(str(tmp_path / "split.json")))
    again.setup()
    assert manifest_hash(again.manifest) == manifest_hash(data.manifest)
    assert again.label_spaces == data.label_spaces
    assert all(
        np.array_equal(a, b) for a, b in zip(again.splits.others["novel"], data.splits.others["novel"], strict=True)
    )
    text = (tmp_path / "split.json").read_text().replace('"novel": [3', '"novel": [11')
    (tmp_path / "changed.json").write_text(text.replace('"others": {"novel": [', '"others": {"novel": [0, ', 1))
    with pytest.raises(ConfigurationError, match="split 'novel' do not have the recorded sha256"):
        FromManifest(str(tmp_path / "changed.json"))


def test_a_method_of_fixed_classes_refuses_label_spaces() -> None:
    method, _ = fedvpt(FedVPT)
    data = FederatedDataModule(TinyImages(), TwoSpaces(), batch_size=4)
    with pytest.raises(ConfigurationError, match="FedVPT classifies among all classes"):
        fit(method, data, 1)


class Anchored(FedVPT):
    """Held near where its own head was when the round began."""

    moved: list[float]

    def prepare(self, client: Client, stage: Stage, split: str) -> Values:
        """The head as it is."""
        return {"start": client.parameters["head.weight"]}

    def client_loss(self, client: Client, batch: Any) -> tuple[Tensor, Values]:
        """The loss, and how far the head has moved since ``prepare``."""
        moved = (client.parameters["head.weight"] - client.prepared["start"]).square().sum()
        return super().client_loss(client, batch) + 0 * moved, {"moved": moved.detach()}


@pytest.mark.parametrize("width", [1, 4])
def test_what_prepare_returns_stays_as_it_was(width: int) -> None:
    template, data = build("FedVPT", f"--data.clients_at_once={width}")
    method = Anchored(8, 11, template.backbone, num_prompts=2, training=LocalTraining(lr=0.1, epochs=1))
    trainer = fit(method, data, 1)
    moved = trainer.callbacks[0].values[1, "local", "train", "moved"]
    assert (moved[~moved.isnan()] > 0).any()


@pytest.mark.parametrize("asked", ["current_epoch", "global_step"])
def test_a_step_does_not_ask_the_trainer_how_far_it_is(asked: str) -> None:
    class Scheduled(FedAvg):
        def client_loss(self, client: Client, batch: Any) -> Any:
            """The loss, ten times as much later on."""
            return super().client_loss(client, batch) * (10 if getattr(self, asked) > 2 else 1)

    template, data = build("FedAvg")
    method = Scheduled(8, 11, template.backbone, training=LocalTraining(lr=0.02, epochs=1))
    assert getattr(method, asked) == 0
    with pytest.raises(MisconfigurationException, match=rf"self\.{asked} in a step, .* client\.round\.number"):
        fit(method, data, 1)


class InTwoSteps(FedAvg):
    """The backbone is trained, then backbone and head; the head begins anew in the second phase."""

    shared = ("backbone",)
    personal = ("head",)

    def local_phases(self) -> list[Phase]:
        both = self.training_settings.phase("backbone", "head")
        return [self.training_settings.phase("backbone"), replace(both, restart=True)]


def test_a_restart_is_of_the_personal_parameters_of_the_phase_alone() -> None:
    method, data = fedavg(InTwoSteps)
    data.setup()
    data.match(method)
    simulation = method.join(data)
    initial = {name: method.get_parameter(name).clone() for name in method.roles.trained}
    phase = method.local_phases()[1]
    optimizer = simulation.local_steps.optimizers(method.local_phases())[1]
    simulation.slots.fill({name: value.expand(3, *value.shape) + 1 for name, value in initial.items()})
    simulation.local_steps.start(phase, optimizer, 1.0, {})
    for name, value in initial.items():
        expected = value if name in method.roles.personal else value + 1
        torch.testing.assert_close(simulation.slots.of(name).detach(), expected.expand(3, *value.shape))


def test_a_loss_may_come_with_the_gradient_of_something_else() -> None:
    class Doubled(FedVPT):
        def client_loss(self, client: Client, batch: MiniBatch) -> Any:
            loss = cross_entropy(self(batch.x), batch.y, batch.mask)
            return loss.detach() + (2 * loss - 2 * loss.detach())  # the last part is zero to the bit

    doubled, data = fedvpt(Doubled, steps=1)
    fit(doubled, data, 1)
    plain, data = fedvpt(FedVPT, steps=1, lr=0.2)
    fit(plain, data, 1)
    found, expected = learned(doubled), learned(plain)
    assert any("loss" in name for name in expected)
    torch.testing.assert_close(found, expected, equal_nan=True)
