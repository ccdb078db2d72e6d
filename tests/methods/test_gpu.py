"""Every method on a real GPU: the CPU's numbers, no wait in a local step, graphs that change no bit, resumed runs.

``test_pretended_gpu`` asks the same where there is none, but for what a GPU alone can answer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from federation import CONF, EACH_ROUND, build, fit, learned
from repeated_steps import repeated_steps

from benchmark.engine import simulation
from benchmark.engine.batches.noise import drawn_noise
from benchmark.engine.device.repeatable import repeatable_kernels
from benchmark.engine.plan.work import Step
from benchmark.engine.repeat import captured_step, recorded_step
from benchmark.engine.rounds import Server
from benchmark.federation import Values
from benchmark.method import FederatedMethod
from benchmark.run.fit import fit as run_files

METHODS = sorted(path.stem for path in CONF.glob("*.yaml") if path.stem != "base")
TRAINED = sorted(set(METHODS) - {"ZeroShotCLIP"})
#: How far a number may be from the CPU's, and one width's from another's, after three rounds of momentum. Adam divides
#: by a gradient's own size, and PromptAMP's server takes exponentials of distances that are next to equal.
USUAL, LOOSE = 1e-4, 2e-3
#: The same where factors of convolutions are rounded to ten bits.
ROUNDED = 5e-2
GPU: dict[str, Any] = {"accelerator": "gpu", "devices": 1}
TINY_VIT = "--model.init_args.backbone=benchmark.backbones.tiny_vit.TinyViT"
FOUR_EPOCHS = "--model.init_args.training.epochs=4"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that repeat, and float32 all through: cuDNN's convolutions round their factors to ten bits otherwise."""
    repeatable_kernels()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    yield
    torch.use_deterministic_algorithms(False)


def trained(conf: str, *options: str, rounds: int = 2, **settings: Any) -> Values:
    """Return the learned values after some rounds on the GPU, in host memory."""
    method, data = build(conf, *options)
    fit(method, data, rounds, settings=GPU | EACH_ROUND | settings)
    return {name: value.cpu() for name, value in learned(method).items()}


