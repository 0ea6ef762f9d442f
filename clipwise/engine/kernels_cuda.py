"""Triton kernels: Gram sums that never write a T×T matrix, the bound made of them, and sums over positions.

Imported on a GPU only, by cuda_ops.py.
"""

# mypy: ignore-errors

from __future__ import annotations

from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_CHUNK = tl.constexpr(1024)  # inner products longer than this are cut, and their parts added up


@triton.jit
def _tile(
    x,
    example,
    row,
    column,
    width,
    SAME: tl.constexpr,
    TILE: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Inner products of TILE positions with TILE others, or with themselves, which then are read once.

    Rows and columns beyond the tensor are read as zero.
    """
    total = tl.zeros([TILE, TILE], tl.float32)
    part = tl.zeros([TILE, TILE], tl.float32)
    for k in range(0, width, DEPTH):
        a = x.load([example, row, k]).reshape(TILE, DEPTH)
        if SAME:
            part = tl.dot(a, a.T, part, input_precision=PRECISION)
        else:
            b = x.load([example, column, k]).reshape(TILE, DEPTH)
            part = tl.dot(a, b.T, part, input_precision=PRECISION)
        if (k + DEPTH) % _CHUNK == 0:
            total += part
            part = tl.zeros([TILE, TILE], tl.float32)
    return total + part


@triton.jit
def pair_of_tiles(pair, tiles):
    """The i and j ≥ i of a pair's number."""
    i, j = 0, pair
    while j >= tiles - i:
        j -= tiles - i
        i += 1
    return i, i + j


@triton.jit
def store_pair(a, b, i, j, sums, squares, positions, TILE: tl.constexpr):
    """Of tiles (i, j) of A and B of this program's example: Σ a·b, Σ a², Σ b²; and, for i = j, the diagonals."""
    example, pair = tl.program_id(0), tl.program_id(1)
    examples, pairs = tl.num_programs(0), tl.num_programs(1)
    if i == j:
        t = tl.arange(0, TILE)
        same, inside = t[:, None] == t[None, :], i * TILE + t < positions
        row = squares + example.to(tl.int64) * positions + i * TILE + t
        tl.store(row, tl.sum(tl.where(same, a, 0.0), axis=1), inside)
        tl.store(row + examples.to(tl.int64) * positions, tl.sum(tl.where(same, b, 0.0), axis=1), inside)
    times = tl.where(i == j, 1.0, 2.0).to(tl.float64)
    place = sums + example * pairs + pair
    wide_a, wide_b = a.to(tl.float64), b.to(tl.float64)
    tl.store(place, times * tl.sum(wide_a * wide_b))
    tl.store(place + examples * pairs, times * tl.sum(wide_a * wide_a))
    tl.store(place + 2 * examples * pairs, times * tl.sum(wide_b * wide_b))


@triton.jit
def _gram(
    left, right, sums, squares, positions, p, d, tiles, TILE: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr
):
    """One pair of tiles (i ≤ j) of one example."""
    example = tl.program_id(0)
    i, j = pair_of_tiles(tl.program_id(1), tiles)
    if i == j:
        a = _tile(left, example, i * TILE, i * TILE, p, True, TILE, DEPTH, PRECISION)
        b = _tile(right, example, i * TILE, i * TILE, d, True, TILE, DEPTH, PRECISION)
    else:
        a = _tile(left, example, i * TILE, j * TILE, p, False, TILE, DEPTH, PRECISION)
        b = _tile(right, example, i * TILE, j * TILE, d, False, TILE, DEPTH, PRECISION)
    store_pair(a, b, i, j, sums, squares, positions, TILE)


def _blocks(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    b, g, t, width = x.shape
    assert width <= 1 or x.stride(3) == 1, "columns must be neighbours in memory"
    across = x.stride(int(g > 1)) if b * g > 1 else t * x.stride(2)  # that of an axis of one entry may be anything
    return TensorDescriptor(x, [b * g, t, width], [across, x.stride(2), 1], [1, rows, columns])


_TILE = 128


def _places(left: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """For Σ_ts A_ts·B_ts, Σ A_ts², Σ B_ts² per example, group and pair of tiles; for the diagonals of A and B."""
    b, g, t, _ = left.shape
    tiles = triton.cdiv(t, _TILE)
    sums = torch.empty(count, 3, b * g, tiles * (tiles + 1) // 2, dtype=torch.float64, device=left.device)
    return sums, torch.empty(count, 2, b, g, t, dtype=torch.float32, device=left.device)


def _fill(left: Tensor, right: Tensor, tf32: bool, sums: Tensor, squares: Tensor) -> None:
    t, depth = left.shape[2], 64 if left.dtype == torch.float32 else 128
    _gram[sums.shape[1:]](
        _blocks(left, _TILE, depth),
        _blocks(right, _TILE, depth),
        sums,
        squares,
        t,
        left.shape[3],
        right.shape[3],
        triton.cdiv(t, _TILE),
        _TILE,
        depth,
        "tf32" if tf32 else "ieee",
        num_warps=8,
        num_stages=3,
    )


def gram(left: Tensor, right: Tensor, tf32: bool) -> tuple[Tensor, Tensor]:
    """Σ_ts A_ts·B_ts, Σ A_ts², Σ B_ts² per example and group [3, b·g]; the diagonals of A and B [2, b, g, t].

    A and B hold the inner products of the positions of left [b, g, t, p] and right [b, g, t, d].
    """
    (sums,), (squares,) = _places(left, 1)
    _fill(left, right, tf32, sums, squares)
    return sums.sum(2), squares


@triton.jit
def _bound(
    sums,
    squares,
    more,
    out,
    groups,
    positions,
    pairs,
    TINY_P: tl.constexpr,
    TINY_D: tl.constexpr,
    ERROR: tl.constexpr,
    UNIT: tl.constexpr,
    MOVED_LEFT: tl.constexpr,
    MOVED_RIGHT: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`Gram.bound` of one example (gram.py says what it is), `more` added; of several pairs. NaN stays NaN."""
    example, examples, pair = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    sums += pair * 3 * examples * groups * pairs
    squares += pair * 2 * examples * groups * positions
    more += pair * 3 * examples
    out += pair * examples
    zero = tl.zeros([], tl.float64)
    total, reach, used, sum_left, sum_right = zero, zero, zero, zero, zero
    left_moves, right_moves = zero, zero
    for g in range(groups):
        own_left, own_right = zero, zero  # ‖·‖_F²
        row = (example * groups + g).to(tl.int64)
        for k in range(0, positions, BLOCK):
            t = k + tl.arange(0, BLOCK)
            inside = t < positions
            a = tl.load(squares + row * positions + t, inside, other=0.0).to(tl.float64)
            b = tl.load(squares + (examples * groups + row) * positions + t, inside, other=0.0).to(tl.float64)
            used += tl.sum((inside & (a != 0) & (b != 0)).to(tl.float64))
            a = tl.sqrt(tl.where(a < 0, 0.0, a) * (1 + ERROR) + inside.to(tl.float64) * TINY_P)
            b = tl.sqrt(tl.where(b < 0, 0.0, b) * (1 + ERROR) + inside.to(tl.float64) * TINY_D)
            reach += tl.sum(a * b)
            sum_left += tl.sum(a)
            sum_right += tl.sum(b)
            own_left += tl.sum(a * a)
            own_right += tl.sum(b * b)
        n = tl.arange(0, PAIRS)
        place = sums + row * pairs + n
        total += tl.sum(tl.load(place, n < pairs, other=0.0))
        spread_left = tl.sum(tl.load(place + examples * groups * pairs, n < pairs, other=0.0))
        spread_right = tl.sum(tl.load(place + 2 * examples * groups * pairs, n < pairs, other=0.0))
        left_moves += tl.sqrt(own_left) * tl.sqrt(tl.sqrt(spread_right) + ERROR * own_right)
        right_moves += tl.sqrt(own_right) * tl.sqrt(tl.sqrt(spread_left) + ERROR * own_left)
    moved = MOVED_LEFT * left_moves + MOVED_RIGHT * right_moves  # one of the two is 0
    most = (MOVED_LEFT + MOVED_RIGHT) * reach
    rounded = tl.where(most < moved, most, moved)
    total += tl.load(more + example)
    reach += tl.load(more + examples + example)
    used += tl.load(more + 2 * examples + example)
    count = zero + groups * positions
    lost = sum_right * sum_right * TINY_P + sum_left * sum_left * TINY_D + (count * TINY_P) * (count * TINY_D)
    estimate = tl.sqrt(tl.where(total < 0, 0.0, total) + ERROR * reach * reach + lost)
    norm = estimate + (used + 4) * UNIT * reach + rounded
    tl.store(out + example, norm * norm)


def fill_bounds(sides: tuple[int, int], sums: Tensor, squares: Tensor, more: Tensor, errors: list[float], out: Tensor):
    """Bounds [n, b] of like pairs, from what `_places` holds."""
    count, _, b, g, t = squares.shape
    error, unit, moved_left, moved_right = errors
    tiny, pairs = torch.finfo(torch.float32).tiny, sums.shape[3]
    _bound[(b, count)](
        sums,
        squares,
        more,
        out,
        g,
        t,
        pairs,
        sides[0] * tiny,
        sides[1] * tiny,
        error,
        unit,
        moved_left,
        moved_right,
        triton.next_power_of_2(pairs),
        min(1024, triton.next_power_of_2(t)),
        num_warps=4,
    )


_BESIDE: dict[torch.device, list[torch.cuda.Stream]] = {}
_STREAMS = 3  # beside the one that all else runs on


def gram_bounds(
    lefts: list[Tensor], rights: list[Tensor], more: Tensor, tf32: list[bool], errors: list[float]
) -> Tensor:
    """The squared norms' bounds [n, b], float64, of n pairs of factors with four `errors` each; more is [n, 3, b].

    One pair alone leaves a part of the GPU idle, so they run on several streams. Bounds of neighbours with the same
    shapes are made at once.
    """
    device, number = lefts[0].device, range(len(lefts))
    out = torch.empty(len(lefts), len(lefts[0]), dtype=torch.float64, device=device)
    kinds = [
        [*same] for _, same in groupby(number, lambda i: (lefts[i].shape, rights[i].shape, errors[4 * i : 4 * i + 4]))
    ]
    held = [_places(lefts[same[0]], len(same)) for same in kinds]  # on this stream, which outlives the others' work
    places = [place for sums, squares in held for place in zip(sums, squares, strict=True)]
    main = torch.cuda.current_stream(device)
    if device not in _BESIDE:
        _BESIDE[device] = [torch.cuda.Stream(device) for _ in range(_STREAMS)]
    streams = [main, *_BESIDE[device][: len(lefts) - 1]]
    for stream in streams[1:]:
        stream.wait_stream(main)
    order = sorted(number, key=lambda i: -lefts[i][0].numel() - rights[i][0].numel())
    try:
        for turn, i in enumerate(order):
            with torch.cuda.stream(streams[turn % len(streams)]):
                _fill(lefts[i], rights[i], tf32[i], *places[i])
    finally:  # whatever happens: nobody may use this memory while they write
        for stream in streams[1:]:
            main.wait_stream(stream)
    for same, (sums, squares) in zip(kinds, held, strict=True):
        first, last = same[0], same[-1] + 1
        sides = (lefts[first].shape[3], rights[first].shape[3])
        fill_bounds(sides, sums, squares, more[first:last], errors[4 * first : 4 * first + 4], out[first:last])
    return out


@triton.jit
def _column_sums(x, out, positions, p, across, along, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    example = tl.program_id(0).to(tl.int64)
    n, t = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, positions, ROWS):
        inside = (k + t < positions)[:, None] & (n < p)[None, :]
        place = x + example * across + (k + t).to(tl.int64)[:, None] * along + n[None, :]
        total += tl.load(place, inside, other=0.0).to(tl.float32)
    tl.store(out + example * p + n, tl.sum(total, axis=0), n < p)


def column_sums(x: Tensor) -> Tensor:
    """[b, t, p] summed over t in float32."""
    b, t, p = x.shape
    out = torch.empty(b, p, dtype=torch.float32, device=x.device)
    _column_sums[(b, triton.cdiv(p, 128))](x, out, t, p, x.stride(0), x.stride(1), 32, 128, num_warps=4)
    return out


@triton.jit
def _norm_sums(
    grad, x, mean, scale, out, positions, p, across, along, across_x, along_x, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    example, examples = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    n, t = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    scaled, plain = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, positions, ROWS):
        row, here = (k + t).to(tl.int64), k + t < positions
        inside = here[:, None] & (n < p)[None, :]
        g = tl.load(grad + example * across + row[:, None] * along + n[None, :], inside, other=0.0).to(tl.float32)
        v = tl.load(x + example * across_x + row[:, None] * along_x + n[None, :], inside, other=0.0).to(tl.float32)
        m = tl.load(mean + example * positions + row, here, other=0.0)
        s = tl.load(scale + example * positions + row, here, other=0.0)
        scaled += g * ((v - m[:, None]) * s[:, None])
        plain += g
    tl.store(out + example * p + n, tl.sum(scaled, axis=0), n < p)
    tl.store(out + (examples + example) * p + n, tl.sum(plain, axis=0), n < p)


def norm_sums(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Σ_t grad·(x − mean)·scale and Σ_t grad, [2, b, p] in float32, of grad and x [b, t, p], mean and scale [b, t]."""
    b, t, p = grad.shape
    out = torch.empty(2, b, p, dtype=torch.float32, device=grad.device)
    strides = (grad.stride(0), grad.stride(1), x.stride(0), x.stride(1))
    _norm_sums[(b, triton.cdiv(p, 64))](grad, x, mean, scale, out, t, p, *strides, 32, 64, num_warps=4)
    return out
