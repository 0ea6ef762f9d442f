"""Loops in C for a CPU, where the installation could build them: the same numbers as numpy and torch make, sooner.

hatch_build.py builds them when the package is installed; without a compiler, on other systems, or with
CLIPWISE_NATIVE=0 in the environment there are none, and nothing but speed is lost. Pure functions: nothing here draws.
Whoever uses them compares them with a reference first (`usable`), so that a bad build is not used.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import os
import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALL = ("avx512", "avx2", "base")
_LEVELS = {"AVX512": "avx512", "AVX2": "avx2"}  # what torch's own kernels find on this CPU
_ALONE = 2**16  # numbers of noise that are not worth a second thread


class NoisePart(ctypes.Structure):
    """Part of noise.c."""

    _fields_ = [
        ("key", ctypes.c_char * 32),
        ("start", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("narrow", ctypes.c_void_p),
        ("wide", ctypes.c_void_p),
    ]


class GramUse(ctypes.Structure):
    """Use of gram.c."""

    _fields_ = [
        ("data", ctypes.c_void_p * 2),
        ("strides", (ctypes.c_int64 * 3) * 2),
        ("width", ctypes.c_int64 * 2),
        ("groups", ctypes.c_int64),
        ("positions", ctypes.c_int64),
        ("total", ctypes.c_void_p),
        ("squares", ctypes.c_void_p * 2),
    ]


class GradientsOf(ctypes.Structure):
    """Gradients of products.c."""

    _fields_ = [
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("left_strides", ctypes.c_int64 * 4),
        ("right_strides", ctypes.c_int64 * 2),
        ("places", ctypes.c_void_p),
        ("spots", ctypes.c_void_p),
        ("run", ctypes.c_int64),
        ("examples", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("positions", ctypes.c_int64),
        ("p", ctypes.c_int64),
        ("d", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("squares", ctypes.c_void_p),
    ]


class SumOf(ctypes.Structure):
    """Sum of products.c."""

    _fields_ = [
        ("sides", ctypes.c_void_p * 2),
        ("strides", (ctypes.c_int64 * 4) * 2),
        ("weights", ctypes.c_void_p),
        ("keep", ctypes.c_void_p),
        ("weighed", ctypes.c_int64),
        ("examples", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("positions", ctypes.c_int64),
        ("p", ctypes.c_int64),
        ("d", ctypes.c_int64),
        ("out", ctypes.c_void_p),
    ]


def folder() -> Path:
    """Where the libraries lie."""
    return Path(__file__).parent


def level() -> str:
    """Of the libraries, that which fits this CPU."""
    return _LEVELS.get(torch.backends.cpu.get_cpu_capability(), "base")


@lru_cache(maxsize=8)
def library(name: str) -> ctypes.CDLL | None:
    """That of a C file, for this CPU or a lesser one; None where none was built from the file as it is."""
    if os.environ.get("CLIPWISE_NATIVE") == "0":
        return None
    source = folder() / f"{name}.c"
    for kind in _ALL[_ALL.index(level()) :]:
        path = folder() / f"{name}_{kind}.so"
        try:
            found = ctypes.CDLL(str(path))
            text = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(found, "clipwise_source"))).decode()
            if text == hashlib.sha256(source.read_bytes()).hexdigest():
                return found
        except (OSError, ValueError):
            continue
    return None


def usable(name: str, agrees: Callable[[], bool]) -> bool:
    """Whether a library is there and does what its reference does."""
    if library(name) is None:
        return False
    if agrees():
        return True
    warnings.warn(
        f"clipwise.native: {name} was built wrongly (it does not give the reference's numbers) and is not used. "
        "Install clipwise again; until then steps take longer.",
        stacklevel=2,
    )
    return False


_LOADED_BY = os.getpid()


def threads() -> int:
    """As many as torch uses; one in a fork, where OpenMP's others are gone."""
    return torch.get_num_threads() if os.getpid() == _LOADED_BY else 1


