"""The mathematics of the objectives: pure functions of tensors for ONE client, one per equation."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of ``values`` [B] over the rows where ``mask`` [B] is True; 0 if there are none."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Mean cross-entropy over the rows of a mini-batch that hold an image.

    Args:
        logits: [B, C].
        y: labels, [B]; any value where ``mask`` is False.
        mask: bool, [B].
    """
    return masked_mean(F.cross_entropy(logits.float(), y.clamp(min=0), reduction="none"), mask)


def squared_distance(parameters: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> Tensor:
    """``||w - w'||^2`` over the tensors named in ``anchor``, a scalar."""
    return torch.stack([(parameters[name] - value).square().sum() for name, value in anchor.items()]).sum()


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
    near, far = F.cosine_similarity(z, z_received, dim=1), F.cosine_similarity(z, z_previous, dim=1)
    return F.softplus((far - near) / temperature)
