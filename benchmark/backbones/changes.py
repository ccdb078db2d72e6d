"""Changes that parts make in a tower: at its projections, its norms and its blocks, and among its tokens."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.backbones.parts import Norm, Projection, Prompts, Tower, TowerPart
from benchmark.errors import ConfigurationError

#: an MLP's first projection, what lies between, and its second projection
Steps = tuple[nn.Module, Callable[[Tensor], Tensor], nn.Module]


class Changes:
    """The changes that parts make in one block of a tower, or in its final norm.

    Args:
        parts: all parts of the tower.
        layer: number of the block; the tower's depth for what comes after all blocks.
    """

    def __init__(self, parts: Sequence[TowerPart], layer: int) -> None:
        self.layer = layer
        self.parts = [part for part in parts if layer >= part.first_layer]

    def __bool__(self) -> bool:
        """Return whether the block is changed at all."""
        return any(part.projections or part.in_parallel or set(part.norms) - {"final"} for part in self.parts)

    def at(self, *names: Projection) -> bool:
        """Return whether one of these projections is changed."""
        return any(name in part.projections for part in self.parts for name in names)

    def linear(self, name: Projection, x: Tensor, y: Tensor) -> Tensor:
        """Return the output of a projection, of its input and its own output, part by part."""
        for part in self.parts:
            if name in part.projections:
                y = made_by(part, "linear", part.linear(self.layer, name, x, y), 1)
        return y

    def norm(self, name: Norm, x: Tensor, module: nn.Module) -> Tensor:
        """Return the output of a norm, of its input and the module, part by part.

        Raises:
            ConfigurationError: a part changes it, and it is no ``nn.LayerNorm``.
        """
        y: Tensor = module(x)
        changing = [part for part in self.parts if name in part.norms]
        if not changing:
            return y
        if not isinstance(module, nn.LayerNorm):
            raise ConfigurationError(
                f"parts change the norm {name!r}, and this backbone has a {type(module).__name__} there, not a "
                "LayerNorm; choose other norms, or another backbone"
            )
        standardised = F.layer_norm(x, module.normalized_shape, eps=module.eps).to(y.dtype)
        for part in changing:
            y = made_by(part, "norm", part.norm(self.layer, name, standardised, y), 1)
        return y

    def mlp(self, x: Tensor, mlp: nn.Module, steps: Callable[[], Steps]) -> Tensor:
        """Return the MLP's output.

        Args:
            x: its input, [..., T, d].
            mlp: the module, which is called where no part changes its projections.
            steps: gives its first projection, what lies between, and its second projection.
        """
        if not self.at("fc1", "fc2"):
            called: Tensor = mlp(x)
            return called
        first, between, second = steps()
        hidden = between(self.linear("fc1", x, first(x)))
        return self.linear("fc2", hidden, second(hidden))

    def add_beside(self, made: Tensor, x: Callable[[], Tensor]) -> Tensor:
        """Return a block's output with what stands beside the block; ``x`` gives the block's normed input."""
        beside = [part for part in self.parts if part.in_parallel]
        if beside:
            normed = x()
            for part in beside:
                added = part.beside(self.layer, normed)
                made = made if added is None else made + added
        return made


def made_by(part: TowerPart, name: str, made: Tensor, least: int) -> Tensor:
    """Return what a function of a part has made.

    Args:
        part: whose.
        name: of the function.
        made: by it.
        least: number of its dimensions.

    Raises:
        ConfigurationError: it is no tensor, or has fewer.
    """
    if isinstance(made, Tensor) and made.ndim >= least:
        return made
    expected = "tokens [K, d] or [B, K, d], or None" if name == "prompts" else "a tensor of the shape of y"
    found = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else type(made).__name__
    raise ConfigurationError(f"{type(part).__name__}.{name} must return {expected}; it returns {found}")


#: of a pass without parts
NO_CHANGE = Changes((), 0)


class Places:
    """The places of prompts among a tower's tokens: each part has its own, side by side, in the order of the parts.

    Args:
        parts: of the tower.
        at: where the first place is: so many tokens stand before it.
        counts: tokens that already stand in the parts' places; none by default.
    """

    def __init__(self, parts: Sequence[TowerPart], at: int, counts: Sequence[int] | None = None) -> None:
        self.parts = list(parts)
        self.at = at
        self.counts = list(counts) if counts is not None else [0] * len(self.parts)

    def fill(self, layer: int, tokens: Tensor, norm: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Return a layer's input, with the prompts that are new there.

        Args:
            layer: number of the layer.
            tokens: [..., T, d].
            norm: what new prompts go through; None for nothing.
        """
        new = {i: made for i, part in enumerate(self.parts) if (made := part.prompts(layer)) is not None}
        for i, made in new.items():
            made_by(self.parts[i], "prompts", made, 2)
        if not new:
            return tokens
        pieces = list(tokens.split([self.at, *self.counts, tokens.shape[-2] - self.at - sum(self.counts)], dim=-2))
        for i, prompts in new.items():
            normed = norm(prompts) if norm is not None else prompts
            pieces[1 + i] = normed.expand(*tokens.shape[:-2], -1, -1)
            self.counts[i] = prompts.shape[-2]
        return torch.cat(pieces, dim=-2)

    def without(self, tokens: Tensor) -> Tensor:
        """Return the tokens without the prompts."""
        if not sum(self.counts):
            return tokens
        return torch.cat([tokens[..., : self.at, :], tokens[..., self.at + sum(self.counts) :, :]], dim=-2)


def parts_of(given: Sequence[TowerPart | Tensor], tower: Tower, images: int | None = None) -> list[TowerPart]:
    """Return the parts that a tower was given; tensors are :class:`Prompts`.

    Raises:
        ConfigurationError: something that is no part, or prompts that do not fit the tower or the number of images.
    """
    parts = [Prompts(part) if isinstance(part, Tensor) else part for part in given]
    for part in parts:
        if not isinstance(part, TowerPart):
            raise ConfigurationError(f"a tower takes objects of TowerPart, or prompts [K, d]; got {part!r:.80}")
        if isinstance(part, Prompts):
            part.check(tower, images)
    return parts
