"""Parts in a frozen tower: prompts among its tokens, low-rank factors and adapters beside its layers.

A tower is a transformer: a ViT, or one of CLIP's two. It is never changed itself: it asks its parts at each layer, so
that its frozen weights stay one product for all clients, while what a part holds may be each client's own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.errors import ConfigurationError
from benchmark.ranges import Checked, Few, FewOrNone, NonNegativeFloat, PositiveFloat
from benchmark.seeds import keyed_initialization

Projection = Literal["qkv", "proj", "fc1", "fc2"]
#: Where low-rank factors can stand: queries, keys, values, and a block's other projections.
Target = Literal["q", "k", "v", "proj", "fc1", "fc2"]
#: A block's norms, before its attention and before its MLP, and the tower's last one, behind all blocks.
Norm = Literal["norm1", "norm2", "final"]


@dataclass(frozen=True)
class Tower:
    """The sizes of a tower that its parts are made for.

    Attributes:
        name: ``vit``, ``image`` or ``text``, for the keys of initial values and for errors.
        width: d of a token.
        depth: layers.
        hidden: width of the MLPs between their two projections.
    """

    name: str
    width: int
    depth: int
    hidden: int

    def sizes(self, target: Target) -> tuple[int, int]:
        """Return how many numbers go into a target's projection, and how many come out."""
        into = {"fc2": self.hidden}.get(target, self.width)
        out_of = {"fc1": self.hidden}.get(target, self.width)
        return into, out_of

    def layers_from(self, block: int, option: str) -> int:
        """Return how many layers there are from a block on.

        Args:
            block: its number, the first being 1.
            option: what gave it, for the error: ``LowRank: first_block``.

        Raises:
            ConfigurationError: there is no such block.
        """
        if block > self.depth:
            raise ConfigurationError(
                f"{option}={block}, but the tower ({self.name}) has {self.depth} blocks; give 1 to {self.depth}"
            )
        return self.depth - block + 1


class TowerPart:
    """Something that is put into a frozen tower, of ONE client; all functions may be mapped over clients.

    Derive from it, and from ``nn.Module`` where the part has parameters, and write what differs. Layers count from 0.

    Attributes:
        first_layer: the first layer that the part changes: tokens at its input may be kept.
        projections: those whose output ``linear`` changes.
        norms: those whose output ``norm`` changes.
        in_parallel: ``beside`` adds to the output of blocks.
        shared: prefixes of the part's parameters that methods share, where the choice is the part's.
        personal: prefixes of those that stay with their client.
    """

    first_layer: int = 0
    projections: tuple[Projection, ...] = ()
    norms: tuple[Norm, ...] = ()
    in_parallel: bool = False
    shared: tuple[str, ...] = ()
    personal: tuple[str, ...] = ()

    def fit(self, tower: Tower) -> Self:
        """Make the parameters for a tower; called once, before the part is used. Returns itself.

        Raises:
            ConfigurationError: the tower has not the layers that the part's settings ask for.
        """
        return self

    def prompts(self, layer: int) -> Tensor | None:
        """Return tokens for the input of a layer, [K, d] or [B, K, d]; None where the older ones are carried on.

        The first ones are inserted where the tower has a place for prompts; at later layers they take the place of the
        part's own tokens.
        """
        return None

    def linear(self, layer: int, name: Projection, x: Tensor, y: Tensor) -> Tensor:
        """Return what a projection gives instead of its own output; asked of ``projections``, from ``first_layer`` on.

        Args:
            layer: number of the layer.
            name: of the projection: ``qkv`` (queries, keys and values side by side), ``proj`` (after the attention),
                ``fc1`` and ``fc2`` (of the MLP).
            x: its input, [..., T, in], with as many tokens as are computed there.
            y: its output, [..., T, out].
        """
        return y

    def norm(self, layer: int, name: Norm, x: Tensor, y: Tensor) -> Tensor:
        """Return what a norm gives instead of its own output; asked of ``norms``, from ``first_layer`` on.

        Args:
            layer: number of the layer; the tower's depth for the final norm.
            name: of the norm.
            x: the tokens with mean 0 and variance 1, before the norm's gain and bias, [..., T, d].
            y: its output, [..., T, d].
        """
        return y

    def beside(self, layer: int, x: Tensor) -> Tensor | None:
        """Return what is added to a block's output, [..., T, d], or None; asked where ``in_parallel``.

        Args:
            layer: number of the layer.
            x: the block's input after its first norm, [..., T, d].
        """
        return None