def add_noise(
    keys: Sequence[bytes], starts: Sequence[int], targets: Sequence[np.ndarray[Any, Any]], scale: float
) -> None:
    """Each target (float32 or float64, contiguous) += scale · the numbers of its key from `start` on."""
    found = _loaded("noise")
    parts = (NoisePart * len(keys))()
    try:
        _fill(parts, keys, starts, targets)
        workers = threads() if sum(target.size for target in targets) > _ALONE else 1
        found.clipwise_noise(parts, ctypes.c_int64(len(keys)), ctypes.c_double(scale), ctypes.c_int(workers))
    finally:
        ctypes.memset(parts, 0, ctypes.sizeof(parts))  # the keys


def _fill(parts: Any, keys: Sequence[bytes], starts: Sequence[int], targets: Sequence[np.ndarray[Any, Any]]) -> None:
    for part, key, start, target in zip(parts, keys, starts, targets, strict=True):
        fits = target.dtype in (np.float32, np.float64) and target.flags.c_contiguous and target.flags.writeable
        if len(key) != 32 or start < 0 or not fits:
            raise ValueError("Noise is added to contiguous float32 or float64 numbers, from a key of 32 bytes.")
        ctypes.memmove(ctypes.addressof(part), key, 32)
        part.start, part.length = start, target.size
        if target.dtype == np.float32:
            part.narrow = target.ctypes.data
        else:
            part.wide = target.ctypes.data


def _loaded(name: str) -> ctypes.CDLL:
    found = library(name)
    if found is None:
        raise RuntimeError(f"clipwise.native has no {name} here: ask `usable` first.")
    return found


def _readable(x: Tensor) -> Tensor:
    """A tensor whose memory holds its numbers: float32, on the CPU, as they are."""
    if type(x) not in (Tensor, torch.nn.Parameter) or x.layout != torch.strided:
        raise TypeError(f"Native code reads plain tensors, not a {type(x).__name__}.")
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise TypeError(f"Native code reads float32 on the CPU, not {x.dtype} on {x.device}.")
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=torch.float32, device="cpu")
    return x.resolve_neg()


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Whatever the default device and dtype are: C writes by address."""
    return torch.empty(shape, dtype=dtype, device="cpu")


Side = tuple[int, Sequence[int], int]  # address, strides in entries (but of the last axis, 1), entries of a position
Where = tuple[int, Sequence[int], Sequence[int]]  # address, shape, strides in entries


def _gram(sides: Sequence[Side], shape: Sequence[int], total: int, squares: Sequence[int]) -> None:
    """Addresses all; `shape` is that of total and positions: [b, g, t]."""
    found = _loaded("gram")
    use = GramUse(groups=shape[1], positions=shape[2], total=total)
    for i, (address, strides, width) in enumerate(sides):
        use.data[i], use.width[i], use.squares[i] = address, width, squares[i]
        use.strides[i][:] = strides
    if found.clipwise_gram(ctypes.byref(use), ctypes.c_int64(shape[0]), ctypes.c_int(threads())):
        raise MemoryError("No memory for inner products.")


@lru_cache(maxsize=1)
def has_gram() -> bool:
    """Whether `gram_sums` can be asked: it gave what numpy gives when this was first asked. No tracer sees numpy."""
    return usable("gram", _gram_agrees)


def _gram_agrees() -> bool:
    wave = np.sin(np.arange(2 * 3 * 130 * 520, dtype=np.float64) * 1.3).astype(np.float32).reshape(2, 3, 130, 520)
    left, right = np.ascontiguousarray(wave[..., :70]), wave
    total, squares = np.zeros((2, 3)), np.zeros((2, 2, 3, 130))
    sides = [(x.ctypes.data, [step // 4 for step in x.strides[:3]], x.shape[3]) for x in (left, right)]
    _gram(sides, left.shape[:3], total.ctypes.data, [x.ctypes.data for x in squares])
    products = [x.astype(np.float64) @ x.astype(np.float64).swapaxes(2, 3) for x in (left, right)]
    known = [x.diagonal(axis1=2, axis2=3) for x in products]
    sums = (products[0] * products[1]).sum((2, 3))
    return np.allclose(total, sums, rtol=1e-5, atol=0) and np.allclose(squares, known, rtol=1e-5, atol=0)


def gram_sums(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Σ_ts ⟨l_t, l_s⟩⟨r_t, r_s⟩ [b, g] and ‖l_t‖², ‖r_t‖² [2, b, g, t], of [b, g, t, p] and [b, g, t, d] in float32."""
    both = [x if x.stride(3) == 1 or x.shape[3] == 1 else x.contiguous() for x in map(_readable, (left, right))]
    shape = left.shape[:3]
    if right.shape[:3] != shape:
        raise ValueError(f"Two sides of one product: {tuple(left.shape)} and {tuple(right.shape)}.")
    total, squares = _empty(*shape[:2], dtype=torch.float64), _empty(2, *shape, dtype=torch.float64)
    sides = [(x.data_ptr(), x.stride()[:3], x.shape[3]) for x in both]
    _gram(sides, shape, total.data_ptr(), [x.data_ptr() for x in squares])
    return total, squares


