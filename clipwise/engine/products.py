"""Matrix products of known precision, by the fastest way that the device has.

| precision | factors | sums | where |
|---|---|---|---|
| exact | float32 or float64, as they are | the same | everywhere |
| bfloat16 | bfloat16, as they are: their products are exact in float32 | float32 | tensor cores |
| tf32 | float32, cut to 11 bits beforehand: every kernel multiplies the same numbers | float32 | tensor cores |

A sum Σ w·l⊗r takes its weights on one factor. That factor is rounded to what the product takes, and so differs from the
one whose norm was taken; `WEIGHTED_ERROR` says by how much at most, and the norm's bound grows by it (gram.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .static import is_static

Precision = Literal["exact", "bfloat16", "tf32"]

# Relative error of an entry of the factor that takes the weights, a little rounded up: 2⁻⁸, and 2⁻¹⁰ however it is cut.
WEIGHTED_ERROR: dict[Precision, float] = {"exact": 0.0, "bfloat16": 3.92e-3, "tf32": 9.8e-4}


def precision_of(left: Tensor, right: Tensor) -> Precision:
    """The fastest that loses nothing which the user's own products keep."""
    if left.device.type != "cuda" or left.dtype != right.dtype:
        return "exact"
    if left.dtype == torch.bfloat16:
        return "bfloat16"
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if left.dtype == torch.float32 and allowed else "exact"


def cut(x: Tensor) -> Tensor:
    """To the 11 bits that TF32 keeps."""
    return (x.view(torch.int32) & -(2**13)).view(torch.float32)


def product(left: Tensor, right: Tensor, dtype: torch.dtype, precision: Precision = "exact") -> Tensor:
    """Left @ right (three axes each, or two) in `dtype`, float32 or wider."""
    if precision == "bfloat16" and left.device.type == "cuda":
        return (torch.mm if left.dim() == 2 else torch.bmm)(left, right, out_dtype=torch.float32)
    if left.device.type == "cuda" and dtype == torch.float32:
        found: Tensor = torch.ops.clipwise.matmul(left.to(dtype), right.to(dtype), precision == "tf32")
        return found
    return torch.matmul(left.to(dtype), right.to(dtype))


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """No autocast; and on a CPU float32 means float32, whatever the user has set. On a GPU `product` sees to it."""
    with torch.autocast(device.type, enabled=False):
        if device.type != "cpu":
            yield
            return
        backends: tuple[Any, ...] = (torch.backends.mkldnn.matmul, torch.backends.mkldnn.conv)  # type: ignore[attr-defined]
        before = [backend.fp32_precision for backend in backends]
        for backend in backends:
            backend.fp32_precision = "ieee"
        try:
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision


def select(x: Tensor, keep: Tensor, own: bool = False) -> Tensor:
    """Rows outside `keep` set to 0, by selection: 0·inf and 0·NaN are NaN. In place if the tensor is our own.

    On the CPU filling the few such rows is far faster than `where`.
    """
    if x.device.type != "cpu" or is_static():
        return torch.where(keep.reshape(-1, *(1,) * (x.dim() - 1)), x, torch.zeros((), dtype=x.dtype, device=x.device))
    dropped = (~keep).nonzero()[:, 0]
    if not len(dropped):
        return x
    return x.index_fill_(0, dropped, 0) if own else x.index_fill(0, dropped, 0)


def aligned(x: Tensor, to: int = 8) -> Tensor:
    """The last axis padded with zeros to a multiple of `to`: products of other lengths take slow ways."""
    return F.pad(x, (0, -x.shape[-1] % to)) if x.shape[-1] % to else x


def column_sums(x: Tensor) -> Tensor:
    """[b, t, p] summed over t, in float32 or wider."""
    if x.device.type == "cuda" and x.dtype != torch.float64 and x.shape[1] > 1:
        found: Tensor = torch.ops.clipwise.column_sums(x.contiguous())
        return found
    return x.sum(1, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


# -- ops that a compiler takes as they are: their insides are not its business -------------------------------------


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
