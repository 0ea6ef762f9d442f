"""Ops that a compiler takes as they are (torch.ops.clipwise.…): their insides are not its business.

Kernels are imported when they first run: Triton is there on a GPU only.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from .. import native


def _there(run: Callable[..., Any]) -> Callable[..., Any]:
    """On the device of the first tensor, whichever is the current one: kernels are started on that."""

    @functools.wraps(run)
    def wrapped(first: Any, *others: Any) -> Any:
        device = (first[0] if isinstance(first, list) else first).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return run(first, *others)

    return wrapped


@contextmanager
def tensor_cores(allowed: bool = True) -> Iterator[None]:
    """Products of float32 as TF32, or not."""
    backend: Any = torch.backends.cuda.matmul
    before, backend.fp32_precision = backend.fp32_precision, "tf32" if allowed else "ieee"
    try:
        yield
    finally:
        backend.fp32_precision = before


def multiply(left: Tensor, right: Tensor, precision: str, to: Tensor, positions: int, add: bool = False) -> None:
    """leftᵀ @ right into `to`, or onto it: one product, or a few of limited length. Rows are examples × positions."""
    length = longest(precision, positions)
    for i in range(0, max(len(left), 1), length):
        first, second, more = left[i : i + length].mT, right[i : i + length], add or i > 0
        if precision == "bfloat16":
            part = torch.empty_like(to) if more else to
            torch.mm(first, second, out_dtype=torch.float32, out=part)
            if more:
                to += part
            continue
        with tensor_cores(precision == "tf32"):
            if more:
                torch.addmm(to, first, second, out=to)
            else:
                torch.mm(first, second, out=to)


# Examples × positions of one product, and examples: how its sum rounds grows with its length (docs/engine.md). A tensor
# core adds up 16 products of bfloat16 at a time, and 8 of TF32.
ROWS = {"exact": 2**13, "bfloat16": 2**14, "tf32": 2**13}
_EXAMPLES = 2**11


def longest(precision: str, positions: int) -> int:
    """Rows of one product on a GPU."""
    return min(ROWS[precision], _EXAMPLES * max(positions, 1))


_SPARE = 2**13  # columns that are put aside at a time: those of a vocabulary would be as large as its logits


@torch.library.custom_op("clipwise::matmul", mutates_args=(), schema="(Tensor left, Tensor right, bool tf32) -> Tensor")
@_there
def _matmul(left: Tensor, right: Tensor, tf32: bool) -> Tensor:
    with tensor_cores(tf32):
        return torch.matmul(left, right)


@_matmul.register_fake
def _(left: Tensor, right: Tensor, tf32: bool) -> Tensor:
    return torch.matmul(left, right)


@torch.library.custom_op("clipwise::column_sums", mutates_args=(), schema="(Tensor x) -> Tensor")
@_there
def _column_sums(x: Tensor) -> Tensor:
    from .kernels_cuda import column_sums as kernel

    return kernel(x)


@_column_sums.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], dtype=torch.float32)


@torch.library.custom_op(
    "clipwise::gram", mutates_args=(), schema="(Tensor left, Tensor right, bool tf32) -> (Tensor, Tensor)"
)
@_there
def _gram(left: Tensor, right: Tensor, tf32: bool) -> tuple[Tensor, Tensor]:
    from .kernels_cuda import gram as kernel

    return kernel(left, right, tf32)


@_gram.register_fake
def _(left: Tensor, right: Tensor, tf32: bool) -> tuple[Tensor, Tensor]:
    b, g, t, _ = left.shape
    return left.new_empty(3, b * g, dtype=torch.float64), left.new_empty(2, b, g, t, dtype=torch.float32)


@torch.library.custom_op(
    "clipwise::native_gram", mutates_args=(), schema="(Tensor left, Tensor right) -> (Tensor, Tensor)"
)
def _native_gram(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return native.gram_sums(left, right)


@_native_gram.register_fake
def _(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    b, g, t, _ = left.shape
    return left.new_empty(b, g, dtype=torch.float64), left.new_empty(2, b, g, t, dtype=torch.float64)


@torch.library.custom_op(
    "clipwise::native_gradients",
    mutates_args=(),
    schema="(Tensor left, Tensor right, int[] size, int[] stride, int axes) -> (Tensor, Tensor)",
)
def _native_gradients(
    left: Tensor, right: Tensor, size: list[int], stride: list[int], axes: int
) -> tuple[Tensor, Tensor]:
    """The right side as a view of `right`, laid out whole."""
    return native.example_gradients(left, right.contiguous().as_strided(size, stride), axes)


@_native_gradients.register_fake
def _(left: Tensor, right: Tensor, size: list[int], stride: list[int], axes: int) -> tuple[Tensor, Tensor]:
    made = left.new_empty(*left.shape[:2], left.shape[3], math.prod(size[2 + axes :]))
    return made, left.new_empty(len(left), dtype=torch.float64)


@torch.library.custom_op(
    "clipwise::native_sum",
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor weights, Tensor keep, bool weigh_left) -> Tensor",
)
def _native_sum(left: Tensor, right: Tensor, weights: Tensor, keep: Tensor, weigh_left: bool) -> Tensor:
    return native.weighted_sum(left, right, weights, keep, weigh_left)


@_native_sum.register_fake
def _(left: Tensor, right: Tensor, *others: object) -> Tensor:
    return left.new_empty(left.shape[1], left.shape[3], right.shape[3])


@torch.library.custom_op(
    "clipwise::gram_bounds",
    mutates_args=(),
    schema="(Tensor[] lefts, Tensor[] rights, Tensor more, bool[] tf32, float[] errors) -> Tensor",
)
@_there
def _gram_bounds(
    lefts: list[Tensor], rights: list[Tensor], more: Tensor, tf32: list[bool], errors: list[float]
) -> Tensor:
    from .kernels_cuda import gram_bounds as kernel

    return kernel(lefts, rights, more, tf32, errors)


@_gram_bounds.register_fake
def _(lefts: list[Tensor], *others: object) -> Tensor:
    return lefts[0].new_empty(len(lefts), len(lefts[0]), dtype=torch.float64)


@torch.library.custom_op(
    "clipwise::weighted_product",
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor weights, Tensor dropped, bool weigh_left, str precision) -> Tensor",
)
@_there
def _weighted_product(
    left: Tensor, right: Tensor, weights: Tensor, dropped: Tensor, weigh_left: bool, precision: str
) -> Tensor:
    from .kernels_rows import move_rows, weigh

    factor, hidden = (left, right) if weigh_left else (right, left)
    parts = hidden.split(_SPARE, dim=1)
    spare = hidden.new_empty(len(hidden) * parts[0].shape[1])
    out = hidden.new_empty(left.shape[1], right.shape[1], dtype=torch.float32)
    weighted: Tensor | None = None
    for part, to in zip(parts, out.split(_SPARE, dim=1 if weigh_left else 0), strict=True):
        aside = spare[: part.numel()].view(part.shape)
        if weighted is None:
            weighted = weigh(factor, weights, dropped, part, aside, precision == "tf32")
        else:
            move_rows(part, aside, dropped, back=False)
        first, second = (weighted, part) if weigh_left else (part, weighted)
        try:
            multiply(first, second, precision, to, len(left) // max(len(dropped), 1))
        finally:
            move_rows(part, aside, dropped, back=True)
    return out


@_weighted_product.register_fake
def _(left: Tensor, right: Tensor, *others: Any) -> Tensor:
    return left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32)


@torch.library.custom_op(
    "clipwise::patch_products",
    mutates_args=(),
    schema="(Tensor left, Tensor x, Tensor keep, int[2] kernel, int[2] stride, int[2] before, int[2] dilation,"
    " int[2] out, int each, bool hide) -> Tensor",
)
@_there
def _patch_products(left: Tensor, x: Tensor, keep: Tensor, *window: Any) -> Tensor:
    from .kernels_conv import patch_products as kernel

    return kernel(left, x, keep, *window)


@_patch_products.register_fake
def _(left: Tensor, x: Tensor, keep: Tensor, kernel: list[int], *others: Any) -> Tensor:
    each = others[4]
    return left.new_empty(-(-len(left) // each), left.shape[2], *kernel, x.shape[3], dtype=torch.float32)


_WINDOW = "int[2] kernel, int[2] stride, int[2] before, int[2] dilation, int[2] out"


@torch.library.custom_op(
    "clipwise::patch_bound", mutates_args=(), schema=f"(Tensor left, Tensor x, {_WINDOW}, float[] errors) -> Tensor"
)
@_there
def _patch_bound(left: Tensor, x: Tensor, *others: Any) -> Tensor:
    from .kernels_conv import patch_bound as kernel

    return kernel(left, x, *others)


@_patch_bound.register_fake
def _(left: Tensor, *others: Any) -> Tensor:
    return left.new_empty(len(left), dtype=torch.float64)


@torch.library.custom_op(
    "clipwise::strip_gradients",
    mutates_args=(),
    schema=f"(Tensor left, Tensor x, bool is_cut, int chunk, {_WINDOW}) -> (Tensor, Tensor)",
)
@_there
def _strip_gradients(left: Tensor, x: Tensor, is_cut: bool, chunk: int, *window: Any) -> tuple[Tensor, Tensor]:
    from . import strips
    from .contributions import Window

    return strips.example_gradients(left, x, Window(*window), is_cut, chunk)


@_strip_gradients.register_fake
def _(left: Tensor, x: Tensor, is_cut: bool, chunk: int, kernel: list[int], *others: Any) -> tuple[Tensor, Tensor]:
    made = left.new_empty(len(left), left.shape[2], *kernel, x.shape[3], dtype=torch.float32)
    return made, left.new_empty(len(left), dtype=torch.float64)


@torch.library.custom_op(
    "clipwise::strip_sum",
    mutates_args=(),
    schema=f"(Tensor left, Tensor x, Tensor weights, Tensor keep, {_WINDOW}) -> Tensor",
)
@_there
def _strip_sum(left: Tensor, x: Tensor, weights: Tensor, keep: Tensor, *window: Any) -> Tensor:
    from . import strips
    from .contributions import Window

    return strips.weighted_sum(left, x, weights, keep, Window(*window))


@_strip_sum.register_fake
def _(left: Tensor, x: Tensor, weights: Tensor, keep: Tensor, kernel: list[int], *others: Any) -> Tensor:
    return left.new_empty(left.shape[2], *kernel, x.shape[3], dtype=torch.float32)


@torch.library.custom_op(
    "clipwise::norm_sums",
    mutates_args=(),
    schema="(Tensor grad, Tensor input, Tensor mean, Tensor scale) -> Tensor",
)
@_there
def _norm_sums(grad: Tensor, input: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    from .kernels_cuda import norm_sums as kernel

    return kernel(grad, input, mean, scale)


@_norm_sums.register_fake
def _(grad: Tensor, input: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return grad.new_empty(2, grad.shape[0], grad.shape[2], dtype=torch.float32)


@torch.library.custom_op(
    "clipwise::weighted_rows", mutates_args=(), schema="(Tensor x, Tensor weights, Tensor keep) -> Tensor"
)
@_there
def _weighted_rows(x: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
    from .kernels_rows import weighted_rows as kernel

    return kernel(x, weights, keep)


@_weighted_rows.register_fake
def _(x: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
    return x.new_empty(x.shape[1])


@torch.library.custom_op("clipwise::squares", mutates_args=(), schema="(Tensor x, int chunk) -> Tensor")
@_there
def _squares(x: Tensor, chunk: int) -> Tensor:
    from .kernels_rows import squares as kernel

    return kernel(x, chunk)


@_squares.register_fake
def _(x: Tensor, chunk: int) -> Tensor:
    return x.new_empty(len(x), dtype=torch.float64)


@torch.library.custom_op("clipwise::cat", mutates_args=(), schema="(Tensor[] parts) -> Tensor")
@_there
def _cat(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)


@_cat.register_fake
def _(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].clone(memory_format=torch.contiguous_format)
