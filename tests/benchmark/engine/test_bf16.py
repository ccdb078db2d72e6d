"""The effect of CUDA's autocast on a method, tested without CUDA: fake tensors without numbers claim to lie on a GPU.

A CPU's own autocast covers other operations, so that runs on a CPU say little about it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from federation import CONF, build, first_step
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmark.backbones.cnn import PaperCNN
from benchmark.client_store import ClientStore
from benchmark.contract import Stage
from benchmark.engine.device.capacity import bytes_per_client
from benchmark.engine.plan.evaluation_plan import EvaluationPlan
from benchmark.engine.plan.work import Share, on_device
from benchmark.engine.rounds import Server
from benchmark.federation import Round

CUDA = torch.device("cuda", 0)
CONVOLUTIONAL = sorted(path.stem for path in CONF.glob("*.yaml") if "PaperCNN" in path.read_text())


class FakeGenerator(torch.Generator):
    """One that says it draws on the GPU; a true one needs the driver."""

    device = CUDA


def fake_generator(*key: int | str, device: torch.device | str) -> torch.Generator:
    """A stand-in for ``torch_generator``; what is drawn from it has no numbers."""
    return FakeGenerator()


@contextmanager
def cuda_autocast() -> Iterator[None]:
    """As ``bf16-mixed`` has it; ``torch.autocast("cuda")`` switches itself off where there is no CUDA."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_cache_enabled(True)


def to_fake_cuda(method: nn.Module, mode: FakeTensorMode) -> None:
    """Every parameter and buffer becomes one of the same shape on the GPU; clients' rows stay on the host."""
    for module in method.modules():
        if isinstance(module, ClientStore):
            continue
        for name, value in module.named_parameters(recurse=False):
            fake = mode.from_tensor(value.detach()).to(CUDA)
            module._parameters[name] = nn.Parameter(fake, value.requires_grad)
        for name, value in module.named_buffers(recurse=False):
            module._buffers[name] = mode.from_tensor(value).to(CUDA)


def set_up(conf: str, *overrides: str) -> tuple[Any, Any]:
    """Method and data as a Trainer sets them up."""
    method, data = build(conf, *overrides)
    server = Server(method.make_server())
    trainer = SimpleNamespace(
        datamodule=data,
        callbacks=[server],
        current_epoch=0,
        max_epochs=1,
        lightning_module=method,
        barebones=False,
        world_size=1,
        strategy=SingleDeviceStrategy("cpu"),
        precision="bf16-mixed",
        precision_plugin=Precision(),
    )
    data.setup()
    method._trainer = data.trainer = trainer
    server.setup(trainer, method, "validate")
    return method, data


def test_a_convolution_under_autocast_comes_out_in_bfloat16() -> None:
    """With filters that all clients share, which vmap makes one convolution, and with each client's own."""
    with FakeTensorMode() as mode, cuda_autocast():
        network = PaperCNN(image_size=16)
        to_fake_cuda(network, mode)
        images = torch.empty(3, 2, 3, 16, 16, device=CUDA)
        own = {name: value.expand(3, *value.shape) for name, value in network.convolutions.named_parameters()}
        shared = torch.vmap(network.convolutions)(images)
        stacked = torch.vmap(lambda values, x: torch.func.functional_call(network.convolutions, values, x))(own, images)
    assert (shared.dtype, stacked.dtype) == (torch.bfloat16, torch.bfloat16)
    assert shared.shape == stacked.shape == (3, 2, 64, 1, 1)


def on_the_gpu(method: Any, data: Any, mode: FakeTensorMode) -> None:
    """Parameters, images and labels lie there."""
    to_fake_cuda(method, mode)
    method._device = CUDA
    pool = method.simulation.images.pool
    pool.images, pool.labels = (mode.from_tensor(part).to(CUDA) for part in (data.pool.images, data.pool.labels))