class Prompts(TowerPart):
    """Prompt tokens that a method has made itself: of a generator, a distribution or another prompt.

    Args:
        tokens: [K, d] for the first layer, [L, K, d] for L layers, [B, L, K, d] for every image its own.
        first_layer: where they begin, from 0.
    """

    def __init__(self, tokens: Tensor, first_layer: int = 0) -> None:
        self.tokens = tokens
        self.first_layer = first_layer

    def check(self, tower: Tower, images: int | None = None) -> None:
        """Refuse tokens that do not fit a tower, or a batch of so many images.

        Raises:
            ConfigurationError: their shape is another.
        """
        shape, last = list(self.tokens.shape), tower.depth - self.first_layer
        by_image = len(shape) == 4 and shape[0] == images
        layers = shape[-3] if len(shape) > 2 else 1
        if not (len(shape) in (2, 3) or by_image) or shape[-1] != tower.width or not 1 <= layers <= last:
            own = "" if images is None else f" or [{images}, L, K, d]"
            raise ConfigurationError(
                f"prompts have shape {shape}; this tower ({tower.name}) takes [K, d], [L, K, d]{own} with "
                f"d = {tower.width} and L from 1 to {last}"
            )

    def prompts(self, layer: int) -> Tensor | None:
        """Return the tokens of a layer, [K, d] or [B, K, d]."""
        by_layer = self.tokens.unsqueeze(0) if self.tokens.ndim == 2 else self.tokens
        at, layers = layer - self.first_layer, by_layer.shape[-3]
        return by_layer[..., at, :, :] if 0 <= at < layers else None


class AtTargets(TowerPart):
    """Base of the parts that add something to the outputs at chosen targets; ``change`` says what."""

    targets: tuple[Target, ...] = ()

    def aim(self, targets: Sequence[Target]) -> None:
        """Say which targets are changed.

        Raises:
            ConfigurationError: there is none, or one stands there twice.
        """
        if not targets or len(set(targets)) != len(targets):
            raise ConfigurationError(f"{type(self).__name__}: targets={list(targets)}; give at least one, each once")
        self.targets = tuple(targets)
        thirds: tuple[Projection, ...] = ("qkv",) if {"q", "k", "v"} & set(targets) else ()
        names: tuple[Projection, ...] = ("proj", "fc1", "fc2")
        self.projections = (*thirds, *(name for name in names if name in targets))

    def change(self, target: Target, layer: int, x: Tensor) -> Tensor:
        """Return what is added at a target, [..., T, out], of the projection's input [..., T, in]."""
        raise NotImplementedError(f"{type(self).__name__}.change")

    def linear(self, layer: int, name: Projection, x: Tensor, y: Tensor) -> Tensor:
        """Add what ``change`` gives: to a projection's output, or to its thirds."""
        if name != "qkv":
            return y + self.change(name, layer, x)
        thirds = [
            third + self.change(target, layer, x) if target in self.targets else third
            for target, third in zip(("q", "k", "v"), y.chunk(3, dim=-1), strict=True)
        ]
        return torch.cat(thirds, dim=-1)


