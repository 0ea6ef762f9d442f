"""Gaussian numbers of chacha.py on a CPU: OpenSSL's ChaCha20, and Box–Muller in torch's vectorised ops.

A row is what 256 lanes make of one pair: the 256 numbers with the cosine, then the 256 with the sine. A chunk has four
rows. Rows of several tensors are made at once, as small ones have few; never so many that torch would share an op among
threads, which noise.py does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .chacha import CHUNK, LANES, Keystream

Floats = np.ndarray[Any, Any]
ROW = 2 * LANES
_ROWS = CHUNK // ROW  # of a chunk
LONGEST = 64 * ROW  # elements of one part
MOST = 64 + _ROWS  # rows made at once: of a part that begins within a chunk, too


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
    for part in parts:
        if not len(part.target):
            continue
        if sum(p.rows for p in waiting) + part.rows > MOST:
            _add_at_once(waiting, words, scale)
            waiting = []
        waiting.append(part)
    if waiting:
        _add_at_once(waiting, words, scale)


def _add_at_once(parts: Sequence[Part], words: Floats, scale: float) -> None:
    rows = 0
    for part in parts:
        _words(part, words[:, rows : rows + part.rows])
        rows += part.rows
    numbers = _gaussians(torch.from_numpy(words[:, :rows]), scale).view(-1).numpy()
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


def _gaussians(words: torch.Tensor, scale: float) -> torch.Tensor:
    """Box–Muller [rows, 2, LANES]: three words are the radius, one is the angle."""
    high, middle, low, angle = words
    u = torch.add(high, middle, alpha=2.0**-32).add_(low, alpha=2.0**-64).mul_(2.0**-32).add_(2.0**-97)
    radius = u.log_().clamp_(max=0).mul_(-2).sqrt_().mul_(scale)  # u may be rounded to 1
    turn = angle.mul(2 * math.pi * 2.0**-32)
    found = torch.empty(len(radius), 2, LANES, dtype=torch.float64)
    torch.mul(radius, turn.cos(), out=found[:, 0])
    torch.mul(radius, turn.sin_(), out=found[:, 1])
    return found
