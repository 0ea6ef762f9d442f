"""The Triton kernel of patches.py. Imported on a GPU only, by cuda_ops.py."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


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
        keep.view(torch.uint8),
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
