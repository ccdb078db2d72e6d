"""Compute the gradients of a cohort's step so that no single image shows in them: clip each image's, and add noise."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from benchmark.contract import Client, ClientMethod, MiniBatch, Stage
from benchmark.engine.cohort import Cohort, Slots
from benchmark.engine.mapping import ClientFunction, ClientMap
from benchmark.engine.plan.work import Step
from benchmark.engine.step_function import Called, Made, StepFunction
from benchmark.federation import Values
from benchmark.masked import masked_mean
from benchmark.privacy.record_level import RecordLevelPrivacy
from benchmark.seeds import torch_generator

#: Bytes of the gradients of single images that are held at a time of each client.
HELD = 2**26


class _AtValues(nn.Module):
    """Calls a function while ``functional_call`` has put values in the parameters of a method."""

    def __init__(self, method: nn.Module) -> None:
        super().__init__()
        self.method = method

    def forward(self, function: Any, *arguments: Any) -> Any:
        """Call it."""
        return function(*arguments)


class ClippedSteps:
    """Takes a step as the method writes it, with the gradient of each image by itself clipped.

    Args:
        method: whose loss.
        clients: maps functions over the cohort.
        slots: what is trained.
        privacy: the settings.
        batch_size: B, by which sums are divided, whatever a lot holds.
        seed: of the run.
    """

    def __init__(
        self,
        method: ClientMethod,
        clients: ClientMap,
        slots: Slots,
        privacy: RecordLevelPrivacy,
        batch_size: int,
        seed: int,
    ) -> None:
        self.method = method
        self.clients = clients
        self.slots = slots
        self.privacy = privacy
        self.batch_size = batch_size
        self.seed = seed
        self._at_values = _AtValues(method)
        #: per stage, phase and names of the noise, along which of its dimensions the images are
        self._axes: dict[tuple[Any, ...], dict[str, int | None]] = {}

    def __call__(self, cohort: Cohort, step: Step, batch: MiniBatch) -> Made:
        """Return losses, and gradients that noise is to be added to; clients that have finished have zeros.

        Raises:
            ConfigurationError: see :class:`benchmark.engine.mapping.ClientMap`.
        """
        count, part = len(step.clients), (step.stage, step.phase)

        def call(function: ClientFunction, rows: tuple[MiniBatch, ...]) -> Any:
            return self.clients("client_loss", function, cohort, count, *rows, part=part, number=step.number)

        trained = {name: slot for name, slot in self.slots.all().items() if slot.requires_grad}
        return self.made(call, step, batch, trained)

    def made(self, call: Called, step: Step, batch: MiniBatch, trained: Values) -> Made:
        """Return the same with the clients' functions called by ``call``."""
        count, axes = len(step.clients), self._axes_of(step, batch.noise)
        fitting = max(1, HELD // (4 * sum(value[0].numel() for value in trained.values())))
        chunk = min(batch.mask.shape[1], self.privacy.images_at_once or fitting)

        def summed(client: Client, own: MiniBatch) -> tuple[Tensor, Values, Values, Values]:
            return self.summed(client, own, tuple(trained), axes, chunk)

        with torch.no_grad():
            losses, reported, sums, regulariser = call(summed, (batch,))
            gradients: dict[str, Tensor | None] = {}
            for name, value in trained.items():
                own = sums[name] / self.batch_size + (regulariser[name] if regulariser else 0.0)
                rest = own.new_zeros(len(value) - count, *value.shape[1:])
                gradients[name] = torch.cat([own, rest]) if len(rest) else own
        return Made(losses, reported, gradients)

    def summed(
        self, client: Client, batch: MiniBatch, names: tuple[str, ...], axes: dict[str, int | None], chunk: int
    ) -> tuple[Tensor, Values, Values, Values]:
        """Return ONE client's loss, what it reports, the sum of its images' clipped gradients, its regulariser's."""
        own = {name: client.parameters[name].detach() for name in names}
        regulariser = self._regulariser(client, batch.phase, own)

        def loss_of_one(
            values: Values, x: Tensor, y: Tensor, features: Values, noise: Values
        ) -> tuple[Tensor, tuple[Tensor, Values]]:
            one = MiniBatch(
                x.unsqueeze(0),
                y.unsqueeze(0),
                torch.ones_like(y, dtype=torch.bool).unsqueeze(0),
                batch.phase,
                batch.split,
                {name: _with_one(value, axes[name]) for name, value in noise.items()},
                {name: value.unsqueeze(0) for name, value in features.items()},
            )
            made = self._at(values, self.method.client_loss, client, one)
            loss, reported = made if isinstance(made, tuple) else (made, {})
            return loss, (loss, reported)

        each = vmap(
            grad(loss_of_one, has_aux=True),
            in_dims=(None, 0, 0, 0, {name: axes[name] for name in batch.noise}),
            chunk_size=chunk,
        )
        found, (losses, reported) = each(own, batch.x, batch.y.clamp(min=0), batch.features, batch.noise)
        own = {name: value - regulariser[name] if regulariser else value for name, value in found.items()}
        length = torch.stack([value.square().reshape(len(value), -1).sum(1) for value in own.values()]).sum(0).sqrt()
        # One image that is not finite would else leave its client out, which everybody sees.
        counted = batch.mask & length.isfinite() & losses.isfinite()
        scale = torch.where(counted, (self.privacy.clip / length.clamp(min=1e-12)).clamp(max=1.0), 0.0)
        sums = {
            name: torch.tensordot(scale.to(value.dtype), _of_some(value, counted), dims=1)
            for name, value in own.items()
        }
        scalars = {name: value for name, value in reported.items() if value.ndim == 1}
        means = {name: masked_mean(_of_some(value, counted), counted) for name, value in scalars.items()}
        return masked_mean(_of_some(losses, counted), counted), means, sums, regulariser

    def _at(self, values: Values, function: Any, client: Client, *arguments: Any) -> Any:
        """Call a function of the method at other values of what is trained."""
        there = replace(client, parameters=client.parameters | values)
        named = {f"method.{name}": value for name, value in values.items()}
        return functional_call(self._at_values, named, (function, there, *arguments))

    def _regulariser(self, client: Client, phase: int, own: Values) -> Values:
        """Return the gradient of ONE client's regulariser; nothing where it has none."""
        if self._at(own, self.method.regulariser, client, phase) is None:
            return {}
        gradient: Values = grad(lambda values: self._at(values, self.method.regulariser, client, phase))(own)
        return gradient

    def _axes_of(self, step: Step, noise: Values) -> dict[str, int | None]:
        """Return along which dimension of each tensor of noise the images are; None where all share it."""
        key = (step.stage, step.phase, *noise)
        if noise and key not in self._axes:
            generator = torch_generator(self.seed, "shapes of noise", device=next(iter(noise.values())).device)
            two, three = (self.method.draw_noise(generator, count, step.stage) for count in (2, 3))
            self._axes[key] = {name: _differing(two[name].shape, three[name].shape) for name in noise}
        return self._axes.get(key, {})


class PrivateSteps:
    """Takes the steps of local training as :class:`benchmark.privacy.record_level.RecordLevelPrivacy` says.

    Args:
        clipped: takes them with clipped gradients.
        others: takes those of copies that are fitted, whose values are never seen.
        privacy: the settings.
        batch_size: B.
        seed: of the run, by which noise has its key.

    Attributes:
        noise_multiplier: z, which the account makes; without one no step is taken.
    """

    def __init__(
        self, clipped: StepFunction, others: StepFunction, privacy: RecordLevelPrivacy, batch_size: int, seed: int
    ) -> None:
        self.clipped = clipped
        self.others = others
        self.privacy = privacy
        self.batch_size = batch_size
        self.seed = seed
        self.noise_multiplier: float | None = None

    def __call__(self, cohort: Cohort, step: Step, batch: MiniBatch) -> Made:
        """Return losses, and gradients that are private.

        Raises:
            ConfigurationError: see :class:`benchmark.engine.mapping.ClientMap`.
        """
        if step.stage is not Stage.TRAIN:
            return self.others(cohort, step, batch)
        made = self.clipped(cohort, step, batch)
        given = {name: value for name, value in made.gradients.items() if value is not None}
        return made._replace(gradients={**made.gradients, **self.noised(step, given)})

    def noised(self, step: Step, gradients: Values) -> Values:
        """Add N(0, (zC/B)^2) to the gradients of the step's clients, by a key of round, phase, step and client.

        Raises:
            RuntimeError: nobody has accounted for the noise.
        """
        if self.noise_multiplier is None:
            raise RuntimeError("a private step without an account of its noise (benchmark.engine.accounts)")
        std = self.noise_multiplier * self.privacy.clip / self.batch_size
        if not std:
            return gradients
        sizes, device = [value[0].numel() for value in gradients.values()], next(iter(gradients.values())).device
        drawn = []
        for client in step.clients:
            generator = torch_generator(self.seed, "dp-sgd", step.round, step.phase, step.number, client, device=device)
            drawn.append(torch.randn(sum(sizes), generator=generator, device=device, dtype=torch.float32))
        made = {}
        for (name, value), noise in zip(gradients.items(), torch.stack(drawn).split(sizes, dim=1), strict=True):
            made[name] = value.clone()
            made[name][: len(drawn)] += std * noise.view(len(drawn), *value.shape[1:]).to(value.dtype)
        return made


def _of_some(values: Tensor, there: Tensor) -> Tensor:
    """Put zeros where ``there`` [B] is False, whatever stood there; [B, ...]."""
    return torch.where(there.view(-1, *(1,) * (values.ndim - 1)), values, 0.0)


def _with_one(value: Tensor, axis: int | None) -> Tensor:
    """Put back the dimension of images, of one."""
    return value if axis is None else value.unsqueeze(axis)


def _differing(left: torch.Size, right: torch.Size) -> int | None:
    """Return the first dimension in which two shapes differ."""
    return next((place for place, (a, b) in enumerate(zip(left, right, strict=True)) if a != b), None)
