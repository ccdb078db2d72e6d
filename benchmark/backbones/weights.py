"""Check that all tensors of a weights file hold finite real numbers."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor


def unfit_tensors(state: Mapping[str, Tensor], whole: Collection[str] = ()) -> list[str]:
    """Return the tensors that cannot be weights, a line each with the reason.

    Weights are floating-point and finite; integers and complex numbers are not.

    Args:
        state: tensors by name.
        whole: names of the tensors that are integers in the model too, such as the counters of batch normalisation.
    """
    unfit = []
    for name, value in state.items():
        if not value.is_floating_point():
            if name not in whole:
                unfit.append(f"{name} is of type {str(value.dtype).removeprefix('torch.')}, not of real numbers")
        elif bad := int((~torch.isfinite(value.float())).sum()):
            unfit.append(f"{name} has {bad} of {value.numel()} numbers that are NaN or infinite")
    return unfit
