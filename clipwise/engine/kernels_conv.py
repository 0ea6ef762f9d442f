"""The Triton kernels of patches.py and strips.py. Imported on a GPU only."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels_cuda import fill_bounds, pair_of_tiles, store_pair


@triton.jit
def _patch_products(
    left,
    x,
    keep,
    out,
    images,
    each,
    positions,
    out_width,
    height,
    width,
    p,
    c,
    places,
    kernel_width,
    left_image,
    left_row,
    x_image,
    x_row,
    x_column,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    BEFORE_H: tl.constexpr,
    BEFORE_W: tl.constexpr,
    STEP_H: tl.constexpr,
    STEP_W: tl.constexpr,
    HIDE: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
    T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """P × C entries of one place of the kernel, summed over the positions of `each` images."""
    columns = tl.cdiv(c, C)
    tiles = places * columns * tl.cdiv(p, P)
    group, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    place, column, row = tile % places, (tile // places) % columns, tile // (places * columns)
    down, right = (place // kernel_width) * STEP_H - BEFORE_H, (place % kernel_width) * STEP_W - BEFORE_W
    n, m = row * P + tl.arange(0, P), column * C + tl.arange(0, C)
    total = tl.zeros([P, C], tl.float32)
    for k in range(0, each * positions, T):
        at = k + tl.arange(0, T)
        image, t = group * each + at // positions, at % positions
        inside = (at < each * positions) & (image < images)
        if HIDE:
            inside &= tl.load(keep + image, inside, other=0) != 0
        i, j = (t // out_width) * STRIDE_H + down, (t % out_width) * STRIDE_W + right
        seen = inside & (i >= 0) & (i < height) & (j >= 0) & (j < width)
        image = image.to(tl.int64)
        a = left + (image * left_image + t * left_row)[:, None] + n[None, :]
        b = x + (image * x_image + i * x_row + j * x_column)[:, None] + m[None, :]
        grads = tl.load(a, inside[:, None] & (n < p)[None, :], other=0.0)
        inputs = tl.load(b, seen[:, None] & (m < c)[None, :], other=0.0)
        total = tl.dot(grads.T, inputs, total, input_precision=PRECISION)
    to = out + ((group.to(tl.int64) * p + n)[:, None] * places + place) * c + m[None, :]
    tl.store(to, total, (n < p)[:, None] & (m < c)[None, :])


def patch_products(left, x, keep, kernel, stride, before, dilation, out, each: int, hide: bool) -> Tensor:
    """Σ over the images of each group and their positions: [groups, p, *kernel, c], of left [n, t, p], x [n, *in, c].

    With `hide`, images that are not kept are not read.
    """
    left, x = (v if v.stride(-1) == 1 else v.contiguous() for v in (left, x))
    images, positions, p = left.shape
    _, height, width, c = x.shape
    places, groups = kernel[0] * kernel[1], triton.cdiv(images, each)
    made = torch.empty(groups, p, *kernel, c, dtype=torch.float32, device=x.device)
    most = 128 if each * positions >= 1024 and p > 64 and c > 64 else 64
    rows, columns = (min(most, max(16, triton.next_power_of_2(side))) for side in (p, c))
    tiles = places * triton.cdiv(c, columns) * triton.cdiv(p, rows)
    _patch_products[(groups * tiles,)](
        left,
        x,
        keep.contiguous().view(torch.uint8),
        made,
        images,
        each,
        positions,
        out[1],
        height,
        width,
        p,
        c,
        places,
        kernel[1],
        left.stride(0),
        left.stride(1),
        x.stride(0),
        x.stride(1),
        x.stride(2),
        *stride,
        *before,
        *dilation,
        hide,
        rows,
        columns,
        32,
        "tf32" if x.dtype == torch.float32 else "ieee",
        num_warps=8 if rows * columns > 64 * 64 else 4,
        num_stages=3,
    )
    return made


@triton.jit
def _cut(value):
    """To TF32's bits; NaN stays NaN."""
    bits = (value.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return tl.where(value == value, bits, value)


@triton.jit
def _inner_products(
    x, out, positions, width, x_image, x_row, CUT: tl.constexpr, TILE: tl.constexpr, DEPTH: tl.constexpr
):
    """TILE × TILE of one image."""
    image = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * TILE + tl.arange(0, TILE)
    columns = tl.program_id(2) * TILE + tl.arange(0, TILE)
    x += image * x_image
    total = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, width, DEPTH):
        n = k + tl.arange(0, DEPTH)
        a = tl.load(
            x + rows[:, None] * x_row + n[None, :], (rows < positions)[:, None] & (n < width)[None, :], other=0.0
        )
        b = tl.load(
            x + columns[:, None] * x_row + n[None, :], (columns < positions)[:, None] & (n < width)[None, :], other=0.0
        )
        if CUT:
            a, b = _cut(a), _cut(b)
        total = tl.dot(a, b.T, total, input_precision="tf32" if CUT else "ieee")
    to = out + image * positions * positions + rows.to(tl.int64)[:, None] * positions + columns[None, :]
    tl.store(to, total, (rows < positions)[:, None] & (columns < positions)[None, :])


