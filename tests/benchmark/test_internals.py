"""The private doors of torch and Lightning: each is open, and does what it is used for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federation import build, fit
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn
from torch.func import grad, vmap

from benchmark import internals
from benchmark.internals import gradient_shape, has_hooks, is_batchedtensor, is_gradtrackingtensor, without_autocast


def test_functorch_says_which_tensors_are_mapped_or_differentiated() -> None:
    seen = []

    def looked_at(x: Any) -> Any:
        seen.append((is_batchedtensor(x), is_gradtrackingtensor(x), internals.is_functorch_wrapped_tensor(x)))
        return x.sum()

    looked_at(torch.ones(2))
    vmap(looked_at)(torch.ones(2, 3))
    grad(looked_at)(torch.ones(3))
    assert seen == [(False, False, False), (True, False, True), (False, True, True)]


def test_onednn_computes_a_layer() -> None:
    """Ask torch whether it is built with oneDNN, as its builds for Intel's and AMD's processors are."""
    assert internals.has_onednn() is torch.backends.mkldnn.is_available()
    if internals.has_onednn():
        x, weight, bias = torch.randn(3, 5, 4), torch.randn(6, 4), torch.randn(6)
        torch.testing.assert_close(
            internals.onednn_linear(x, weight, bias), torch.nn.functional.linear(x, weight, bias)
        )


def test_operations_below_autocast_keep_their_types() -> None:
    a = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        assert (a @ a).dtype == torch.bfloat16
        with without_autocast():
            assert (a @ a).dtype == torch.float32
        assert (a @ a).dtype == torch.bfloat16


def test_copies_are_made_into_the_same_memory() -> None:
    into = [torch.zeros(2), torch.zeros(3, 1)]
    views = [tensor.view(-1) for tensor in into]
    internals.copy_all(into, (torch.ones(2), torch.full((3, 1), 2.0)))
    assert [view.tolist() for view in views] == [[1.0, 1.0], [2.0, 2.0, 2.0]]


@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_every_kind_of_hook_is_seen_until_it_is_removed(kind: str) -> None:
    module = nn.Linear(1, 1)
    assert not has_hooks(module)
    handle = getattr(module, f"register_{kind}")(lambda *given: None)
    assert has_hooks(module)
    handle.remove()
    assert not has_hooks(module)


def test_a_living_graph_tells_the_shape_of_its_gradients() -> None:
    parameter = nn.Parameter(torch.ones(4, 2))
    graph = parameter * 2
    parameter.data = torch.ones(3, 2)
    assert gradient_shape(parameter) == (4, 2)
    del graph
    assert gradient_shape(parameter) == (3, 2)


def test_layers_belong_to_the_families_that_are_asked_for() -> None:
    assert issubclass(nn.BatchNorm1d, internals.BATCH_NORMS)
    assert issubclass(nn.InstanceNorm2d, internals.NORMS_WITH_STATISTICS)
    assert issubclass(nn.Dropout2d, internals.DROPOUTS)
    assert not issubclass(nn.GroupNorm, internals.NORMS_WITH_STATISTICS)


class Looks(Callback):
    """Notes Lightning's count of steps, and keeps the Trainer from ending early."""

    def __init__(self) -> None:
        self.counted: list[int] = []
        self.taken: list[Any] = []

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Have every step noted."""
        pl_module.simulation.local_steps.on_step.append(lambda cohort, step: self.taken.append(step))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the count after a round, and ask for an end."""
        self.counted.append(internals.steps_by_hand(trainer).completed)
        trainer.should_stop = True
        internals.train_at_least(trainer, 2)


def test_lightning_counts_manual_steps_and_waits_for_the_least_rounds() -> None:
    method, data = build("HeadTune")
    looks = Looks()
    fit(method, data, 3, callbacks=[looks])
    in_first = sum(step.round == 1 for step in looks.taken)
    assert looks.counted == [in_first, len(looks.taken)]
    assert 0 < in_first < len(looks.taken)


def test_a_module_knows_the_hook_that_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    method, data = build("HeadTune")
    seen: list[str | None] = []
    step = type(method).training_step

    def noted(self: Any, *given: Any) -> Any:
        seen.append(internals.present_hook(self))
        return step(self, *given)

    monkeypatch.setattr(type(method), "training_step", noted)
    fit(method, data, 1)
    assert set(seen) == {"training_step"}
    assert internals.present_hook(method) is None
    assert internals.present_hook(SimpleNamespace(_current_fx_name="x")) == "x"


def test_recorded_operations_come_with_their_schema() -> None:
    found = []

    class Noted(internals.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.append(func)
            return func(*args, **(kwargs or {}))

    a = torch.ones(2)
    with Noted():
        a.add_(1)
        a.view(2, 1)
    assert all(isinstance(func, internals.OpOverload) for func in found)
    assert [func._schema.is_mutable for func in found] == [True, False]
    assert found[1]._schema.returns[0].alias_info is not None


def test_trees_are_taken_apart_and_put_together() -> None:
    tree = {"a": (torch.ones(1), 2), "b": [None]}
    leaves, of = internals.tree_flatten(tree)
    assert internals.tree_unflatten(leaves, of) == tree
    assert internals.tree_leaves(tree) == leaves
    assert internals.tree_map(lambda leaf: leaf, tree) == tree


def test_a_round_without_a_step_is_saved_where_the_last_one_is_forgotten(tmp_path: Path) -> None:
    method, data = build("ZeroShotCLIP")
    usual = ModelCheckpoint(tmp_path / "usual", every_n_epochs=1, save_on_train_epoch_end=True)
    assert fit(method, data, 1, [usual], save_to=tmp_path).global_step == 0
    assert (tmp_path / "checkpoints/last.ckpt").is_file()
    assert not [*tmp_path.glob("usual/*")]


def test_a_method_has_another_trainer_for_a_while() -> None:
    method = build("HeadTune")[0]
    for before in (None, object()):
        method.trainer = before
        with internals.with_trainer(method, "another"):
            assert method.trainer == "another"
    assert method.trainer is before
