"""Enter torch and Lightning where they have no public door, each with a test that fails once it is shut.

The rest of the project takes these names from here alone (``tests/test_house.py``), so that a release which moves one
of them is mended in this file.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._functorch import is_batchedtensor as is_batchedtensor
from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
from torch._C._functorch import is_gradtrackingtensor as is_gradtrackingtensor
from torch._ops import OpOverload as OpOverload
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import register_pytree_node as register_pytree_node
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

#: torch's families of layers, which it has no public name for
BATCH_NORMS: type[nn.Module] = _BatchNorm
NORMS_WITH_STATISTICS: type[nn.Module] = _NormBase
DROPOUTS: type[nn.Module] = _DropoutNd


def copy_all(into: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copy tensors into others of their shapes, with one kernel where a GPU can."""
    torch._foreach_copy_(list(into), list(given))


def without_autocast() -> AbstractContextManager[None]:
    """Carry out operations as they are below autocast, whatever is set."""
    return cast(AbstractContextManager[None], torch._C._DisableAutocast())


def has_onednn() -> bool:
    """Return whether this torch computes a layer by oneDNN, as :func:`onednn_linear` asks."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply a layer to contiguous tensors on a CPU by oneDNN: ``F.linear`` without gradients."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return made


def has_hooks(module: nn.Module) -> bool:
    """Return whether calling a module does more than its ``forward``: it has hooks, forward or backward."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def gradient_shape(parameter: Tensor) -> tuple[int, ...]:
    """Return the shape of gradients that a parameter takes in: its own when the oldest living graph of it was made."""
    accumulator = cast(Any, parameter.view_as(parameter).grad_fn).next_functions[0][0]
    return tuple(accumulator._input_metadata[0].shape)


def present_hook(module: Any) -> str | None:
    """Return the name of the hook of a LightningModule that the Trainer is in, None outside of all."""
    return cast("str | None", module._current_fx_name)


def steps_by_hand(trainer: Any) -> Any:
    """Return Lightning's count of optimizer steps under manual optimization, which its checkpoints go by."""
    return trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total


def train_at_least(trainer: Any, rounds: int) -> None:
    """Have no callback stop the Trainer before so many epochs."""
    trainer.fit_loop.min_epochs = max(trainer.min_epochs or 0, rounds)


@contextmanager
def with_trainer(method: Any, trainer: Any) -> Iterator[None]:
    """Give a method another Trainer for a while, or what stands for one."""
    before, method.trainer = method._trainer, trainer
    try:
        yield
    finally:
        method.trainer = before
