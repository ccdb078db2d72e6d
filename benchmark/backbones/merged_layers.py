"""Frozen layers and attention of all clients as one operation each, where torch's rules for ``vmap`` make several."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from benchmark.backbones import products
from benchmark.internals import is_batchedtensor, is_functorch_wrapped_tensor


class MergedLayers(TorchFunctionMode):
    """While it is on, clients under ``vmap`` are merged into the batch of frozen layers and of fused attention.

    torch maps a linear layer that all clients share to a product and an addition, in float32 where autocast has made
    the rest bfloat16, and fused attention to its plain operations or, on a CPU, to a loop. Here each is the operation
    that a single client with as many images would take. Under autocast a frozen weight is cast once, not in each step.

    Args:
        moving: parameters that are not frozen. In an evaluation they are the same for all clients, too, but from one
            evaluation to the next they have other values.
    """

    def __init__(self, moving: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._moving = WeakIdKeyDictionary(dict.fromkeys(moving))
        #: per frozen parameter its version, and itself in another type
        self._casts = WeakIdKeyDictionary()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is F.linear:
            return self._linear(*args, **named)
        if func is F.scaled_dot_product_attention and named.keys() <= {"attn_mask", "scale", "is_causal", "dropout_p"}:
            return _attention(*args, **named)
        return func(*args, **named)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if is_functorch_wrapped_tensor(weight) or (bias is not None and is_functorch_wrapped_tensor(bias)):
            return F.linear(input, weight, bias)  # each client's own
        if not (torch.is_grad_enabled() and weight.requires_grad):
            device = input.device.type
            if torch.is_autocast_enabled(device) and input.dtype != torch.float64:  # which autocast leaves alone
                kind = torch.get_autocast_dtype(device)
                weight, bias = self._cast(weight, kind), None if bias is None else self._cast(bias, kind)
            return _of_frozen(input, weight, bias)
        return F.linear(input, weight, bias)

    def _cast(self, value: Tensor, kind: torch.dtype) -> Tensor:
        """Return a frozen value in another type: the one that was made when it last changed."""
        if value.dtype == kind or value.requires_grad or value in self._moving:
            return value.to(kind)
        version, cast = self._casts.get(value, (-1, None))
        if version != value._version or cast.dtype != kind:
            with torch.inference_mode(False), torch.no_grad():
                cast = value.to(kind)
            self._casts[value] = (value._version, cast)
        return cast


class _Merged(torch.autograd.Function):
    """Is only called under vmap, whose rule is all it has; gradients are of what that rule does."""

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""


class _Linear(_Merged):
    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], x: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        return _of_frozen(x.movedim(in_dims[0], 0), weight, bias), 0


def _of_frozen(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return a frozen layer's output, of all clients in one product, and by oneDNN where that is faster."""
    if is_batchedtensor(x):
        made: Tensor = _Linear.apply(x, weight, bias)
        return made
    if not is_functorch_wrapped_tensor(x) and products.faster_by_onednn() and products.takes(x, weight, bias):
        return products.linear(x, weight, bias)
    return F.linear(x, weight, bias)


class _Attention(_Merged):
    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        causal: bool,
        scale: float | None,
    ) -> tuple[Tensor, int]:
        # [K, ..., h, T, d], then [K * ..., h, T, d]: the fused kernels take four dimensions
        query, key, value = (
            part.movedim(dim, 0) if dim is not None else part.expand(info.batch_size, *part.shape)
            for part, dim in zip((query, key, value), in_dims, strict=False)
        )
        leading = query.shape[:-3]
        query, key, value = (part.flatten(0, -4) for part in (query, key, value))
        made = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scale)
        return made.unflatten(0, leading), 0


def _by_operations(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention with a mask, or inside of a client's own gradient, where fused kernels have no rule for ``vmap``."""
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if mask is None or mask.dtype != torch.bool:
        return (scores if mask is None else scores + mask).softmax(dim=-1) @ value
    weights = scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(dim=-1)
    return weights.masked_fill(~mask.any(-1, keepdim=True), 0.0) @ value  # what sees nothing is 0


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attention of clients together; with a mask by operations.

    cuDNN's gradient with a mask is wrong in bfloat16 (seen with torch 2.11 on an H200), and where clients are mapped
    over, autocast leaves the mask in another type than the kernels take.
    """
    parts = (query, key, value)
    alike = query.ndim == key.ndim == value.ndim >= 3 and query.shape[:-2] == key.shape[:-2] == value.shape[:-2]
    if alike and attn_mask is None and not dropout_p and any(map(is_batchedtensor, parts)):
        made: Tensor = _Attention.apply(*parts, is_causal, scale)
        return made
    masked_on_gpu = attn_mask is not None and query.is_cuda
    if (masked_on_gpu or any(map(is_functorch_wrapped_tensor, parts))) and not (dropout_p or is_causal):
        return _by_operations(query, key, value, attn_mask, scale)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale
    )
