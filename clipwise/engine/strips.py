"""Convolutions with TF32: an input in strips, of which products take every row of the kernel as it lies.

A strip is one row of the (padded) input with the kernel's columns side by side: for every position along it, the kw·c
numbers that one row of a kernel sees there. Strips repeat the input kw times, patches kh times as often again. Output
row y meets kernel row i in strip y·s + i·d (stride s, dilation d). Strips are kept by their remainder of s, so that
those of all output rows lie side by side: what kernel row i sees is one matrix [positions, kw·c], and no copy.

Factors are cut to TF32's bits on the way (products.py). A few images at a time, so that strips take little memory.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .contributions import Window
from .cuda_ops import longest, multiply, tensor_cores
from .products import cut

_PART = 2**25  # numbers in strips at a time: fewer leave a part of the GPU idle


class Given(NamedTuple):
    """What becomes of an image: times its weight, or zero where it is dropped."""

    weights: Tensor  # [images], float32
    keep: Tensor  # [images]


def count(window: Window) -> tuple[int, int]:
    """Strips: remainders, and those of each."""
    (kernel, _), (stride, _), (dilation, _) = window.kernel, window.stride, window.dilation
    return stride, window.out[0] + (kernel - 1) * dilation // stride


def strips(x: Tensor, window: Window, given: Given | None = None, images_last: bool = False) -> Tensor:
    """[images, remainder, strip, positions along it, kw·c] of x [images, *in, c], cut.

    With images_last, images come after the strips. With `given`, images are weighted or dropped.
    """
    if x.device.type == "cuda":
        from .kernels_conv import strips as kernel

        return kernel(x, window, count(window), given, images_last)
    remainders, each = count(window)
    rows = torch.arange(each)[None, :] * remainders + torch.arange(remainders)[:, None] - window.before[0]
    places = torch.arange(window.kernel[1]) * window.dilation[1] - window.before[1]
    columns = torch.arange(window.out[1])[:, None] * window.stride[1] + places
    seen = x[:, rows.clamp(0, x.shape[1] - 1)][:, :, :, columns.clamp(0, x.shape[2] - 1)]
    if given is not None:
        seen = seen * given.weights.reshape(-1, *(1,) * (seen.dim() - 1))
    inside = ((rows >= 0) & (rows < x.shape[1]))[:, :, None, None] & ((columns >= 0) & (columns < x.shape[2]))
    inside = inside[None, ..., None]
    if given is not None:
        inside = inside & given.keep.reshape(-1, *(1,) * (seen.dim() - 1))
    made = cut(torch.where(inside, seen, 0.0)).flatten(4)
    return made.movedim(0, 2).contiguous() if images_last else made.contiguous()


def _images(left: Tensor, window: Window) -> tuple[Tensor, Window]:
    """Gradients at the output as an input of their own, and the window that sees them as they are."""
    whole = Window((1, 1), (1, 1), (0, 0), (1, 1), window.out)
    return left.unflatten(1, window.out), whole


def _most(x: Tensor, window: Window) -> int:
    """Images at a time."""
    each = math.prod(count(window)) * window.out[1] * window.kernel[1] * x.shape[3]
    return max(1, _PART // each)


def _met(strip: Tensor, axis: int, i: int, window: Window) -> Tensor:
    """The strips that kernel row i meets; `axis` is that of the remainders."""
    at, remainders = i * window.dilation[0], window.stride[0]
    return strip.select(axis, at % remainders).narrow(axis, at // remainders, window.out[0])


def example_gradients(left: Tensor, x: Tensor, window: Window, is_cut: bool, chunk: int) -> tuple[Tensor, Tensor]:
    """[images, p, *kernel, c], float32, of left [images, t, p], which may be cut already, and x [images, *in, c].

    And the sums of their squares [images], float64, of chunks in float32, while the cache holds them.
    """
    (lines, places), c = window.kernel, x.shape[3]
    made = torch.empty(len(x), left.shape[2], lines, places * c, dtype=torch.float32, device=x.device)
    squared = torch.empty(len(x), dtype=torch.float64, device=x.device)
    most = _most(x, window)
    for first in range(0, len(x), most):
        part = slice(first, first + most)
        own = left[part] if is_cut else strips(*_images(left[part], window)).flatten(1, 3)
        seen = strips(x[part], window)
        with tensor_cores():
            for i in range(lines):
                torch.bmm(own.mT, _met(seen, 1, i, window).flatten(1, 2), out=made[part, :, i])
        squared[part] = _squares(made[part].flatten(1), chunk)
    return made.reshape(len(x), -1, lines, places, c), squared


def _squares(x: Tensor, chunk: int) -> Tensor:
    if x.device.type == "cuda":
        found: Tensor = torch.ops.clipwise.squares(x, chunk)
        return found
    return x.double().square().sum(1)


def weighted_sum(left: Tensor, x: Tensor, weights: Tensor, keep: Tensor, window: Window) -> Tensor:
    """Σ over kept images, weights on left: [p, *kernel, c], float32."""
    (lines, places), c = window.kernel, x.shape[3]
    total = torch.zeros(left.shape[2], lines, places * c, dtype=torch.float32, device=x.device)
    positions = left.shape[1]
    most = max(1, min(_most(x, window), longest("tf32", positions) // max(positions, 1)))
    for first in range(0, len(x), most):
        part = slice(first, first + most)
        images, whole = _images(left[part], window)
        own = strips(images, whole, Given(weights[part], keep[part]), images_last=True).flatten(0, 3)
        seen = strips(x[part], window, Given(torch.ones_like(weights[part]), keep[part]), images_last=True)
        for i in range(lines):
            multiply(own, _met(seen, 0, i, window).flatten(0, 2), "tf32", total[:, i], positions, add=True)
    return total.reshape(-1, lines, places, c)