class LowRank(AtTargets, Checked, nn.Module):
    """LoRA (Hu et al., ICLR 2022): ``W x + (alpha / r) B A x`` at chosen projections of a tower's blocks.

    A starts Kaiming-uniform with a = sqrt 5, which is U(-1/sqrt(in), 1/sqrt(in)), and B at 0, so that the tower is
    unchanged at the start. Factors are applied one after the other: their product is never formed.

    Args:
        rank: r; 0 leaves the tower as it is.
        alpha: the scale is alpha / r.
        targets: projections with factors; ``q``, ``k`` and ``v`` are the thirds of the attention's first one.
        first_block: the first block with factors, counted from 1.
        key: of the draws; another branch of factors beside this one has another key.

    Attributes:
        a: A of each target, [L, r, in] for the L blocks from ``first_block`` on.
        b: B of each target, [L, out, r].
    """

    shared = ("a", "b")

    def __init__(
        self,
        rank: FewOrNone = 8,
        alpha: PositiveFloat = 16.0,
        targets: Sequence[Target] = ("q", "v"),
        first_block: Few = 1,
        key: str = "low rank",
    ) -> None:
        super().__init__()
        self.key = key
        self.aim(targets)
        if not rank:
            self.projections = ()
        self.rank, self.alpha = rank, alpha
        self.first_block, self.first_layer = first_block, first_block - 1
        self.scale = alpha / rank if rank else 0.0

    def fit(self, tower: Tower) -> Self:
        """Make the factors, keyed by the tower and the target."""
        layers = tower.layers_from(self.first_block, f"{type(self).__name__}: first_block")
        self.a, self.b = nn.ParameterDict(), nn.ParameterDict()
        for target in self.targets:
            into, out_of = tower.sizes(target)
            with keyed_initialization(self.key, tower.name, target):
                drawn = torch.empty(layers, self.rank, into).uniform_(-1, 1) / math.sqrt(into)
            self.a[target], self.b[target] = nn.Parameter(drawn), nn.Parameter(torch.zeros(layers, out_of, self.rank))
        return self

    def change(self, target: Target, layer: int, x: Tensor) -> Tensor:
        """Return ``(alpha / r) B A x`` of a target, [..., T, out] of [..., T, in]."""
        at = layer - self.first_layer
        return self.scale * ((x @ self.a[target][at].mT) @ self.b[target][at].mT)


class Adapter(TowerPart, Checked, nn.Module):
    """A bottleneck ``scale * up(relu(down(x)))`` in each block: beside it, or in sequence behind its MLP.

    In sequence, as Houlsby et al. (ICML 2019) have it, the MLP's output h becomes ``h + scale * up(relu(down(h)))``.
    Beside, the bottleneck takes the block's normed input and is added to the block's output. ``down`` starts
    Kaiming-uniform, as torch's linear layers do, ``up`` and the biases at 0, so that the tower is unchanged at first.

    Args:
        width: of the bottleneck; 0 leaves the tower as it is.
        place: see above.
        scale: of what is added.
        first_block: the first block with an adapter, counted from 1.

    Attributes:
        down: [L, width, d], with ``down_bias`` [L, width].
        up: [L, d, width], with ``up_bias`` [L, d].
    """

    shared = ("down", "down_bias", "up", "up_bias")

    def __init__(
        self,
        width: FewOrNone = 16,
        place: Literal["beside", "in_sequence"] = "in_sequence",
        scale: NonNegativeFloat = 1.0,
        first_block: Few = 1,
    ) -> None:
        super().__init__()
        self.width, self.scale = width, scale
        self.first_block, self.first_layer = first_block, first_block - 1
        active = bool(width and scale)
        self.in_parallel = active and place == "beside"
        self.projections = ("fc2",) if active and place == "in_sequence" else ()

    def fit(self, tower: Tower) -> Self:
        """Make the bottlenecks, keyed by the tower."""
        layers, width = tower.layers_from(self.first_block, f"{type(self).__name__}: first_block"), tower.width
        with keyed_initialization("adapter", tower.name):
            self.down = nn.Parameter(torch.empty(layers, self.width, width).uniform_(-1, 1) / math.sqrt(width))
        self.down_bias = nn.Parameter(torch.zeros(layers, self.width))
        self.up = nn.Parameter(torch.zeros(layers, width, self.width))
        self.up_bias = nn.Parameter(torch.zeros(layers, width))
        return self

    def bottleneck(self, layer: int, x: Tensor) -> Tensor:
        """Return what is added, [..., T, d] of [..., T, d]."""
        at = layer - self.first_layer
        hidden = F.relu(x @ self.down[at].mT + self.down_bias[at])
        return self.scale * (hidden @ self.up[at].mT + self.up_bias[at])

    def linear(self, layer: int, name: Projection, x: Tensor, y: Tensor) -> Tensor:
        """Add the bottleneck of the MLP's output."""
        return y + self.bottleneck(layer, y)

    def beside(self, layer: int, x: Tensor) -> Tensor:
        """Return the bottleneck of the block's normed input."""
        return self.bottleneck(layer, x)


