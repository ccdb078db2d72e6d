"""A cohort's step as one compiled program, whose gradients are those of the operations one by one."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from benchmark.backbones.client_layers import ClientConv2d, tf32_is_allowed
from benchmark.contract import ClientMethod, Loss, MiniBatch, Stage
from benchmark.engine.cohort import Cohort, Slots
from benchmark.engine.mapping import ClientMap
from benchmark.engine.plan import Step
from benchmark.errors import ConfigurationError

log = logging.getLogger(__name__)

#: How far a gradient of a compiled step may be from the same operations one by one, relative to its norm.
TOLERANCE = 1e-3
#: The same with bfloat16, whose intermediate results a fused kernel does not round, and where a GPU's convolutions may
#: round their factors to TF32, of which those of stacked clients are others than those of one.
TOLERANCE_BF16, TOLERANCE_TF32 = 5e-2, 1e-2


class CompiledLoss:
    """``client_loss`` of a cohort, compiled with ``torch.compile``.

    Its mode ``default`` alone: in ``reduce-overhead`` CUDA graphs keep a step's losses with the graph that made them,
    so that gradients of a later cohort of another width are wrong; the others tune themselves anew in each process, so
    that a resumed run would differ.

    Args:
        method: whose loss.
        clients: maps it.
        slots: what is trained, for the comparison of gradients.
        bf16: whether steps run under bfloat16.
    """

    def __init__(self, method: ClientMethod, clients: ClientMap, slots: Slots, bf16: bool) -> None:
        self.method = method
        self.clients = clients
        self.slots = slots
        self.bf16 = bf16
        #: by stage, phase and cohort width
        self.programs: dict[tuple[Stage, int, int], Callable[..., Loss]] = {}

    def __call__(self, cohort: Cohort, step: Step, batch: MiniBatch) -> Loss:
        """Return the clients' losses, by code whose gradients were compared.

        A program holds code for each set of shapes, Python numbers and branches it has met; new code is made inside a
        call of it, which is then compared and done again.

        Raises:
            ConfigurationError: it cannot be compiled, or not rightly.
        """
        key = (step.stage, step.phase, len(cohort.clients))
        if key not in self.programs:
            log.info("compiling the step of %d clients, which takes a minute or so", len(cohort.clients))
            mapped = self.clients.mapped(self.method.client_loss)
            program = torch.compile(mapped, dynamic=False)
            self.compare(cohort, step, batch, program)
            self.programs[key] = program
        made = graphs_made()
        with self._compiling():
            losses = self._call(self.programs[key], cohort, step, batch)
        if graphs_made() == made:
            return losses
        del losses
        self.compare(cohort, step, batch, self.programs[key])
        return self._call(self.programs[key], cohort, step, batch)

    def _call(self, program: Callable[..., Loss], cohort: Cohort, step: Step, batch: MiniBatch) -> Loss:
        """Call a program with a mini-batch of every client of the cohort, the first one's for those at their end."""
        width, count = len(cohort.clients), len(step.clients)

        def whole(part: Tensor) -> Tensor:
            missing = width - len(part)
            return torch.cat([part, part[:1].expand(missing, *part.shape[1:])]) if missing else part

        made = program(cohort.round, cohort.received.common, cohort.rows(width), (tree_map(whole, batch),))
        return cast(Loss, tree_map(lambda part: part[:count], made))

    @contextmanager
    def _compiling(self) -> Iterator[None]:
        """Say in one line that torch.compile failed inside."""
        try:
            yield
        except torch._dynamo.exc.TorchDynamoException as error:
            said = str(error).splitlines()[0]
            raise ConfigurationError(
                f"data.compile_steps: torch.compile failed on {type(self.method).__name__} ({said}); leave "
                "data.compile_steps out, or mend what it needs (on a CPU a C++ compiler)"
            ) from error

    def compare(self, cohort: Cohort, step: Step, batch: MiniBatch, program: Callable[..., Loss]) -> None:
        """Refuse a compiled step whose gradients are not those of the operations one by one.

        Inductor's code is not always right: torch 2.15 makes a CLIP text tower's gradient on a CPU 2 % off.

        Raises:
            ConfigurationError: the gradient of a parameter is another, or there is no compiling it.
        """
        convolves = any(isinstance(module, ClientConv2d) for module in self.method.modules())
        tf32 = convolves and batch.y.is_cuda and tf32_is_allowed()
        limit = TOLERANCE_BF16 if self.bf16 else TOLERANCE_TF32 if tf32 else TOLERANCE
        trained = [name for name in self.slots.names if self.slots.of(name).requires_grad]
        slots = [self.slots.of(name) for name in trained]

        def gradients(made: Loss) -> list[Tensor]:
            losses = made[0] if isinstance(made, tuple) else made
            return list(torch.autograd.grad(losses.sum(), slots, materialize_grads=True))

        count, part = len(step.clients), (step.stage, step.phase)
        plain = self.clients("client_loss", self.method.client_loss, cohort, count, batch, part=part)
        expected = gradients(plain)
        with self._compiling():
            found = gradients(self._call(program, cohort, step, batch))
        for name, right, made in zip(trained, expected, found, strict=True):
            off = ((made - right).norm() / right.norm().clamp(min=1e-30)).item()
            if not off <= limit:  # NaN is refused too
                raise ConfigurationError(
                    f"data.compile_steps: torch.compile makes the gradient of {name!r} of "
                    f"{type(self.method).__name__} {100 * off:.2g} % off, {100 * limit:g} % are allowed; "
                    "leave data.compile_steps out"
                )


def graphs_made() -> int:
    """Count the graphs that torch.compile has made in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
