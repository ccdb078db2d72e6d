"""Attention over the prompts of several clients, which makes one prompt of them (PLAN)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmark.federation import Values
from methods.attention import begin_together

#: Linear maps of each layer, and the norms that all layers have in common.
MAPS = ("query", "key", "value", "out", "inner", "outer")
NORMS = ("first_norm", "second_norm")


def aggregator(layers: int, width: int) -> nn.ParameterDict:
    """Draw the parameters of ``aggregated`` as torch draws its attention and its linear maps.

    They hold ``layers (8 d^2 + 7 d) + 4 d`` numbers.

    Args:
        layers: L, with maps of their own: weights [L, out, in] and biases [L, out].
        width: d, of the prompts; the feed-forward network is twice as wide.
    """
    drawn: dict[str, list[nn.Linear]] = {name: [] for name in MAPS}
    for _ in range(layers):
        attention = [nn.Linear(width, width) for _ in range(4)]
        begin_together(*attention)
        network = [nn.Linear(width, 2 * width), nn.Linear(2 * width, width)]
        for of, linear in zip(drawn.values(), [*attention, *network], strict=True):
            of.append(linear)
    made: Values = {}
    for name, of in drawn.items():
        made[f"{name}_weight"] = torch.stack([linear.weight.detach() for linear in of])
        made[f"{name}_bias"] = torch.stack([linear.bias.detach() for linear in of])
    for name in NORMS:
        made |= {f"{name}_weight": torch.ones(width), f"{name}_bias": torch.zeros(width)}
    return nn.ParameterDict({name: nn.Parameter(value) for name, value in made.items()})


def aggregated(prompts: Tensor, parameters: Values, heads: int) -> Tensor:
    """Return what the aggregator of each layer makes of the clients' prompts of that layer, [L, n, d].

    At each of the n places by itself, with the K clients as a sequence without positions: ``x <- LN1(x + MHA(x))``,
    ``x <- LN2(x + W2 relu(W1 x))``, and the mean over the clients. So the order of clients does not matter.

    Args:
        prompts: [K, L, n, d].
        parameters: of ``aggregator``, by name.
        heads: of the attention, divides d.
    """

    def mapped(x: Tensor, name: str) -> Tensor:
        bias = parameters[f"{name}_bias"][:, None, None]
        return torch.einsum("lkni,loi->lkno", x, parameters[f"{name}_weight"]) + bias

    def normed(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], parameters[f"{name}_weight"], parameters[f"{name}_bias"])

    x = prompts.transpose(0, 1)  # [L, K, n, d]
    query, key, value = (mapped(x, name).unflatten(-1, (heads, -1)) for name in MAPS[:3])
    scores = torch.einsum("lqnhi,lknhi->lnhqk", query, key) * query.shape[-1] ** -0.5
    attended = torch.einsum("lnhqk,lknhi->lqnhi", scores.softmax(-1), value).flatten(-2)
    x = normed(x + mapped(attended, "out"), "first_norm")
    x = normed(x + mapped(mapped(x, "inner").relu(), "outer"), "second_norm")
    return x.mean(1)
