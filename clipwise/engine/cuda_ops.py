"""Ops that a compiler takes as they are (torch.ops.clipwise.…): their insides are not its business.

Kernels are imported when they first run: Triton is there on a GPU only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("clipwise::matmul", mutates_args=(), schema="(Tensor left, Tensor right, bool tf32) -> Tensor")
def _matmul(left: Tensor, right: Tensor, tf32: bool) -> Tensor:
    backend: Any = torch.backends.cuda.matmul
    before, backend.fp32_precision = backend.fp32_precision, "tf32" if tf32 else "ieee"
    try:
        return torch.matmul(left, right)
    finally:
        backend.fp32_precision = before


@_matmul.register_fake
def _(left: Tensor, right: Tensor, tf32: bool) -> Tensor:
    return torch.matmul(left, right)


@torch.library.custom_op("clipwise::column_sums", mutates_args=(), schema="(Tensor x) -> Tensor")
def _column_sums(x: Tensor) -> Tensor:
    from .kernels_cuda import column_sums as kernel

    return kernel(x)


@_column_sums.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], dtype=torch.float32)


@torch.library.custom_op(
    "clipwise::gram", mutates_args=(), schema="(Tensor left, Tensor right, bool tf32) -> (Tensor, Tensor)"
)
def _gram(left: Tensor, right: Tensor, tf32: bool) -> tuple[Tensor, Tensor]:
    from .kernels_cuda import gram as kernel

    return kernel(left, right, tf32)


@_gram.register_fake
def _(left: Tensor, right: Tensor, tf32: bool) -> tuple[Tensor, Tensor]:
    b, g, t, _ = left.shape
    return left.new_empty(3, b * g, dtype=torch.float64), left.new_empty(2, b, g, t, dtype=torch.float32)


@torch.library.custom_op(
    "clipwise::gram_bound",
    mutates_args=(),
    schema="(Tensor left, Tensor right, bool tf32, float error, float unit, float moved_left, float moved_right)"
    " -> Tensor",
)
def _gram_bound(
    left: Tensor, right: Tensor, tf32: bool, error: float, unit: float, moved_left: float, moved_right: float
) -> Tensor:
    from .kernels_cuda import gram_bound as kernel

    return kernel(left, right, tf32, error, unit, moved_left, moved_right)


@_gram_bound.register_fake
def _(left: Tensor, *others: object) -> Tensor:
    return left.new_empty(left.shape[0], dtype=torch.float64)


@torch.library.custom_op(
    "clipwise::kept_product",
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor dropped, bool hide_left, str precision) -> Tensor",
)
def _kept_product(left: Tensor, right: Tensor, dropped: Tensor, hide_left: bool, precision: Any) -> Tensor:
    from .kernels_cuda import move_rows
    from .products import product

    hidden = left if hide_left else right
    spare = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    move_rows(hidden, spare, dropped, back=False)
    out = product(left.mT, right, torch.float32, precision)
    move_rows(hidden, spare, dropped, back=True)
    return out


@_kept_product.register_fake
def _(left: Tensor, right: Tensor, dropped: Tensor, hide_left: bool, precision: Any) -> Tensor:
    return left.new_empty(left.shape[1], right.shape[1], dtype=torch.float32)


@torch.library.custom_op(
    "clipwise::norm_sums",
    mutates_args=(),
    schema="(Tensor grad, Tensor input, Tensor mean, Tensor scale) -> Tensor",
)
def _norm_sums(grad: Tensor, input: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    from .kernels_cuda import norm_sums as kernel

    return kernel(grad, input, mean, scale)


@_norm_sums.register_fake
def _(grad: Tensor, input: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    return grad.new_empty(2, grad.shape[0], grad.shape[2], dtype=torch.float32)