def require_close(found: Values, expected: Values, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    off = {
        name: (found[name].double() - value.double()).abs().nan_to_num().max().item()
        for name, value in expected.items()
        if value.numel()
    }
    assert {name: difference for name, difference in off.items() if not difference <= tolerance} == {}
    assert all(torch.equal(found[name].isnan(), value.isnan()) for name, value in expected.items())


def require_equal(found: Values, expected: Values) -> None:
    assert found.keys() == expected.keys()
    assert [n for n, value in expected.items() if not torch.equal(found[n].nan_to_num(), value.nan_to_num())] == []


def drawn_on_the_gpu(method: FederatedMethod, seed: int, step: Step, batch_size: int, like: torch.Tensor) -> Values:
    """A method's noise for a run on the CPU, the same as a GPU's, whose generators give other numbers."""
    drawn = drawn_noise(method, seed, step, batch_size, like.cuda())
    return {name: value.cpu() for name, value in drawn.items()}


def tolerance(conf: str) -> float:
    return LOOSE if conf == "PromptAMP" or "optimizer: adam" in (CONF / f"{conf}.yaml").read_text() else USUAL


@pytest.mark.parametrize("conf", METHODS)
def test_a_gpu_gives_the_cpus_numbers_and_no_step_waits(conf: str) -> None:
    send, collect = Server.send, Server.collect

    def sends(self: Server, *given: Any) -> Any:
        cohort = send(self, *given)
        torch.cuda.set_sync_debug_mode("error" if self.finished_rounds else "default")
        return cohort

    def collects(self: Server, *given: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        collect(self, *given)

    never = patch.object(recorded_step, "BEFORE_RECORDING", 10**9)
    try:
        with patch.object(Server, "send", sends), patch.object(Server, "collect", collects), never:
            found = trained(conf)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    method, data = build(conf)
    with patch.object(simulation, "drawn_noise", drawn_on_the_gpu):
        fit(method, data, 2, settings=EACH_ROUND)
    require_close(found, learned(method), tolerance(conf))


def test_a_record_names_the_gpu(tmp_path: Path) -> None:
    record = run_files(
        CONF / "FedAvg.yaml", CONF / "base.yaml", rounds=1, seed=0, run_dir=tmp_path / "run", **GPU
    ).record
    assert record.device == torch.cuda.get_device_name()
    assert record.device in record.environment["hardware"]["gpus"]
    assert 0 < record.peak_memory_bytes <= torch.cuda.max_memory_allocated()


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions may round their factors, as usual: those of stacked clients are kernels of their own then."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)


@pytest.mark.usefixtures("rounded")
@pytest.mark.parametrize("conf", ["FedAvg", "PFedPT"])
def test_rounded_convolutions_as_a_graph_resumed_and_alone(conf: str, tmp_path: Path) -> None:
    """The same bits as a graph and after a resume; near the CPU's numbers, and near those of clients alone."""
    with patch.object(recorded_step, "BEFORE_RECORDING", 10**9):
        written = trained(conf, FOUR_EPOCHS)
        alone = trained(conf, FOUR_EPOCHS, "--data.clients_at_once=1")
    with patch.object(recorded_step, "BEFORE_RECORDING", 1), repeated_steps() as repeated:
        require_equal(trained(conf, FOUR_EPOCHS), written)
    assert len(repeated) > 1
    method, data = build(conf, FOUR_EPOCHS)
    fit(method, data, 2, settings=EACH_ROUND)
    for other in (alone, learned(method)):
        require_close(written, other, ROUNDED)
    method, data = build(conf, FOUR_EPOCHS)
    fit(method, data, 1, save_to=tmp_path, settings=GPU | EACH_ROUND)
    resumed, data = build(conf, FOUR_EPOCHS)
    fit(resumed, data, 2, ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"), settings=GPU | EACH_ROUND)
    require_equal({name: value.cpu() for name, value in learned(resumed).items()}, written)


@pytest.mark.parametrize(("channels", "filters", "side"), [(3, 32, 3), (32, 64, 3), (64, 64, 5), (3, 70, 1)])
def test_kernels_of_stacked_convolutions_round_to_ten_bits(channels: int, filters: int, side: int) -> None:
    from benchmark.backbones.convolution_kernels import KernelConv2d

    torch.manual_seed(0)
    shapes = (5, 10, channels, 14, 15), (5, filters, channels, side, side), (5, filters)
    given = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    made = KernelConv2d.apply(*given, "tf32")
    gradient = torch.randn_like(made)
    found = [made, *torch.autograd.grad(made, given, gradient)]
    exact = torch.stack(
        [torch.nn.functional.conv2d(*own) for own in zip(*(part.double() for part in given), strict=True)]
    )
    expected = [exact, *torch.autograd.grad(exact, given, gradient.double())]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert ((ours - theirs).norm() / theirs.norm()).item() < 2e-3


@pytest.mark.parametrize("conf", ["FedAvg", "PerFedAvg", "PFedPT"])
def test_a_vit_from_scratch_gives_the_cpus_numbers(conf: str) -> None:
    """PerFedAvg's loss takes a gradient, which no fused kernel can be mapped in."""
    method, data = build(conf, TINY_VIT)
    fit(method, data, 2, settings=EACH_ROUND)
    require_close(trained(conf, TINY_VIT), learned(method), LOOSE)


@pytest.mark.parametrize("conf", TRAINED)
def test_a_recorded_step_as_a_graph_changes_no_bit(conf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[int] = []
    said: list[str] = []
    replay = captured_step.CapturedStep.__call__

    def counted(self: captured_step.CapturedStep, *tensors: torch.Tensor) -> Any:
        replays.append(1)
        return replay(self, *tensors)

    monkeypatch.setattr(captured_step.CapturedStep, "__call__", counted)
    monkeypatch.setattr(recorded_step.log, "info", lambda text, *parts: said.append(text % parts))
    monkeypatch.setattr(recorded_step, "WORTHWHILE", float("inf"))
    monkeypatch.setattr(recorded_step, "BEFORE_RECORDING", 10**9)
    written = trained(conf, FOUR_EPOCHS, deterministic=True)
    monkeypatch.setattr(recorded_step, "BEFORE_RECORDING", 1)
    with repeated_steps() as repeated:
        found = trained(conf, FOUR_EPOCHS, deterministic=True)
    require_equal(found, written)
    assert (len(replays) > 1, len(repeated) > 1, said) == (True, True, [])


@pytest.mark.parametrize("conf", METHODS)
def test_clients_together_give_what_they_give_alone(conf: str) -> None:
    require_close(
        trained(conf, "--data.clients_at_once=auto"), trained(conf, "--data.clients_at_once=1"), tolerance(conf)
    )


@pytest.mark.parametrize("conf", TRAINED)
def test_a_resumed_run_ends_as_an_uninterrupted_one(conf: str, tmp_path: Path) -> None:
    settings = GPU | EACH_ROUND | {"deterministic": True}
    with patch.object(recorded_step, "BEFORE_RECORDING", 1):
        whole = trained(conf, rounds=3, deterministic=True)
        method, data = build(conf)
        fit(method, data, 1, save_to=tmp_path, settings=settings)
        resumed, data = build(conf)
        fit(resumed, data, 3, ckpt_path=str(tmp_path / "checkpoints" / "last.ckpt"), settings=settings)
    require_equal({name: value.cpu() for name, value in learned(resumed).items()}, whole)


@pytest.mark.parametrize("conf", TRAINED)
def test_in_bf16_a_run_is_near_that_in_float32(conf: str) -> None:
    """Of two rounds the losses are within a tenth, and nothing is lost."""
    with patch.object(recorded_step, "BEFORE_RECORDING", 1):
        half, full = trained(conf, precision="bf16-mixed"), trained(conf)
    losses = [name for name in full if name.startswith("metric.") and "loss" in name]
    assert losses
    for name in losses:
        torch.testing.assert_close(half[name].double(), full[name].double(), rtol=0.1, atol=0.1, equal_nan=True)
    assert [name for name, value in half.items() if not torch.equal(value.isnan(), full[name].isnan())] == []
