"""The only place that draws noise.

Keys come from the operating system, 256 bits, fresh in every process; they are never stored, shown,
pickled or shared with a copy or a fork (ranks of one run share one: they add the same noise to the same
sum). Each draw has an address (sequence number of the charge, stream, tensor), and each address a key of
its own, derived with BLAKE2b, so no noise is used twice and no order of drawing matters. The generator is
ChaCha20 (chacha.py), with tails to 11.5σ: the same numbers in float64 on the CPU and in float32 on a GPU.
"hardened" draws exactly, on a grid (rounded.py), on the CPU, from a key for each block of elements.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from . import chacha, chacha_cpu
from ._check import one_of, positive
from .errors import WrongOrder
from .rounded import grid_for, rounded_gaussians

Mode = Literal["secure", "hardened", "fast"]
BLOCK = chacha_cpu.LONGEST  # elements that one thread works on at a time
Block = tuple[str, int, np.ndarray[Any, Any]]  # name of a tensor, where in it the block begins, its elements
Fill = Callable[[Sequence[Block]], None]


class NoiseSource:
    """Gaussian noise for released values. Secret state: one key, bound to this process.

    Guarantee: `add_` returns value + N(0, (noise_multiplier·sensitivity)²) with noise that is independent for every
    (sequence, stream, name) and unpredictable without the key.

    Modes: "secure" certifies up to `reach` (see accounting/arithmetic.py). "hardened" is exact, on a grid, and resists
    floating-point attacks. "fast" draws with torch's own generator, whose float32 tails end at 5.8σ and whose seed has
    32 bits: runs that use it are NOT CERTIFIED. A `seed` makes runs repeatable and NOT PRIVATE.

    >>> source = NoiseSource()
    >>> noised = source.add_({"w": torch.zeros(3)}, sensitivity=1.0, noise_multiplier=2.0, sequence=1, stream="grad")
    >>> noised["w"].shape, source.certified
    (torch.Size([3]), True)
    """

    def __init__(self, mode: Mode = "secure", seed: int | None = None, key: bytes | None = None) -> None:
        """Draw a fresh key, or take that of the first rank of a run on several processes (`shared_key`)."""
        one_of(("secure", "hardened", "fast"), noise=mode)
        self.mode = mode
        self._seed = seed
        self._shared = key is not None
        self._renew()
        if key is not None:
            self._key = key

    def shared_key(self) -> bytes:
        """The key, for the other ranks of this run alone: all of them must add the same noise."""
        self._shared = True
        return self._key

    @property
    def certified(self) -> bool:
        """Whether a privacy guarantee may be stated for this noise."""
        return self.mode != "fast" and self._seed is None

    @property
    def reach(self) -> float:
        """How far out, in standard deviations, a draw can lie, on the device where that is least."""
        if self.mode == "hardened":
            return math.inf
        return 5.77 if self.mode == "fast" else chacha.REACH

    def _renew(self) -> None:
        if self._seed is None:
            self._key = secrets.token_bytes(32)
        else:
            self._key = hashlib.blake2b(f"not private {self._seed}".encode(), digest_size=32).digest()
        self._process = os.getpid()  # last: another thread must not take the old key for this process's

    def _derived(self, address: str, length: int) -> bytes:
        if os.getpid() != self._process and self._seed is None:
            if self._shared:
                raise WrongOrder("A fork of a rank cannot draw noise: it would repeat that of its parent.")
            self._renew()  # a fork must not repeat its parent's noise
        return hashlib.blake2b(address.encode(), key=self._key, digest_size=length).digest()

    def add_(
        self,
        values: Mapping[str, Tensor],
        *,
        sensitivity: float,
        noise_multiplier: float,
        sequence: int,
        stream: str,
        offsets: Mapping[str, int] | None = None,
    ) -> dict[str, Tensor]:
        """Noise for one vector, given in parts: each value + N(0, (noise_multiplier·sensitivity)²).

        `sensitivity` bounds all parts together. Added in float64 on the CPU and in float32 on a GPU, returned in
        float32 or wider; the memory of the values is used again where it can be, so that no un-noised copy stays
        behind. A value may be a part of a larger tensor, flat from the element `offsets[name]` on: it gets the noise
        that it would get in the whole.
        """
        offsets = offsets or {}
        sigma, bound = positive(noise_multiplier=noise_multiplier), positive(sensitivity=sensitivity)
        if self.mode == "fast":
            return {name: _fast(value, sigma * bound) for name, value in values.items()}
        wide = {name: value.detach().to(_wide(value)).contiguous() for name, value in values.items()}
        here = f"{sequence}/{stream}"
        if self.mode == "hardened":
            assert not any(offsets.values()), "exact draws are made for whole tensors"
            return _on_cpu(wide, self._hardened(here, sigma, bound, sum(v.numel() for v in wide.values())))
        keys = {name: self._derived(f"{here}/{name}/gpu", 32) for name in wide}  # of a CPU too, since seeds say so
        on_gpu = {name: v for name, v in wide.items() if v.device.type == "cuda" and v.dtype == torch.float32}
        for device in {v.device for v in on_gpu.values()}:
            there = {name: v for name, v in on_gpu.items() if v.device == device}
            add = _gpu_kernel()
            add(list(there.values()), [keys[n] for n in there], sigma * bound, [offsets.get(n, 0) for n in there])
        rest = {name: v for name, v in wide.items() if name not in on_gpu}
        return wide | _on_cpu(rest, _secure(keys, offsets, sigma * bound), shares=chacha_cpu.is_native())

    def _hardened(self, here: str, sigma: float, bound: float, dimension: int) -> Fill:
        step, rounded_bound = grid_for(bound, dimension)

        def fill(blocks: Sequence[Block]) -> None:
            for name, start, target in blocks:
                stream = chacha.Keystream(self._derived(f"{here}/{name}/{start}", 32))
                value: Any = np.clip(np.rint(target.astype(np.float64) / step), -(2.0**51), 2.0**51)
                value += rounded_gaussians(stream.words(len(target)), sigma * rounded_bound / step, stream.word)
                target[:] = value * step  # an exact number of the grid; rounding it to float32 comes after

        return fill

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


def made_on_cpu() -> str:
    """By which code: numbers differ in the last digits of float64, and the ranks of a run must add the same ones."""
    return "native" if chacha_cpu.is_native() else "numpy"


def _secure(keys: Mapping[str, bytes], offsets: Mapping[str, int], scale: float) -> Fill:
    def fill(blocks: Sequence[Block]) -> None:
        parts = [chacha_cpu.Part(keys[name], start + offsets.get(name, 0), target) for name, start, target in blocks]
        chacha_cpu.add_gaussians(parts, scale)

    return fill


def _on_cpu(values: Mapping[str, Tensor], fill: Fill, shares: bool = False) -> dict[str, Tensor]:
    """Blocks of elements, shared among threads (by `fill` itself, if it `shares`): their order does not matter."""
    outputs = {name: value.cpu() for name, value in values.items()}
    flat = {name: value.view(-1).numpy() for name, value in outputs.items()}
    length = max((len(x) for x in flat.values()), default=0) or 1 if shares else BLOCK
    blocks = [(name, i, x[i : i + length]) for name, x in flat.items() for i in range(0, len(x), length)]
    workers = torch.get_num_threads() if sum(len(target) for _, _, target in blocks) > 2 * BLOCK else 1
    if shares or workers == 1:
        fill(blocks)
    else:  # numpy releases the interpreter's lock
        blocks.sort(key=lambda block: -len(block[2]))
        with ThreadPoolExecutor(workers - 1) as pool:
            others = [pool.submit(fill, blocks[i::workers]) for i in range(1, workers)]
            fill(blocks[::workers])
            for other in others:
                other.result()  # or what it raised
    return {name: noised.to(values[name].device) for name, noised in outputs.items()}


def _wide(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def _fast(value: Tensor, scale: float) -> Tensor:
    dtype = _wide(value)
    return value.to(dtype) + scale * torch.randn(value.shape, dtype=dtype, device=value.device)


def _gpu_kernel() -> Callable[[Sequence[Tensor], Sequence[bytes], float, Sequence[int]], None]:
    """One Triton launch for all tensors, or plain torch ops where there is no Triton."""
    try:
        from .chacha_cuda import add_gaussians_
    except ImportError:
        return _gpu_without_triton
    return add_gaussians_


def _gpu_without_triton(values: Sequence[Tensor], keys: Sequence[bytes], scale: float, offsets: Sequence[int]) -> None:
    for value, key, offset in zip(values, keys, offsets, strict=True):
        flat = value.view(-1)
        for i in range(0, len(flat), 2**20):
            part = flat[i : i + 2**20]
            part += scale * chacha.gaussians(key, offset + i, len(part), value.device).float()
