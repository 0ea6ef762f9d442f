"""The generator of chacha.py as one Triton kernel: noise is made where the sum lies, one launch for all tensors."""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from .chacha import CHUNK, LANES, ROUNDS, key_words


@triton.jit
def _turn(a, b, d, bits: tl.constexpr):
    a = a + b
    d = d ^ a
    return a, (d << bits) | (d >> (32 - bits))


@triton.jit
def _quarter(a, b, c, d):
    a, d = _turn(a, b, d, 16)
    c, b = _turn(c, d, b, 12)
    a, d = _turn(a, b, d, 8)
    c, b = _turn(c, d, b, 7)
    return a, b, c, d


@triton.jit
def _word(pointer, LANES: tl.constexpr):
    return tl.zeros([LANES], tl.uint32) + tl.load(pointer).to(tl.uint32, bitcast=True)


@triton.jit
def _add_pair(high, middle, low, angle, target, position, length, scale, LANES: tl.constexpr):
    """Two numbers, as in chacha.pair, added at `position` and `position` + LANES."""
    u = high.to(tl.float32) * 2.0**-32 + middle.to(tl.float32) * 2.0**-64 + low.to(tl.float32) * 2.0**-96 + 2.0**-97
    near_one = (~high).to(tl.float32) * 2.0**-32 + (~middle).to(tl.float32) * 2.0**-64
    log = tl.where((high >> 31) == 0, libdevice.log(u), libdevice.log1p(-tl.minimum(near_one, 0.5)))
    r = tl.sqrt_rn(-2.0 * log) * scale
    turn = angle.to(tl.int32, bitcast=True)  # 2³¹ are half a turn
    quarter = (turn + 2**29) >> 30  # the nearest one; a float near 0 then keeps the angle's last bits
    part = (turn - (quarter << 30)).to(tl.float32) * 2.0**-31 + low.to(tl.float32) * 2.0**-63
    near, across = libdevice.cospi(part), libdevice.sinpi(part)
    odd = (quarter & 1) != 0
    cosine = tl.where(odd, across, near) * tl.where(((quarter + 1) & 2) != 0, -r, r)
    sine = tl.where(odd, near, across) * tl.where((quarter & 2) != 0, -r, r)
    first = (position >= 0) & (position < length)
    second = (position + LANES >= 0) & (position + LANES < length)
    here = target + position
    tl.store(here, tl.load(here, first) + cosine, first)
    tl.store(here + LANES, tl.load(here + LANES, second) + sine, second)


@triton.jit
def _add_noise(places, keys, work, scale, ROUNDS: tl.constexpr, LANES: tl.constexpr):
    program = tl.program_id(0)
    tensor, chunk = tl.load(work + 2 * program).to(tl.int64), tl.load(work + 2 * program + 1).to(tl.int64)
    target = tl.load(places + 3 * tensor).to(tl.pointer_type(tl.float32))
    length, offset = tl.load(places + 3 * tensor + 1), tl.load(places + 3 * tensor + 2)
    lane = tl.arange(0, LANES)
    block = chunk * LANES + lane
    zero = tl.zeros([LANES], tl.uint32)
    c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    key = keys + tensor * 8
    k0, k1, k2, k3 = _word(key, LANES), _word(key + 1, LANES), _word(key + 2, LANES), _word(key + 3, LANES)
    k4, k5, k6, k7 = _word(key + 4, LANES), _word(key + 5, LANES), _word(key + 6, LANES), _word(key + 7, LANES)
    n0, n1 = (block & 0xFFFFFFFF).to(tl.uint32), (block >> 32).to(tl.uint32)
    a0, a1, a2, a3, b0, b1, b2, b3, d0, d1, d2, d3 = c0, c1, c2, c3, k0, k1, k2, k3, k4, k5, k6, k7
    e0, e1, e2, e3 = n0, n1, zero, zero
    for _ in tl.static_range(ROUNDS // 2):
        a0, b0, d0, e0 = _quarter(a0, b0, d0, e0)
        a1, b1, d1, e1 = _quarter(a1, b1, d1, e1)
        a2, b2, d2, e2 = _quarter(a2, b2, d2, e2)
        a3, b3, d3, e3 = _quarter(a3, b3, d3, e3)
        a0, b1, d2, e3 = _quarter(a0, b1, d2, e3)
        a1, b2, d3, e0 = _quarter(a1, b2, d3, e0)
        a2, b3, d0, e1 = _quarter(a2, b3, d0, e1)
        a3, b0, d1, e2 = _quarter(a3, b0, d1, e2)
    position = chunk * 8 * LANES + lane - offset
    _add_pair(a0 + c0, a1 + c1, a2 + c2, a3 + c3, target, position, length, scale, LANES)
    _add_pair(b0 + k0, b1 + k1, b2 + k2, b3 + k3, target, position + 2 * LANES, length, scale, LANES)
    _add_pair(d0 + k4, d1 + k5, d2 + k6, d3 + k7, target, position + 4 * LANES, length, scale, LANES)
    _add_pair(e0 + n0, e1 + n1, e2, e3, target, position + 6 * LANES, length, scale, LANES)


# Which program does what: from public shapes alone.
_WORK: dict[tuple[torch.device, tuple[int, ...], tuple[int, ...]], Tensor] = {}


def _work(device: torch.device, lengths: tuple[int, ...], offsets: tuple[int, ...]) -> Tensor:
    """(tensor, chunk) of every program."""
    found = _WORK.get((device, lengths, offsets))
    if found is None:
        starts, ends = np.array(offsets) // CHUNK, -(-(np.array(offsets) + np.array(lengths)) // CHUNK)
        chunks = np.where(np.array(lengths) > 0, ends - starts, 0)
        tensors = np.repeat(np.arange(len(lengths)), chunks)
        numbers = np.arange(chunks.sum()) - np.repeat(np.cumsum(chunks) - chunks, chunks) + np.repeat(starts, chunks)
        pairs = np.stack([tensors, numbers], axis=1).astype(np.int32)
        _WORK.clear()  # one model at a time
        found = _WORK[device, lengths, offsets] = torch.from_numpy(pairs).to(device)
    return found


def add_gaussians_(
    values: Sequence[Tensor],
    keys: Sequence[bytes],
    scale: float,
    offsets: Sequence[int] | None = None,
    rounds: int = ROUNDS,
) -> None:
    """values[i] += scale · (the Gaussian stream of keys[i] from offsets[i]); contiguous float32 on one CUDA device."""
    device = values[0].device
    assert all(v.is_contiguous() and v.dtype == torch.float32 and v.device == device for v in values)
    lengths, offsets = tuple(v.numel() for v in values), tuple(offsets or [0] * len(values))
    work = _work(device, lengths, offsets)
    if not len(work):
        return
    pointers = [v.data_ptr() for v in values]
    places = torch.tensor(list(zip(pointers, lengths, offsets, strict=True)), dtype=torch.int64)
    words = torch.from_numpy(np.array([key_words(key) for key in keys], dtype=np.uint32).view(np.int32))
    upward = float(np.nextafter(np.float32(scale), np.float32(np.inf)))  # never less noise than was asked for
    with torch.cuda.device(device):
        _add_noise[(len(work),)](
            places.to(device), words.to(device), work, upward, ROUNDS=rounds, LANES=LANES, num_warps=4
        )
