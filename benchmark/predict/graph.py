"""One client's model as plain PyTorch: images in, logits out, with all that it needs inside."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from benchmark.contract import Client, MiniBatch
from benchmark.errors import ConfigurationError
from benchmark.federation import Values
from benchmark.masked import IGNORE
from benchmark.method import FederatedMethod
from benchmark.predict.client_model import ClientModel


class _Call(nn.Module):
    """Calls a method's functions while ``functional_call`` has put other values in its parameters."""

    def __init__(self, method: FederatedMethod) -> None:
        super().__init__()
        self.method = method

    def forward(self, client: Client, x: Tensor, noise: Values, split: str) -> Tensor:
        method = self.method
        features = method.frozen_features(x) if "features" in method.inputs else {}
        y = x.new_full((x.shape[0],), IGNORE, dtype=torch.int64)
        batch = MiniBatch(x, y, torch.ones_like(y, dtype=torch.bool), 0, split, noise, features)
        return method.client_logits(client, batch)


class ClientGraph(nn.Module):
    """Images [B, 3, H, W], uint8 as the run stores its own, to the client's logits [B, C].

    Args:
        model: the client's.
    """

    def __init__(self, model: ClientModel) -> None:
        super().__init__()
        method = model.method
        self._call = (_Call(method),)  # hidden: what is used of it becomes part of the graph, and nothing else
        self._transform = method.simulation.images.pool.transform
        self._kind = method.simulation.parameters.first.dtype
        self._split, self._round = model.space, model.cohort.round
        rows = model.cohort.rows(1)
        self._parts = {
            part: {name: value[0].detach().clone() for name, value in of.items()} for part, of in rows.items()
        }
        self._common = dict(model.cohort.received.common)
        self._draws, self._axes = drawn(model)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        parts = self._parts
        x = self._transform(images, None).to(self._kind)
        client = Client(
            parts["values"],
            self._common | parts["received"],
            parts["facts"]["class_counts"],
            self._round,
            parts["facts"]["participated"],
            parts["previous"],
            parts["prepared"],
            parts["own_images"],
            parts["constants"],
        )
        noise = {name: self._of_images(draws, name, x) for name, draws in self._draws.items()}
        values = {f"method.{name}": value for name, value in parts["values"].items()}
        return functional_call(self._call[0], values, (client, x, noise, self._split))

    def _of_images(self, draws: Tensor, name: str, x: Tensor) -> Tensor:
        """Return an image's draws for each of a batch; those of a batch as they are."""
        axis = self._axes[name]
        if axis is None:
            return draws
        return draws.index_select(axis, torch.arange(x.shape[0], device=x.device) % draws.shape[axis])


def drawn(model: ClientModel) -> tuple[Values, dict[str, int | None]]:
    """Return the draws of the first step of the run's evaluation, and which axis of each is that of the images.

    Raises:
        ConfigurationError: an axis cannot be told.
    """
    if not model.draws:
        return {}, {}
    first, other = model.noise(0, model.step), model.noise(0, model.step + 1)
    axes: dict[str, int | None] = {}
    for name, value in first.items():
        differing = [n for n, (a, b) in enumerate(zip(value.shape, other[name].shape, strict=True)) if a != b]
        if len(differing) > 1:
            raise ConfigurationError(
                f"{type(model.method).__name__} cannot be exported: {name!r} of its draws has two axes of images"
            )
        axes[name] = differing[0] - 1 if differing else None
    return {name: value[0] for name, value in first.items()}, axes