@pytest.mark.parametrize("conf", CONVOLUTIONAL)
def test_a_convolutional_method_is_evaluated_in_bf16_on_cuda(conf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The evaluation of the server's state and, where torch can run it without a driver, a training step's loss."""
    monkeypatch.setattr("benchmark.engine.batches.noise.torch_generator", fake_generator)
    # A CUDA generator's state and the free memory need the driver, too.
    monkeypatch.setattr("benchmark.engine.refusals.watch.global_states", lambda device: ())
    monkeypatch.setattr("benchmark.engine.batches.pool.free_memory", lambda device: 2**40)
    method, data = set_up(conf)
    plan = EvaluationPlan(range(4), {"test": data.held_out["test"]}, None, ("server",), 12, 4)
    first = first_step(data.loaders.training(1))
    simulation = method.simulation
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        on_the_gpu(method, data, mode)
        with cuda_autocast():
            for number, work in enumerate(Share([plan])):
                method.validation_step(work, number)
            if conf != "PerFedAvg":  # whose loss takes a gradient
                round = Round(1, first.cohort, 0)
                received = simulation.received(method.server.rule, round, first.cohort)
                cohort = simulation.begin(first.cohort, Stage.TRAIN, round, received)
                batch = simulation.mini_batch(on_device([first], CUDA)[0])
                made = simulation.clients("client_loss", method.client_loss, cohort, len(first.clients), batch)
                losses = made[0] if isinstance(made, tuple) else made
                assert losses.shape == (len(first.clients),)
                assert losses.device == CUDA


class Kernels(TorchDispatchMode):
    """Counts the operations that take a kernel, and notes in which types linear layers are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.products: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, returned = func.overloadpacket.__name__, func._schema.returns
        view = returned and returned[0].alias_info is not None and not returned[0].alias_info.is_write
        self.count += not view and name not in ("device", "_unsafe_view")
        if name in ("mm", "addmm"):  # attention without a kernel of its own, all there is here, multiplies in float32
            self.products |= {value.dtype for value in args}
        return func(*args, **(kwargs or {}))


def kernels_of_a_loss(conf: str, bf16: bool) -> Kernels:
    """Count the kernels of a cohort's second loss, after the weights have been cast."""
    method, data = set_up(conf, "--data.cache_features=false")
    first = first_step(data.loaders.training(1))
    simulation = method.simulation
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        on_the_gpu(method, data, mode)
        round = Round(1, first.cohort, 0)
        received = simulation.received(method.server.rule, round, first.cohort)
        cohort = simulation.begin(first.cohort, Stage.TRAIN, round, received)
        batch = simulation.mini_batch(on_device([first], CUDA)[0])
        with cuda_autocast() if bf16 else nullcontext():
            for _ in range(2):
                with Kernels() as kernels:
                    simulation.clients("client_loss", method.client_loss, cohort, len(first.clients), batch)
    return kernels


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("conf", ["FedVPT", "PromptFL"])
def test_frozen_layers_on_a_gpu_merge_clients(conf: str, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmark.engine.batches.noise.torch_generator", fake_generator)
    monkeypatch.setattr("benchmark.engine.refusals.watch.global_states", lambda device: ())
    monkeypatch.setattr("benchmark.engine.batches.pool.free_memory", lambda device: 2**40)
    merged = kernels_of_a_loss(conf, bf16)
    monkeypatch.setattr("benchmark.engine.mapping.MergedLayers", nullcontext)
    by_torch_s_rules = kernels_of_a_loss(conf, bf16)
    assert merged.count <= 0.8 * by_torch_s_rules.count
    assert merged.products == {torch.bfloat16 if bf16 else torch.float32}


def test_frozen_weights_in_bfloat16_count_for_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are cast once, whichever cohort comes first; the width is made of what comes with each client."""
    monkeypatch.setattr("benchmark.engine.batches.noise.torch_generator", fake_generator)
    monkeypatch.setattr("benchmark.engine.refusals.watch.global_states", lambda device: ())
    monkeypatch.setattr("benchmark.engine.batches.pool.free_memory", lambda device: 2**40)
    monkeypatch.setattr(torch.Tensor, "backward", lambda loss: None)  # torch's engine needs the driver
    method, data = set_up("FedVPT", "--data.cache_features=false")
    simulation = method.simulation
    monkeypatch.setattr(simulation.images, "precision", cuda_autocast)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        on_the_gpu(method, data, mode)
        received = {1: simulation.received(method.server.rule, Round(1, (0,), 0), (0,))}
        first, *later = [bytes_per_client(simulation, received, 4)[0] for _ in range(3)]
    linear = [module for block in method.backbone.vit.blocks for module in block.modules() if type(module) is nn.Linear]
    cast = 2 * sum(value.numel() for module in linear for value in module.parameters())
    assert later[0] == later[1]
    assert first - later[0] == pytest.approx(cast, rel=1e-3)
