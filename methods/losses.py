"""The mathematics of the objectives: pure functions of tensors for ONE client, one per equation."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.masked import at_least_float32
from benchmark.masked import cross_entropy as cross_entropy
from benchmark.masked import masked_mean as masked_mean


def squared_norm(parameters: Mapping[str, Tensor]) -> Tensor:
    """``||w||^2`` over all tensors, a scalar."""
    return torch.stack([value.square().sum() for value in parameters.values()]).sum()


def squared_distance(parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> Tensor:
    """``||w - w'||^2`` over the tensors named in ``anchor``, a scalar."""
    return torch.stack([(parameters[name] - value).square().sum() for name, value in anchor.items()]).sum()


def column_relation(own: Mapping[str, Tensor], others_mean: Mapping[str, Tensor], m: int) -> Tensor:
    """The part of ``tr(W Omega W^T)``, ``Omega = I - 11^T / m``, that depends on one column w_t of W [P, m].

    The trace is ``sum_j ||w_j - mean||^2``, which is ``(1 - 1/m) ||w_t - mean of the others||^2`` and the same sum over
    the other columns and their mean.

    Args:
        own: w_t.
        others_mean: mean of the other columns.
        m: number of columns.
    """
    return (1 - 1 / m) * squared_distance(own, others_mean)


def cosines(left: Tensor, right: Tensor, eps: float = 1e-8) -> Tensor:
    """Return ``cos(a, b)`` of each pair of rows, [n, d] each, in float32 at least: [n]."""
    return F.cosine_similarity(at_least_float32(left), at_least_float32(right), dim=1, eps=eps)


def similarities(images: Tensor, classes: Tensor) -> Tensor:
    """Return ``f W^T`` of L2-normalised image features and text features: [B, C].

    CLIP multiplies it by 100: bfloat16's eight bits are too few for it, so autocast leaves it alone.

    Args:
        images: f, [B, e].
        classes: W, [C, e], or of each image its own, [B, C, e].
    """
    with torch.autocast(images.device.type, enabled=False):
        f, w = at_least_float32(images), at_least_float32(classes)
        return f @ w.T if w.ndim == 2 else torch.einsum("be,bce->bc", f, w)


def model_contrast(z: Tensor, z_received: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """``-log(e^{cos(z,z_g)/tau} / (e^{cos(z,z_g)/tau} + e^{cos(z,z_p)/tau}))`` per image (MOON, Eq. 3).

    Args:
        z: features under the model being trained, [B, d].
        z_received: under the received model, z_g, [B, d].
        z_previous: under the client's previous model, z_p, [B, d].
        temperature: tau.

    Returns:
        [B], between 0 and ``log(1 + e^{2/tau})``.
    """
    near, far = cosines(z, z_received), cosines(z, z_previous)
    # A cross-entropy of two classes. Other forms of it round on a CPU as the number of clients in a step has it.
    return -F.log_softmax(torch.stack([near, far], dim=1) / temperature, dim=1)[:, 0]
