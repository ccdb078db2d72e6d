"""The mathematics of the objectives: pure functions of tensors for ONE client, one per equation."""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmark.masked import cross_entropy as cross_entropy
from benchmark.masked import in_float32
from benchmark.masked import masked_mean as masked_mean

Contrast = Literal["both", "no_positive", "no_negative", "none"]
Sign = Literal["intended", "printed"]


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


@in_float32
def cosines(left: Tensor, right: Tensor, eps: float = 1e-8) -> Tensor:
    """Return ``cos(a, b)`` of each pair of rows, [n, d] each: [n]."""
    return F.cosine_similarity(left, right, dim=1, eps=eps)


@in_float32
def own_similarities(images: Tensor, classes: Tensor) -> Tensor:
    """Return ``f W^T`` of image features f, [B, e], and text features W of each image, [B, C, e]: [B, C]."""
    return torch.einsum("be,bce->bc", images, classes)


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


@in_float32
def taught_entropy(logits: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """Return ``H(z, s) = -mean_b sum_c softmax(z)_bc log softmax(s)_bc`` of logits s and the teacher's z, [B, C]."""
    return masked_mean(-(teacher.softmax(1) * logits.log_softmax(1)).sum(1), mask)


@in_float32
def divergence_from_frozen(prompted: Tensor, frozen: Tensor, mask: Tensor) -> Tensor:
    """Return ``(1 / (B C)) sum_bc q_bc (log q_bc - log p_bc)``: p of the logits, q of the frozen model's, [B, C]."""
    expected = frozen.log_softmax(1)
    return masked_mean((expected.exp() * (expected - prompted.log_softmax(1))).mean(1), mask)


def unevenness(foreign: Tensor) -> Tensor:
    """Return ``logsumexp_j s_j - mean_j s_j`` of logits s [B, K]: [B], at least log K, which equal logits have."""
    # As logarithms of probabilities: other forms round on a CPU as the number of clients in a step has it.
    return -F.log_softmax(foreign, dim=-1).mean(-1)


def soft_maximum(losses: Tensor, mask: Tensor, tau: float) -> Tensor:
    """Return ``tau log mean_i exp(l_i / tau)`` over the losses [B] where the mask [B] is True; 0 if there are none."""
    scaled = (losses / tau).masked_fill(~mask, torch.finfo(losses.dtype).min)
    return torch.where(mask.any(), tau * (scaled.logsumexp(0) - mask.sum().clamp(min=1).log()), 0.0)


def text_contrast(
    shared: Tensor, anchor: Tensor, own: Tensor, temperature: float, contrast: Contrast, sign: Sign
) -> Tensor:
    """Return FedPGP's second objective, a mean over classes.

    ``both``: ``-log(e^{s(z_G, z_C) / tau} / (e^{s(z_G, z_C) / tau} + e^{s(z_G, z_i) / tau}))`` with s the cosine.
    ``no_positive``: ``s(z_G, z_i)``. ``no_negative``: ``1 - s(z_G, z_C)``. So the ablations are meant; the paper prints
    ``1 - s(z_G, z_i)`` and ``s(z_G, z_C)``, which push the other way.

    Args:
        shared: text features under the shared prompt, z_G, [C, e].
        anchor: those of hand-written prompts, z_C, [C, e].
        own: those under the client's prompt, z_i, [C, e].
        temperature: tau.
        contrast: ``both``, ``no_positive`` or ``no_negative``.
        sign: ``intended`` or ``printed``, for the ablations.
    """
    if contrast == "both":
        # A cross-entropy of two classes. Other forms of it round on a CPU as the number of clients in a step has it.
        near, far = cosines(shared, anchor), cosines(shared, own)
        return -F.log_softmax(torch.stack([near, far], dim=1) / temperature, dim=1)[:, 0].mean()
    if contrast == "no_positive":
        similarity = cosines(shared, own).mean()
        return similarity if sign == "intended" else 1 - similarity
    similarity = cosines(shared, anchor).mean()
    return 1 - similarity if sign == "intended" else similarity
