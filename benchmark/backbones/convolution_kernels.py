"""Convolutions of stacked clients on a GPU, each client with filters of its own: kernels in Triton.

cuDNN has no fast kernel for as many groups as there are clients, and the product that a convolution amounts to reads
every number of the images as often as a filter has places. Here each program gathers its part of the patches itself.

Factors are cut to the ten bits of TF32, and sums are float32. The like is allowed to cuDNN's convolutions, which round,
by torch's default (``torch.backends.cudnn.allow_tf32``). Every sum is in one order, whatever the GPU does beside it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

#: Of a convolution: output places, filters and terms of a sum at a time, warps, and loads that are under way.
ROWS, COLUMNS, DEPTH, WARPS, STAGES = 128, 64, 32, 8, 3
#: Of the filters' gradient: terms, filters and output places at a time, warps, and loads that are under way.
OWN_ROWS, OWN_COLUMNS, OWN_DEPTH, OWN_WARPS, OWN_STAGES = 32, 64, 64, 4, 3
#: Programs that keep a GPU busy: where a gradient has fewer sums, each is made in parts.
PROGRAMS = 528
#: Least side of a product on tensor cores.
LEAST = 16


@triton.jit
def _convolve(  # type: ignore[no-untyped-def]
    images,
    filters,
    bias,
    out,
    height,
    width,
    down,
    across,
    places,
    CHANNELS: tl.constexpr,
    FILTERS: tl.constexpr,
    SIDE: tl.constexpr,
    PADDING: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum over a filter's terms, channels innermost, for some of a client's output places and filters."""
    client = tl.program_id(1).to(tl.int64)
    images += client * (places // (down * across)) * height * width * CHANNELS
    filters += client * SIDE * SIDE * CHANNELS * FILTERS
    out += client * places * FILTERS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    image, place = row // (down * across), row % (down * across)
    top, left = place // across - PADDING, place % across - PADDING
    corner = ((image * height + top) * width + left) * CHANNELS
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, SIDE * SIDE * CHANNELS, DEPTH):
        term = start + tl.arange(0, DEPTH)
        line, along = term // (SIDE * CHANNELS), term % (SIDE * CHANNELS)
        seen = (row < places)[:, None] & (term < SIDE * SIDE * CHANNELS)[None, :]
        if PADDING > 0:
            at, over = top[:, None] + line[None, :], left[:, None] + (along // CHANNELS)[None, :]
            seen = seen & (at >= 0) & (at < height) & (over >= 0) & (over < width)
        patch = tl.load(images + corner[:, None] + (line * width * CHANNELS + along)[None, :], seen, other=0.0)
        held = (term < SIDE * SIDE * CHANNELS)[:, None] & (column < FILTERS)[None, :]
        weight = tl.load(filters + term[:, None] * FILTERS + column[None, :], held, other=0.0)
        total = tl.dot(patch, weight, total, input_precision=PRECISION)
    if BIASED:
        total += tl.load(bias + client * FILTERS + column, column < FILTERS, other=0.0)[None, :]
    known = (row < places)[:, None] & (column < FILTERS)[None, :]
    tl.store(out + row[:, None] * FILTERS + column[None, :], total, known)


@triton.jit
def _correlate(  # type: ignore[no-untyped-def]
    images,
    gradient,
    out,
    height,
    width,
    down,
    across,
    places,
    part,
    CHANNELS: tl.constexpr,
    FILTERS: tl.constexpr,
    SIDE: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Sum over a part of a client's output places, for some of a filter's terms and some filters."""
    client = (tl.program_id(1) // PARTS).to(tl.int64)
    images += client * (places // (down * across)) * height * width * CHANNELS
    gradient += client * places * FILTERS
    term = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    shift = term // (SIDE * CHANNELS) * width * CHANNELS + term % (SIDE * CHANNELS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    first = (tl.program_id(1) % PARTS) * part
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, part, DEPTH):
        row = first + start + tl.arange(0, DEPTH)  # a part is a number of whole blocks
        there = row < places
        image, place = row // (down * across), row % (down * across)
        corner = ((image * height + place // across) * width + place % across) * CHANNELS
        seen = (term < SIDE * SIDE * CHANNELS)[:, None] & there[None, :]
        patch = tl.load(images + shift[:, None] + corner[None, :], seen, other=0.0)
        held = there[:, None] & (column < FILTERS)[None, :]
        given = tl.load(gradient + row[:, None] * FILTERS + column[None, :], held, other=0.0)
        total = tl.dot(patch, given, total, input_precision=PRECISION)
    out += tl.program_id(1).to(tl.int64) * SIDE * SIDE * CHANNELS * FILTERS
    known = (term < SIDE * SIDE * CHANNELS)[:, None] & (column < FILTERS)[None, :]
    tl.store(out + term[:, None] * FILTERS + column[None, :], total, known)


def _block(count: int, most: int) -> int:
    return max(LEAST, min(most, triton.next_power_of_2(count)))


@torch.library.custom_op("fedprompt::convolve_clients", mutates_args=())
def convolve_clients(
    images: Tensor, filters: Tensor, bias: Tensor | None, side: int, padding: int, precision: str
) -> Tensor:
    """Convolve each client's images with its own filters, stride 1.

    Args:
        images: [K, B, H, W, I], contiguous.
        filters: [K, side * side * I, O], contiguous; rows, columns, channels, the last one innermost.
        bias: [K, O], contiguous.
        side: of the square filters.
        padding: rows and columns of zeros on each side of an image.
        precision: of the factors, ``"tf32"`` or ``"ieee"``.

    Returns:
        [K, B, H + 2 padding - side + 1, W + 2 padding - side + 1, O].
    """
    clients, batch, height, width, channels = images.shape
    count = filters.shape[2]
    down, across = height + 2 * padding - side + 1, width + 2 * padding - side + 1
    if min(down, across) < 1:
        raise ValueError(f"images of {height} x {width} are smaller than filters of {side} x {side}")
    out = images.new_empty(clients, batch, down, across, count)
    places, columns = batch * down * across, _block(count, COLUMNS)
    grid = (triton.cdiv(places, ROWS), clients, triton.cdiv(count, columns))
    shape = height, width, down, across, places, channels, count, side, padding, bias is not None
    given = images if bias is None else bias
    sizes = ROWS, columns, DEPTH, precision
    _convolve[grid](images, filters, given, out, *shape, *sizes, num_warps=WARPS, num_stages=STAGES)
    return out


@torch.library.custom_op("fedprompt::correlate_clients", mutates_args=())
def correlate_clients(images: Tensor, gradient: Tensor, side: int, precision: str) -> Tensor:
    """Return the gradient of each client's filters in a convolution with stride 1 and no padding.

    Args:
        images: [K, B, H, W, I], contiguous.
        gradient: of its output, [K, B, H - side + 1, W - side + 1, O], contiguous.
        side: of the square filters.
        precision: of the factors, ``"tf32"`` or ``"ieee"``.

    Returns:
        [K, side * side * I, O].
    """
    clients, _, height, width, channels = images.shape
    batch, down, across, count = gradient.shape[1:]
    terms, places = side * side * channels, batch * down * across
    rows, columns = _block(terms, OWN_ROWS), _block(count, OWN_COLUMNS)
    grid = triton.cdiv(terms, rows), triton.cdiv(count, columns)
    parts = min(triton.cdiv(PROGRAMS, grid[0] * grid[1] * clients), max(1, triton.cdiv(places, LEAST * OWN_DEPTH)))
    part = OWN_DEPTH * triton.cdiv(places, parts * OWN_DEPTH)
    out = gradient.new_empty(clients, parts, terms, count)
    shape = height, width, down, across, places, part, channels, count, side, parts
    _correlate[(grid[0], clients * parts, grid[1])](
        images,
        gradient,
        out,
        *shape,
        rows,
        columns,
        OWN_DEPTH,
        precision,
        num_warps=OWN_WARPS,
        num_stages=OWN_STAGES,
    )
    return out.sum(1)


class KernelConv2d(torch.autograd.Function):
    """``F.conv2d`` of K clients with stride 1 and no padding.

    x [K, B, I, H, W], weight [K, O, I, k, k], bias [K, O], output [K, B, O, H - k + 1, W - k + 1], channels innermost.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, precision: str) -> Tensor:
        images = x.permute(0, 1, 3, 4, 2).contiguous()
        filters = weight.permute(0, 3, 4, 2, 1).flatten(1, 3).contiguous()
        ctx.save_for_backward(images, weight)
        ctx.precision = precision
        made: Tensor = convolve_clients(images, filters, bias.contiguous(), weight.shape[-1], 0, precision)
        return made.permute(0, 1, 4, 2, 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        images, weight = ctx.saved_tensors
        side = weight.shape[-1]
        for_x, for_weight, for_bias, _ = ctx.needs_input_grad
        given = gradient.permute(0, 1, 3, 4, 2).contiguous()
        made_x = made_weight = None
        if for_x:  # each place sees the filters turned by half a turn
            turned = weight.flip(3, 4).permute(0, 3, 4, 1, 2).flatten(1, 3).contiguous()
            made_x = convolve_clients(given, turned, None, side, side - 1, ctx.precision).permute(0, 1, 4, 2, 3)
        if for_weight:
            by_term = correlate_clients(images, given, side, ctx.precision)
            made_weight = by_term.unflatten(1, (side, side, -1)).permute(0, 4, 3, 1, 2).contiguous()
        return made_x, made_weight, given.flatten(1, 3).sum(1) if for_bias else None, None