class Biases(TowerPart, Checked, nn.Module):
    """BitFit (Ben Zaken et al., ACL 2022): what is added to the biases of chosen projections.

    Args:
        targets: the projections.
        first_block: the first block whose biases are tuned, counted from 1.

    Attributes:
        biases: of each projection [L, out], from 0 on.
    """

    shared = ("biases",)

    def __init__(self, targets: Sequence[Projection] = ("qkv", "proj", "fc1", "fc2"), first_block: Few = 1) -> None:
        super().__init__()
        if not targets or len(set(targets)) != len(targets):
            raise ConfigurationError(f"Biases: targets={list(targets)}; give at least one, each once")
        self.projections = tuple(targets)
        self.first_block, self.first_layer = first_block, first_block - 1

    def fit(self, tower: Tower) -> Self:
        """Make the biases."""
        layers = tower.layers_from(self.first_block, f"{type(self).__name__}: first_block")
        out_of = {"qkv": 3 * tower.width, "fc1": tower.hidden}
        self.biases = nn.ParameterDict(
            {name: torch.zeros(layers, out_of.get(name, tower.width)) for name in self.projections}
        )
        return self

    def linear(self, layer: int, name: Projection, x: Tensor, y: Tensor) -> Tensor:
        """Add the bias."""
        return y + self.biases[name][layer - self.first_layer]


class Norms(TowerPart, Checked, nn.Module):
    """Normalisation tuning: what is added to gain and bias of a tower's LayerNorms.

    ``LN(x) = (g + dg) * z + b + db`` with the frozen g and b and the standardised tokens z, after LayerNorm
    tuning of language models (Zhao et al., ICLR 2024). A norm before all blocks, as CLIP's image tower has one, stays.

    Args:
        targets: the norms: those of each block, and the tower's last one.
        first_block: the first block whose norms are tuned, counted from 1.

    Attributes:
        gains: dg, from 0 on: of a block's norm [L, d] for the L blocks from ``first_block`` on, of the final one [d].
        biases: db, alike.
    """

    shared = ("gains", "biases")

    def __init__(self, targets: Sequence[Norm] = ("norm1", "norm2"), first_block: Few = 1) -> None:
        super().__init__()
        if not targets or len(set(targets)) != len(targets):
            raise ConfigurationError(f"Norms: targets={list(targets)}; give at least one, each once")
        self.norms = tuple(targets)
        self.first_block, self.first_layer = first_block, first_block - 1

    def fit(self, tower: Tower) -> Self:
        """Make gains and biases."""
        layers = tower.layers_from(self.first_block, f"{type(self).__name__}: first_block")
        shapes = {name: (tower.width,) if name == "final" else (layers, tower.width) for name in self.norms}
        self.gains, self.biases = (
            nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()}) for _ in range(2)
        )
        return self

    def norm(self, layer: int, name: Norm, x: Tensor, y: Tensor) -> Tensor:
        """Add ``dg * x + db``."""
        gain, bias = self.gains[name], self.biases[name]
        if name != "final":
            gain, bias = gain[layer - self.first_layer], bias[layer - self.first_layer]
        return y + gain * x + bias
