"""Triton kernels: Gram sums that never write a T×T matrix, and sums over positions.

Imported on a GPU only, by the ops of products.py.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_TILE = 128  # positions
_CHUNK = tl.constexpr(1024)  # inner products longer than this are cut, and their parts added up


@triton.jit
def _tile(x, example, row, column, width, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr):
    """Inner products of TILE positions with TILE others. Rows and columns beyond the tensor are read as zero."""
    total = tl.zeros([TILE, TILE], tl.float32)
    part = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, width, DEPTH):
        a = x.load([example, row, k]).reshape(TILE, DEPTH)
        b = x.load([example, column, k]).reshape(TILE, DEPTH)
        part = tl.dot(a, b.T, part, input_precision=PRECISION)
        if (k + DEPTH) % _CHUNK == 0:
            total += part
            part = tl.zeros([TILE, TILE], tl.float32)
    return total + part


@triton.jit
def _gram(
    left, right, sums, squares, positions, p, d, tiles, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr
):
    """One pair of tiles (i ≤ j) of one example: Σ a·b, Σ a², Σ b²; and, for i = j, the diagonals."""
    example, pair = tl.program_id(0), tl.program_id(1)
    examples, pairs = tl.num_programs(0), tl.num_programs(1)
    i, j = 0, pair
    while j >= tiles - i:
        j -= tiles - i
        i += 1
    j += i
    a = _tile(left, example, i * TILE, j * TILE, p, TILE, DEPTH, PRECISION)
    b = _tile(right, example, i * TILE, j * TILE, d, TILE, DEPTH, PRECISION)
    times = tl.where(i == j, 1.0, 2.0).to(tl.float64)
    place = sums + example * pairs + pair
    wide_a, wide_b = a.to(tl.float64), b.to(tl.float64)
    tl.store(place, times * tl.sum(wide_a * wide_b))
    tl.store(place + examples * pairs, times * tl.sum(wide_a * wide_a))
    tl.store(place + 2 * examples * pairs, times * tl.sum(wide_b * wide_b))
    if i == j:
        t = tl.arange(0, TILE)
        same, inside = t[:, None] == t[None, :], i * TILE + t < positions
        row = squares + example.to(tl.int64) * positions + i * TILE + t
        tl.store(row, tl.sum(tl.where(same, a, 0.0), axis=1), inside)
        tl.store(row + examples.to(tl.int64) * positions, tl.sum(tl.where(same, b, 0.0), axis=1), inside)


def _blocks(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    b, g, t, width = x.shape
    return TensorDescriptor(x, [b * g, t, width], [t * width, width, 1], [1, rows, columns])


def gram(left: Tensor, right: Tensor, tf32: bool) -> tuple[Tensor, Tensor]:
    """Σ_ts A_ts·B_ts, Σ A_ts², Σ B_ts² per example and group [3, b·g]; the diagonals of A and B [2, b, g, t].

    A and B hold the inner products of the positions of left [b, g, t, p] and right [b, g, t, d].
    """
    b, g, t, p = left.shape
    tiles, depth = triton.cdiv(t, _TILE), 32 if left.dtype == torch.float32 else 64
    pairs = tiles * (tiles + 1) // 2
    sums = torch.empty(3, b * g, pairs, dtype=torch.float64, device=left.device)
    squares = torch.empty(2, b, g, t, dtype=torch.float32, device=left.device)
    _gram[(b * g, pairs)](
        _blocks(left, _TILE, depth),
        _blocks(right, _TILE, depth),
        sums,
        squares,
        t,
        p,
        right.shape[3],
        tiles,
        _TILE,
        depth,
        "tf32" if tf32 else "ieee",
        num_warps=8,
        num_stages=4,
    )
    return sums.sum(2), squares


@triton.jit
def _column_sums(x, out, positions, p, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    example = tl.program_id(0).to(tl.int64)
    n, t = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, positions, ROWS):
        inside = (k + t < positions)[:, None] & (n < p)[None, :]
        total += tl.load(x + (example * positions + k + t)[:, None] * p + n[None, :], inside, other=0.0).to(tl.float32)
    tl.store(out + example * p + n, tl.sum(total, axis=0), n < p)


def column_sums(x: Tensor) -> Tensor:
    """[b, t, p] summed over t in float32."""
    b, t, p = x.shape
    out = torch.empty(b, p, dtype=torch.float32, device=x.device)
    _column_sums[(b, triton.cdiv(p, 128))](x, out, t, p, 32, 128, num_warps=4)
    return out
