"""Triton kernels for weighted sums: a factor takes its weights, and rows of dropped examples are put aside.

And for gradients that lie in rows, one for each example: their squares and their weighted sum. Imported on a GPU only,
by cuda_ops.py.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_AT_ONCE = 8  # rows of one program


def _bytes(mask: Tensor) -> Tensor:
    """One after the other, as kernels read them: a column of a matrix is not."""
    return mask.contiguous().view(torch.uint8)


def _check_rows(x: Tensor) -> None:
    assert x.stride(1) == 1
    assert x.stride(0) >= x.shape[1]


@triton.jit
def _put(x, spare, first, rows, width, along, BACK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Some rows of x to `spare`, and zeros in their place; or back."""
    t = tl.arange(0, ROWS)
    row, inside = (first + t).to(tl.int64)[:, None], (t < rows)[:, None]
    for k in range(0, width, COLUMNS):
        n = (k + tl.arange(0, COLUMNS))[None, :]
        here, there = x + row * along + n, spare + row * width + n
        if BACK:
            tl.store(here, tl.load(there, inside & (n < width)), inside & (n < width))
        else:
            tl.store(there, tl.load(here, inside & (n < width)), inside & (n < width))
    if not BACK:
        tl.debug_barrier()  # one thread's zeros may lie where another one still reads
        for k in range(0, width, COLUMNS):
            n = (k + tl.arange(0, COLUMNS))[None, :]
            tl.store(x + row * along + n, tl.zeros([ROWS, COLUMNS], x.dtype.element_ty), inside & (n < width))


@triton.jit
def _move_rows(
    x, spare, dropped, positions, width, along, BACK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The rows of dropped examples to `spare`, or back. Nothing for all the others."""
    example, t = tl.program_id(0), tl.program_id(1) * ROWS
    if tl.load(dropped + example) != 0:
        _put(x, spare, example * positions + t, positions - t, width, along, BACK, ROWS, COLUMNS)


def move_rows(x: Tensor, spare: Tensor, dropped: Tensor, back: bool) -> None:
    """Rows [b·t, n] of dropped examples [b] are hidden in `spare`, or put back."""
    _check_rows(x)
    examples, positions = len(dropped), len(x) // max(len(dropped), 1)
    _move_rows[(examples, triton.cdiv(positions, _AT_ONCE))](
        x, spare, _bytes(dropped), positions, x.shape[1], x.stride(0), back, _AT_ONCE, 256, num_warps=4
    )


@triton.jit
def _weigh(
    x,
    weights,
    dropped,
    out,
    hidden,
    spare,
    positions,
    width,
    along,
    hidden_width,
    hidden_along,
    CUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Rows of x times their example's weight, rounded; zeros, and rows of `hidden` put aside, where it is dropped."""
    example, first = tl.program_id(0), tl.program_id(1) * ROWS
    weight, gone = tl.load(weights + example), tl.load(dropped + example) != 0
    t = first + tl.arange(0, ROWS)
    row, inside = (example * positions + t).to(tl.int64)[:, None], (t < positions)[:, None]
    for k in range(0, width, COLUMNS):
        n = (k + tl.arange(0, COLUMNS))[None, :]
        value = tl.load(x + row * along + n, inside & (n < width), other=0.0).to(tl.float32) * weight
        value = tl.where(gone, 0.0, value)
        if CUT:
            bits = (value.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            value = tl.where(value == value, bits, value)  # NaN stays NaN
        tl.store(out + row * width + n, value.to(out.dtype.element_ty), inside & (n < width))
    if gone:
        _put(
            hidden,
            spare,
            example * positions + first,
            positions - first,
            hidden_width,
            hidden_along,
            False,
            ROWS,
            COLUMNS,
        )


def weigh(x: Tensor, weights: Tensor, dropped: Tensor, hidden: Tensor, spare: Tensor, cut: bool) -> Tensor:
    """Rows [b·t, n] times weights [b] (float32), in the dtype of x, or cut to TF32's bits; zeros for dropped examples.

    Their rows of `hidden` are put aside, as by move_rows.
    """
    _check_rows(x)
    _check_rows(hidden)
    examples, positions = len(dropped), len(x) // max(len(dropped), 1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _weigh[(examples, triton.cdiv(positions, _AT_ONCE))](
        x,
        weights.contiguous(),
        _bytes(dropped),
        out,
        hidden,
        spare,
        positions,
        x.shape[1],
        x.stride(0),
        hidden.shape[1],
        hidden.stride(0),
        cut,
        _AT_ONCE,
        256,
        num_warps=4,
    )
    return out


@triton.jit
def _weighted_rows(x, weights, keep, out, examples, width, along, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, examples, ROWS):
        row = k + tl.arange(0, ROWS)
        kept = tl.load(keep + row, row < examples, other=0) != 0
        weight = tl.load(weights + row, kept, other=0.0)
        here = x + row.to(tl.int64)[:, None] * along + n[None, :]
        total += tl.load(here, kept[:, None] & (n < width)[None, :], other=0.0) * weight[:, None]
    tl.store(out + n, tl.sum(total, axis=0), n < width)


def weighted_rows(x: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
    """Σ_b weights_b·x_b of the kept rows [b, n], in float32; the others are not read."""
    out = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
    _weighted_rows[(triton.cdiv(x.shape[1], 64),)](
        x, weights.contiguous(), _bytes(keep), out, *x.shape, x.stride(0), 16, 64, num_warps=4
    )
    return out


@triton.jit
def _squares(x, out, width, along, parts, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    example, part = (tl.program_id(0) // parts).to(tl.int64), (tl.program_id(0) % parts).to(tl.int64)
    n = (part * CHUNKS + tl.arange(0, CHUNKS))[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    value = tl.load(x + example * along + n, n < width, other=0.0)
    tl.store(out + tl.program_id(0), tl.sum(tl.sum(value * value, axis=1).to(tl.float64)))


def squares(x: Tensor, chunk: int) -> Tensor:
    """Σ x² of rows [b, n]: chunks in float32, their total in float64."""
    parts = triton.cdiv(x.shape[1], 32 * chunk)
    out = torch.empty(len(x), parts, dtype=torch.float64, device=x.device)
    _squares[(len(x) * parts,)](x, out, x.shape[1], x.stride(0), parts, chunk, 32, num_warps=4)
    return out.sum(1)
