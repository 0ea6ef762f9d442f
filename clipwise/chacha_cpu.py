"""Gaussian numbers of chacha.py on a CPU: by native code (native/noise.c), or by OpenSSL's ChaCha20 and numpy.

In numpy, a row is what 256 lanes make of one pair: the 256 numbers with the cosine, then the 256 with the sine. A chunk
has four rows. Rows of several tensors are made at once, as small ones have few; noise.py shares the work among threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from . import native
from .chacha import CHUNK, LANES, ROOM, Keystream

Floats = np.ndarray[Any, Any]
ROW = 2 * LANES
_ROWS = CHUNK // ROW  # of a chunk
LONGEST = 256 * ROW  # elements of one part: with fewer, threads wait for the interpreter's lock
MOST = 256 + _ROWS  # rows made at once: of a part that begins within a chunk, too


@dataclass(frozen=True)
class Part:
    """Elements of a tensor that get their noise in one piece: `target` is flat, for numpy at most LONGEST of them."""

    key: bytes = field(repr=False)
    start: int  # where the target begins in the stream of the key
    target: Floats

    @property
    def first(self) -> int:
        """The chunk it begins in."""
        return self.start // CHUNK

    @property
    def skipped(self) -> int:
        """Numbers of that chunk which lie before it."""
        return self.start - self.first * CHUNK

    @property
    def rows(self) -> int:
        """From the first chunk's beginning to the target's end; whole chunks where there are several."""
        rows = -(-(self.skipped + len(self.target)) // ROW)
        return rows if rows <= _ROWS else -(-rows // _ROWS) * _ROWS


def add_gaussians(parts: Sequence[Part], scale: float) -> None:
    """Each target += scale · its numbers, added in float64 and rounded once."""
    if not 1e-140 < scale < 1e140:
        raise ValueError(f"Noise of scale {scale:g} is beyond what float64 can square.")
    (_natively if is_native() else _by_numpy)(parts, scale)


@lru_cache(maxsize=1)
def is_native() -> bool:
    """Whether native code makes the numbers, on threads of its own: it gave those of numpy when it was first asked."""
    return native.usable("noise", _agree)


def _agree() -> bool:
    kinds = (np.float64, np.float32)
    made, known = ([np.zeros(3 * CHUNK, dtype=kind) for kind in kinds] for _ in range(2))
    for targets, add in ((made, _natively), (known, _by_numpy)):
        add([Part(bytes(range(i, 32 + i)), CHUNK * i - i, x) for i, x in enumerate(targets, 1)], 2.0)
    return all(np.allclose(a, b, rtol=0, atol=d) for a, b, d in zip(made, known, (1e-12, 1e-5), strict=True))


def _natively(parts: Sequence[Part], scale: float) -> None:
    native.add_noise([p.key for p in parts], [p.start for p in parts], [p.target for p in parts], scale)


def _by_numpy(parts: Sequence[Part], scale: float) -> None:
    space = _Space()
    waiting: list[Part] = []
    rows = 0
    for part in parts:
        if not len(part.target):
            continue
        if rows + part.rows > MOST:
            _add_waiting(waiting, space.numbers(rows, scale))
            waiting, rows = [], 0
        space.fill(part, rows)
        waiting.append(part)
        rows += part.rows
    if waiting:
        _add_waiting(waiting, space.numbers(rows, scale))


class _Space:
    """Memory for MOST rows, used again and again: new pages cost as much as the numbers."""

    def __init__(self) -> None:
        self._stream = np.empty(MOST * ROW * 8 + ROOM, dtype=np.uint8)
        self._words = np.empty((4, MOST, LANES))
        self._numbers = np.empty((MOST, 2, LANES))

    def fill(self, part: Part, begin: int) -> None:
        """The words of every pair of its rows, as floats, from row `begin` on."""
        chunks = -(-part.rows // _ROWS)
        stream = Keystream(part.key, part.first * LANES).bytes(chunks * CHUNK * 8, self._stream)
        blocks = stream.view("<u4").reshape(chunks, LANES, _ROWS, 4).transpose(3, 0, 2, 1)  # word, chunk, row, lane
        rows = part.rows // chunks
        out = self._words[:, begin : begin + part.rows]
        np.copyto(out.reshape(4, chunks, rows, LANES), blocks[:, :, :rows])

    def numbers(self, rows: int, scale: float) -> Floats:
        """Of the first rows, flat."""
        return _gaussians(self._words[:, :rows], scale, self._numbers[:rows]).reshape(-1)


def _add_waiting(parts: Sequence[Part], numbers: Floats) -> None:
    begin = 0
    for part in parts:
        own = numbers[begin + part.skipped :][: len(part.target)]
        np.add(own, part.target, out=part.target, casting="same_kind")
        begin += part.rows * ROW


def _gaussians(words: Floats, scale: float, found: Floats) -> Floats:
    """Box–Muller [rows, 2, LANES], into `found`: of words as in chacha.pair, which are overwritten.

    With t the tangent of half the angle and q = 2/(1 + t²), cosine and sine are q − 1 and q·t: one function in place of
    two, and where t is as large as a float can make it, still −1 and 0.
    """
    u, middle, low, t = words
    low *= 2.0**-32
    t += low
    middle += low
    middle *= 2.0**-32
    u += middle
    u *= 2.0**-32
    u += 2.0**-97
    radius = np.log(u, out=u)  # u is at most 1
    radius *= -2.0 * scale * scale
    np.sqrt(radius, out=radius)
    t *= math.pi * 2.0**-32
    np.tan(t, out=t)
    square = np.multiply(t, t, out=low)
    square += 1.0
    twice = np.divide(radius, square, out=middle)
    twice *= 2.0
    np.subtract(twice, radius, out=found[:, 0])
    np.multiply(twice, t, out=found[:, 1])
    return found