def inner_products(x: Tensor) -> Tensor:
    """[images, t, t] in float32 of x [images, t, width]: bfloat16, or float32 that is cut to TF32's bits."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    images, positions, width = x.shape
    made = torch.empty(images, positions, positions, dtype=torch.float32, device=x.device)
    tile = min(64, max(16, triton.next_power_of_2(positions)))
    tiles = triton.cdiv(positions, tile)
    _inner_products[(images, tiles, tiles)](
        x,
        made,
        positions,
        width,
        x.stride(0),
        x.stride(1),
        x.dtype == torch.float32,
        tile,
        32 if x.dtype == torch.float32 else 64,
        num_warps=4,
        num_stages=3,
    )
    return made


@triton.jit
def _patch_sums(
    own,
    seen,
    sums,
    squares,
    positions,
    inputs,
    out_width,
    height,
    width,
    tiles,
    places,
    kernel_width,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    BEFORE_H: tl.constexpr,
    BEFORE_W: tl.constexpr,
    STEP_H: tl.constexpr,
    STEP_W: tl.constexpr,
    TILE: tl.constexpr,
):
    """As `_gram` (kernels_cuda.py) from inner products of outputs and of inputs, those of patches added up here."""
    image, t = tl.program_id(0), tl.arange(0, TILE)
    i, j = pair_of_tiles(tl.program_id(1), tiles)
    rows, columns = i * TILE + t, j * TILE + t
    inside = (rows < positions)[:, None] & (columns < positions)[None, :]
    own += image.to(tl.int64) * positions * positions
    seen += image.to(tl.int64) * inputs * inputs
    a = tl.load(own + rows.to(tl.int64)[:, None] * positions + columns[None, :], inside, other=0.0)
    b = tl.zeros([TILE, TILE], tl.float32)
    for place in range(places):
        down, right = (place // kernel_width) * STEP_H - BEFORE_H, (place % kernel_width) * STEP_W - BEFORE_W
        y, x = (rows // out_width) * STRIDE_H + down, (rows % out_width) * STRIDE_W + right
        v, u = (columns // out_width) * STRIDE_H + down, (columns % out_width) * STRIDE_W + right
        first = (y >= 0) & (y < height) & (x >= 0) & (x < width)
        second = (v >= 0) & (v < height) & (u >= 0) & (u < width)
        here = seen + (y * width + x).to(tl.int64)[:, None] * inputs + (v * width + u)[None, :]
        b += tl.load(here, inside & first[:, None] & second[None, :], other=0.0)
    store_pair(a, b, i, j, sums, squares, positions, TILE)


def patch_bound(left, x, kernel, stride, before, dilation, out, errors: list[float]) -> Tensor:
    """The squared norms' bounds [images], float64, of left [images, t, p] and x [images, *in, c]; `errors`: gram.py."""
    (images, height, width, c), (_, positions, p) = x.shape, left.shape
    own, seen = inner_products(left), inner_products(x.reshape(images, height * width, c))
    tile, places = min(64, max(16, triton.next_power_of_2(positions))), kernel[0] * kernel[1]
    tiles = triton.cdiv(positions, tile)
    sums = torch.empty(1, 3, images, tiles * (tiles + 1) // 2, dtype=torch.float64, device=x.device)
    squares = torch.empty(1, 2, images, 1, positions, dtype=torch.float32, device=x.device)
    _patch_sums[sums.shape[2:]](
        own,
        seen,
        sums,
        squares,
        positions,
        height * width,
        out[1],
        height,
        width,
        tiles,
        places,
        kernel[1],
        *stride,
        *before,
        *dilation,
        tile,
        num_warps=4,
    )
    bound = torch.empty(1, images, dtype=torch.float64, device=x.device)
    more = torch.zeros(1, 3, images, dtype=torch.float64, device=x.device)
    fill_bounds((p, places * c), sums, squares, more, errors, bound)
    return bound[0]


@triton.jit
def _strips(
    x,
    weights,
    keep,
    out,
    height,
    width,
    c,
    remainders,
    positions,
    x_image,
    x_row,
    x_column,
    out_image,
    out_remainder,
    out_strip,
    PLACES: tl.constexpr,
    STRIDE: tl.constexpr,
    BEFORE_H: tl.constexpr,
    BEFORE_W: tl.constexpr,
    STEP: tl.constexpr,
    GIVEN: tl.constexpr,
    Q: tl.constexpr,
    C: tl.constexpr,
):
    """One strip of one image."""
    image = tl.program_id(0).to(tl.int64)
    remainder, strip = tl.program_id(1) % remainders, tl.program_id(1) // remainders
    row = strip * remainders + remainder - BEFORE_H
    there = (row >= 0) & (row < height)
    weight = 1.0
    if GIVEN:
        there &= tl.load(keep + image) != 0
        weight = tl.load(weights + image)
    x += image * x_image + row * x_row
    out += image * out_image + remainder.to(tl.int64) * out_remainder + strip.to(tl.int64) * out_strip
    for first in range(0, positions, Q):
        q = first + tl.arange(0, Q)
        for place in tl.static_range(PLACES):
            column = q * STRIDE + (place * STEP - BEFORE_W)
            seen = there & (q < positions) & (column >= 0) & (column < width)
            for channel in range(0, c, C):
                n = channel + tl.arange(0, C)
                here = x + (column * x_column)[:, None] + n[None, :]
                value = tl.load(here, seen[:, None] & (n < c)[None, :], other=0.0)
                if GIVEN:
                    value = tl.where(seen[:, None], value * weight, 0.0)
                value = _cut(value)
                to = out + ((q * PLACES + place) * c)[:, None] + n[None, :]
                tl.store(to, value, (q < positions)[:, None] & (n < c)[None, :])


def strips(x: Tensor, window, count: tuple[int, int], given, images_last: bool) -> Tensor:
    """As strips.py says; `count` holds remainders and strips of each."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    (images, height, width, c), (remainders, each) = x.shape, count
    positions, places = window.out[1], window.kernel[1]
    line = positions * places * c
    if images_last:
        made = torch.empty(remainders, each, images, positions, places * c, dtype=torch.float32, device=x.device)
        strides = (line, each * images * line, images * line)
    else:
        made = torch.empty(images, remainders, each, positions, places * c, dtype=torch.float32, device=x.device)
        strides = (remainders * each * line, each * line, line)
    channels = min(512, max(16, triton.next_power_of_2(c)))
    weights, keep = (x, x) if given is None else (given.weights.contiguous(), given.keep.contiguous().view(torch.uint8))
    _strips[(images, remainders * each)](
        x,
        weights,
        keep,
        made,
        height,
        width,
        c,
        remainders,
        positions,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        *strides,
        places,
        window.stride[1],
        window.before[0],
        window.before[1],
        window.dilation[1],
        given is not None,
        max(1, min(triton.next_power_of_2(positions), 2048 // channels)),
        channels,
        num_warps=4,
    )
    return made
