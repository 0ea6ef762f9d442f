"""The only place that draws noise.

Keys come from the operating system, 256 bits, fresh in every process; they are never stored, shown,
pickled or shared with a copy or a fork. Each draw has an address (sequence number of the charge,
stream, tensor), and each address a key of its own, so no noise is used twice and no order of drawing
matters. The CPU generator is ChaCha20 (randomgen) under numpy's ziggurat: float64 draws with tails
beyond 13σ.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ._check import one_of, positive

Mode = Literal["secure", "fast"]


class NoiseSource:
    """Gaussian noise for released values. Secret state: one key, bound to this process.

    Guarantee (mode="secure"): `add` returns value + N(0, (noise_multiplier·sensitivity)²) with noise that is
    independent for every (sequence, stream, index) and unpredictable without the key.

    Modes: "secure" certifies; "fast" draws with torch's own generator, whose float32 tails end at 5.8σ and
    whose seed has 32 bits: runs that use it are NOT CERTIFIED. A `seed` makes runs repeatable and NOT PRIVATE.

    >>> source = NoiseSource()
    >>> noised = source.add(torch.zeros(3), sensitivity=1.0, noise_multiplier=2.0, sequence=1, stream="grad", index=0)
    >>> noised.shape, source.certified
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
        from randomgen import ChaCha

        digest = hashlib.blake2b(address.encode(), key=self._key, digest_size=32).digest()
        return np.random.Generator(ChaCha(key=int.from_bytes(digest, "little")))

    def add(
        self,
        value: Tensor,
        *,
        sensitivity: float,
        noise_multiplier: float,
        sequence: int,
        stream: str,
        index: int,
    ) -> Tensor:
        """`value` + N(0, (noise_multiplier·sensitivity)²), added in float64, returned in float32 or wider."""
        scale = positive(noise_multiplier=noise_multiplier) * positive(sensitivity=sensitivity)
        dtype = torch.float64 if value.dtype == torch.float64 else torch.float32
        if self.mode == "fast":
            noise = torch.randn(value.shape, dtype=dtype, device=value.device)
            return value.to(dtype) + scale * noise
        draws = self._generator(f"{sequence}/{stream}/{index}").standard_normal(value.numel())
        noise = torch.from_numpy(draws).reshape(value.shape).to(value.device)
        return noise.mul_(scale).add_(value).to(dtype)

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
