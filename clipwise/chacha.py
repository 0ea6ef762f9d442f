"""ChaCha as a pure function: (key, counter) → words → Gaussian numbers, on any device. Nothing here draws.

`Keystream` has OpenSSL make the words, on the CPU; `gaussians` is what chacha_cpu.py and chacha_cuda.py make fast, and
what they are tested against.

Element e of a tensor belongs to chunk e // 2048; chunk c uses the blocks 256·c … 256·c + 255 of the tensor's own
key, so that any part of a tensor can be made alone and agrees with the whole. A block of 16 words gives eight
numbers by Box–Muller: of four words, three are the radius (96 bits, tails to 11.5σ) and one is the angle. 32 bits
alone would leave rays, which rounding to float32 does not hide whole, so the last word of the radius refines the angle,
too: it moves u by less than 2⁻⁶⁴, which is nothing to the radius until u is below 2⁻⁴⁰, once in 10¹² pairs.

The key is used for one tensor of one release and never again. The block function is that of RFC 8439, all twenty
rounds of it.
"""

from __future__ import annotations

import math
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROUNDS = 20
LANES = 256  # blocks per chunk
CHUNK = 8 * LANES  # elements per chunk
REACH = math.sqrt(2 * 97 * math.log(2))  # the largest radius, in standard deviations: that of 2⁻⁹⁷
_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
_MASK = 0xFFFFFFFF
ROOM = 15  # bytes behind the last one that OpenSSL's caller asks for
_ZEROS = np.zeros(2**20, dtype=np.uint8)
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_TURN = 64 * 2**32  # bytes after which the lower word of the counter begins anew: a new call of OpenSSL
_QUARTERS = (
    *((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)),  # columns
    *((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)),  # diagonals
)


class Keystream:
    """The words of a key in order, from a block on, made by OpenSSL.

    >>> hex(Keystream(bytes(32)).words(1)[0])
    '0x903df1a0ade0b876'
    """

    def __init__(self, key: bytes, block: int = 0) -> None:
        """Begin at a block of 16 words of 32 bits."""
        self._key, self._done, self._lock = key, 64 * block, Lock()
        self._begin()

    def _begin(self) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        counter = (self._done // 64).to_bytes(8, "little")
        self._encryptor = Cipher(algorithms.ChaCha20(self._key, counter + bytes(8)), mode=None).encryptor()

    def bytes(self, count: int, into: Bytes | None = None) -> Bytes:
        """The next ones: zeros, encrypted; in memory of the caller's, if that has ROOM more than `count`."""
        found = np.empty(count + ROOM, dtype=np.uint8) if into is None else into
        done = 0
        with self._lock:
            while done < count:
                now = min(count - done, len(_ZEROS), _TURN - self._done % _TURN)
                self._encryptor.update_into(_ZEROS[:now].data, found[done:].data)
                self._done += now
                done += now
                if self._done % _TURN == 0:
                    self._begin()
        return found[:count]

    def words(self, count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """The next words of 64 bits."""
        return self.bytes(8 * count).view("<u8")

    def word(self) -> int:
        """The next one."""
        return int(self.words(1)[0])

    def random(self, count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Uniform in [0, 1), with 53 bits."""
        return np.asarray((self.words(count) >> np.uint64(11)) * 2.0**-53)


def key_words(key: bytes) -> tuple[int, ...]:
    """Eight little-endian words of a 32-byte key."""
    if len(key) != 32:
        raise ValueError(f"A ChaCha key has 32 bytes, got {len(key)}.")
    return tuple(int.from_bytes(key[i : i + 4], "little") for i in range(0, 32, 4))


def block_words(key: bytes, tail: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int = ROUNDS) -> list[Tensor]:
    """The 16 words of each block, as int64; `tail` holds the words 12 … 15 of the state (counter and nonce).

    >>> nonce = [torch.tensor([w]) for w in (1, 0x09000000, 0x4A000000, 0)]
    >>> words = block_words(bytes(range(32)), tuple(nonce))  # RFC 8439, 2.3.2
    >>> hex(int(words[0])), hex(int(words[15]))
    ('0xe4e7f110', '0x4e3c50a2')
    """
    zeros = torch.zeros_like(tail[0])
    start = [zeros + word for word in (*_CONSTANTS, *key_words(key))] + list(tail)
    x = list(start)
    for _ in range(rounds // 2):
        for a, b, c, d in _QUARTERS:
            for left, right, into, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                x[left] = (x[left] + x[right]) & _MASK
                mixed = x[into] ^ x[left]
                x[into] = ((mixed << turn) | (mixed >> (32 - turn))) & _MASK
    return [(word + first) & _MASK for word, first in zip(x, start, strict=True)]


def pair(radius: tuple[Tensor, Tensor, Tensor], angle: Tensor) -> tuple[Tensor, Tensor]:
    """Two independent Gaussian numbers, float64, from 96 + 32 bits (Box–Muller)."""
    high, middle, low = (word.double() for word in radius)
    fine = angle.double() + low * 2.0**-32
    u = high * 2.0**-32 + middle * 2.0**-64 + low * 2.0**-96 + 2.0**-97
    near_one = (_MASK - high) * 2.0**-32 + (_MASK - middle) * 2.0**-64  # 1 − u, without cancellation
    log = torch.where(u < 0.5, u.log(), torch.log1p(-near_one.clamp(max=0.5)))
    r, turn = (-2 * log).sqrt(), fine * (2 * math.pi * 2.0**-32)
    return r * turn.cos(), r * turn.sin()


def gaussians(key: bytes, offset: int, length: int, device: torch.device | str = "cpu") -> Tensor:
    """Elements offset … offset + length of the key's Gaussian stream, float64: the reference for the GPU kernel.

    >>> whole = gaussians(bytes(32), 0, 5000)
    >>> bool((gaussians(bytes(32), 3000, 100) == whole[3000:3100]).all())
    True
    """
    first, last = offset // CHUNK, -(-(offset + length) // CHUNK)
    counter = torch.arange(first * LANES, last * LANES, device=device)
    zeros = torch.zeros_like(counter)
    words = block_words(key, (counter & _MASK, counter >> 32, zeros, zeros))
    numbers: list[Tensor] = []
    for i in range(0, 16, 4):
        numbers += pair((words[i], words[i + 1], words[i + 2]), words[i + 3])
    chunks = torch.stack(numbers).reshape(8, -1, LANES).transpose(0, 1).reshape(-1)  # element = 2048·c + 256·j + i
    return chunks[offset - first * CHUNK :][:length]
