"""The only place that draws noise.

Keys come from the operating system, 256 bits, fresh in every process; they are never stored, shown,
pickled or shared with a copy or a fork. Each draw has an address (sequence number of the charge,
stream, tensor, block of elements), and each address a 128-bit key of its own, derived with BLAKE2b, so
no noise is used twice and no order of drawing matters. The CPU generator is AES in counter mode
(randomgen) under numpy's ziggurat: float64 draws with tails beyond 13σ.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ._check import one_of, positive

Mode = Literal["secure", "fast"]
BLOCK = 2**16  # elements per key


class NoiseSource:
    """Gaussian noise for released values. Secret state: one key, bound to this process.

    Guarantee (mode="secure"): `add_` returns value + N(0, (noise_multiplier·sensitivity)²) with noise that is
    independent for every (sequence, stream, name) and unpredictable without the key.

    Modes: "secure" certifies; "fast" draws with torch's own generator, whose float32 tails end at 5.8σ and
    whose seed has 32 bits: runs that use it are NOT CERTIFIED. A `seed` makes runs repeatable and NOT PRIVATE.

    >>> source = NoiseSource()
    >>> noised = source.add_({"w": torch.zeros(3)}, sensitivity=1.0, noise_multiplier=2.0, sequence=1, stream="grad")
    >>> noised["w"].shape, source.certified
    (torch.Size([3]), True)
    """

    def __init__(self, mode: Mode = "secure", seed: int | None = None) -> None:
        """Draw a fresh key."""
        one_of(("secure", "fast"), noise=mode)
        self.mode = mode
        self._seed = seed
        self._renew()

    @property
    def certified(self) -> bool:
        """Whether a privacy guarantee may be stated for this noise."""
        return self.mode == "secure" and self._seed is None

    def _renew(self) -> None:
        self._process = os.getpid()
        if self._seed is None:
            self._key = secrets.token_bytes(32)
        else:
            self._key = hashlib.blake2b(f"not private {self._seed}".encode(), digest_size=32).digest()

    def _generator(self, address: str) -> np.random.Generator:
        if os.getpid() != self._process and self._seed is None:
            self._renew()  # a fork must not repeat its parent's noise
        from randomgen import AESCounter

        digest = hashlib.blake2b(address.encode(), key=self._key, digest_size=16).digest()
        return np.random.Generator(AESCounter(key=int.from_bytes(digest, "little")))

    def add_(
        self,
        values: Mapping[str, Tensor],
        *,
        sensitivity: float,
        noise_multiplier: float,
        sequence: int,
        stream: str,
    ) -> dict[str, Tensor]:
        """Noise for one vector, given in parts: each value + N(0, (noise_multiplier·sensitivity)²).

        `sensitivity` bounds all parts together. Added in float64, returned in float32 or wider; the memory of the
        values is used again where it can be, so that no un-noised copy stays behind.
        """
        scale = positive(noise_multiplier=noise_multiplier) * positive(sensitivity=sensitivity)
        if self.mode == "fast":
            return {name: _fast(value, scale) for name, value in values.items()}
        outputs, blocks = {}, []
        for name, value in values.items():
            dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
            outputs[name] = value.detach().to("cpu", dtype).contiguous()
            flat = outputs[name].view(-1).numpy()
            blocks += [(f"{sequence}/{stream}/{name}/{i}", flat[i : i + BLOCK]) for i in range(0, len(flat), BLOCK)]

        def fill(share: list[tuple[str, np.ndarray[Any, Any]]]) -> None:
            buffer = np.empty(max((len(target) for _, target in share), default=0))
            for address, target in share:
                noise = self._generator(address).standard_normal(out=buffer[: len(target)])
                noise *= scale
                np.add(noise, target, out=target, casting="same_kind")  # in float64, rounded once

        workers = torch.get_num_threads() if sum(len(target) for _, target in blocks) > 4 * BLOCK else 1
        if workers == 1:
            fill(blocks)
        else:  # numpy releases the interpreter lock, and every block has a key of its own: order does not matter
            blocks.sort(key=lambda block: -len(block[1]))
            with ThreadPoolExecutor(workers) as pool:
                list(pool.map(fill, [blocks[i::workers] for i in range(workers)]))
        return {name: noised.to(values[name].device) for name, noised in outputs.items()}

    def __deepcopy__(self, memo: dict[int, Any]) -> NoiseSource:
        """A copy draws its own key: the same noise must never meet two values."""
        return NoiseSource(self.mode, self._seed)

    def __copy__(self) -> NoiseSource:
        """As __deepcopy__."""
        return NoiseSource(self.mode, self._seed)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings, never the key."""
        return NoiseSource, (self.mode, self._seed)

    def __repr__(self) -> str:
        """Without the key."""
        return f"NoiseSource(mode={self.mode!r}, certified={self.certified})"


def _fast(value: Tensor, scale: float) -> Tensor:
    dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
    return value.to(dtype) + scale * torch.randn(value.shape, dtype=dtype, device=value.device)