@lru_cache(maxsize=128)
def _offsets(sizes: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Where the entries of these axes lie, in order."""
    found = np.zeros(1, dtype=np.int64)
    for size, stride in zip(sizes, strides, strict=True):
        found = (found[:, None] + np.arange(size, dtype=np.int64) * stride).reshape(-1)
    return np.ascontiguousarray(found)


@lru_cache(maxsize=128)
def _run(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """How many entries of these axes lie beside each other, everywhere."""
    spots = _offsets(sizes, strides)
    breaks = np.flatnonzero(np.diff(spots) != 1) + 1
    return int(np.gcd.reduce([len(spots), *breaks.tolist()]))


def _gradients(left: Where, right: Where, axes: int, out: int, squares: int) -> None:
    """Of [b, g, t, p] and of [b, g, *positions, *entries], of which the first `axes` are positions."""
    found = _loaded("products")
    (address, size, strides), (where, sizes, steps) = left, right
    places = _offsets(tuple(sizes[2 : 2 + axes]), tuple(steps[2 : 2 + axes]))
    entries = tuple(sizes[2 + axes :]), tuple(steps[2 + axes :])
    spots = _offsets(*entries)
    if tuple(sizes[:2]) != tuple(size[:2]) or len(places) != size[2]:
        raise ValueError(f"Two sides of one product: {tuple(size)} and {tuple(sizes)}, {axes} of them positions.")
    all_of = GradientsOf(left=address, right=where, out=out, squares=squares, p=size[3], d=len(spots))
    all_of.left_strides[:], all_of.right_strides[:] = strides, steps[:2]
    all_of.places, all_of.spots, all_of.run = places.ctypes.data, spots.ctypes.data, _run(*entries)
    all_of.examples, all_of.groups, all_of.positions = size[:3]
    if found.clipwise_gradients(ctypes.byref(all_of), ctypes.c_int(threads())):
        raise MemoryError("No memory for gradients of single examples.")


def _sum(sides: Sequence[Where], weights: int, keep: int, weighed: int, out: int) -> None:
    """Of [b, g, t, p] and [b, g, t, d]."""
    found = _loaded("products")
    (_, size, _), (_, other, _) = sides
    if tuple(size[:3]) != tuple(other[:3]):
        raise ValueError(f"Two sides of one product: {tuple(size)} and {tuple(other)}.")
    what = SumOf(weights=weights, keep=keep, weighed=weighed, p=size[3], d=other[3], out=out)
    what.examples, what.groups, what.positions = size[:3]
    for i, (address, _, strides) in enumerate(sides):
        what.sides[i], what.strides[i][:] = address, strides
    if found.clipwise_weighted_sum(ctypes.byref(what), ctypes.c_int(threads())):
        raise MemoryError("No memory for a weighted sum.")


@lru_cache(maxsize=1)
def has_products() -> bool:
    """Whether `example_gradients` and `weighted_sum` can be asked: as `has_gram`."""
    return usable("products", _products_agree)


def _products_agree() -> bool:
    """All ways through the C file: runs of entries and single ones, several blocks, chunks, tiles that are not full."""
    wave = np.sin(np.arange(3 * 2 * 300 * 480, dtype=np.float64) * 1.3).astype(np.float32).reshape(3, 2, 300, 480)
    kinds = [(wave[..., :260], wave[..., 300:444]), (wave[..., 7:14], wave[..., 20:48])]
    kinds += [(wave[:, :, 7:14].swapaxes(2, 3), wave[:, :, 20:41].swapaxes(2, 3))]
    return all(_agree_on(left, right) for left, right in kinds)


def _agree_on(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    sides = [(x.ctypes.data, x.shape, [step // 4 for step in x.strides]) for x in (left, right)]
    known = left.astype(np.float64).swapaxes(2, 3) @ right.astype(np.float64)
    out, squares = np.zeros(known.shape, dtype=np.float32), np.zeros(3)
    _gradients(sides[0], sides[1], 1, out.ctypes.data, squares.ctypes.data)
    weights, keep = np.array([0.5, 7.0, 2.0], dtype=np.float32), np.array([True, False, True])
    found = [(out, known)]
    for weighed in (0, 1):
        total = np.zeros_like(out[0])
        _sum(sides, weights.ctypes.data, keep.ctypes.data, weighed, total.ctypes.data)
        found.append((total, 0.5 * known[0] + 2.0 * known[2]))
    close = all(np.allclose(a, b, rtol=0, atol=1e-5 * float(np.abs(known).max())) for a, b in found)
    return close and np.allclose(squares, (out.astype(np.float64) ** 2).sum((1, 2, 3)), rtol=1e-12, atol=0)


def example_gradients(left: Tensor, right: Tensor, axes: int = 1) -> tuple[Tensor, Tensor]:
    """Gradients [b, g, p, d] and their sums of squares [b], of [b, g, t, p] and [b, g, *positions, *entries], float32.

    The first `axes` of the right side's own are the t positions. Both may lie in memory as they like.
    """
    left, right = _readable(left), _readable(right)
    out = _empty(*left.shape[:2], left.shape[3], math.prod(right.shape[2 + axes :]), dtype=torch.float32)
    squares = _empty(len(left), dtype=torch.float64)
    sides = [(x.data_ptr(), x.shape, x.stride()) for x in (left, right)]
    _gradients(sides[0], sides[1], axes, out.data_ptr(), squares.data_ptr())
    return out, squares


def weighted_sum(left: Tensor, right: Tensor, weights: Tensor, keep: Tensor, weigh_left: bool) -> Tensor:
    """Σ weights·leftᵀ @ right over examples with `keep` [b] and their positions: [g, p, d], float32.

    Of [b, g, t, p] and [b, g, t, d]. The others are not read: the sum is the one with zeros in their place.
    """
    left, right, scale = _readable(left), _readable(right), _readable(weights).contiguous()
    kept = keep.to("cpu", torch.bool).contiguous()
    if not scale.shape == kept.shape == left.shape[:1]:
        raise ValueError(f"{len(left)} examples, but {tuple(scale.shape)} weights and {tuple(kept.shape)} to keep.")
    out = _empty(left.shape[1], left.shape[3], right.shape[3], dtype=torch.float32)
    sides = [(x.data_ptr(), x.shape, x.stride()) for x in (left, right)]
    _sum(sides, scale.data_ptr(), kept.data_ptr(), 0 if weigh_left else 1, out.data_ptr())
    return out
