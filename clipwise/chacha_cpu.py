"""Gaussian numbers of chacha.py on a CPU: OpenSSL's ChaCha20, and Box–Muller in numpy.

A row is what 256 lanes make of one pair: the 256 numbers with the cosine, then the 256 with the sine. A chunk has four
rows. Rows of several tensors are made at once, as small ones have few; noise.py shares the work among threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .chacha import CHUNK, LANES, Keystream

Floats = np.ndarray[Any, Any]
ROW = 2 * LANES
_ROWS = CHUNK // ROW  # of a chunk
LONGEST = 128 * ROW  # elements of one part
MOST = 128 + _ROWS  # rows made at once: of a part that begins within a chunk, too


@dataclass(frozen=True)
class Part:
    """Elements of a tensor that get their noise in one piece: `target` is at most LONGEST of them, flat."""

    key: bytes
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
    words = np.empty((4, MOST, LANES))
    waiting: list[Part] = []
    rows = 0
    for part in parts:
        if not len(part.target):
            continue
        if rows + part.rows > MOST:
            _add_waiting(waiting, words[:, :rows], scale)
            waiting, rows = [], 0
        _words(part, words[:, rows : rows + part.rows])
        waiting.append(part)
        rows += part.rows
    if waiting:
        _add_waiting(waiting, words[:, :rows], scale)


def _add_waiting(parts: Sequence[Part], words: Floats, scale: float) -> None:
    numbers = _gaussians(words, scale).reshape(-1)
    begin = 0
    for part in parts:
        own = numbers[begin + part.skipped :][: len(part.target)]
        np.add(own, part.target, out=part.target, casting="same_kind")
        begin += part.rows * ROW


def _words(part: Part, out: Floats) -> None:
    """The four words of every pair of its rows, as floats [4, rows, LANES]."""
    chunks = -(-part.rows // _ROWS)
    stream = Keystream(part.key, part.first * LANES).bytes(chunks * CHUNK * 8)
    blocks = stream.view("<u4").reshape(chunks, LANES, _ROWS, 4).transpose(3, 0, 2, 1)  # word, chunk, row, lane
    rows = part.rows // chunks
    np.copyto(out.reshape(4, chunks, rows, LANES), blocks[:, :, :rows])


def _gaussians(words: Floats, scale: float) -> Floats:
    """Box–Muller [rows, 2, LANES]: of words as in chacha.pair, which are overwritten.

    With t the tangent of half the angle, cosine and sine are (1 − t²)/(1 + t²) and 2t/(1 + t²): one function in place
    of two, and where t is as large as a float can make it, still −1 and 0.
    """
    u, middle, low, t = words
    low *= 2.0**-32
    t += low
    middle += low
    middle *= 2.0**-32
    u += middle
    u *= 2.0**-32
    u += 2.0**-97
    radius = np.minimum(np.log(u, out=u), 0.0, out=u)
    radius *= -2.0
    np.sqrt(radius, out=radius)
    radius *= scale
    t *= math.pi * 2.0**-32
    np.tan(t, out=t)
    square = np.multiply(t, t, out=low)
    radius /= np.add(square, 1.0, out=middle)
    found = np.empty((len(t), 2, LANES))
    np.multiply(radius, np.subtract(1.0, square, out=square), out=found[:, 0])
    t *= 2.0
    np.multiply(radius, t, out=found[:, 1])
    return found
