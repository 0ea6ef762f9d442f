"""Matrix products of known precision, by the fastest way that the device has.

| precision | factors | sums | where |
|---|---|---|---|
| exact | float32 or float64, as they are | the same | everywhere |
| bfloat16 | bfloat16, as they are: their products are exact in float32 | float32 | tensor cores |
| tf32 | float32, cut to 11 bits beforehand: every kernel multiplies the same numbers | float32 | tensor cores |

Kernels cut float32 in different ways, and which kernel runs depends on the batch: one more record would change what the
others contribute. So nothing goes to tensor cores that they would have to cut. A sum Σ w·l⊗r takes its weights on one
factor. That factor is rounded to what the product takes, and so differs from the one whose norm was taken; `MOVED` says
by how much at most, and the norm's bound grows by it (gram.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .cuda_ops import ROWS as ROWS  # and torch.ops.clipwise
from .cuda_ops import longest as longest
from .static import is_static

Precision = Literal["exact", "bfloat16", "tf32"]

# Relative change of an entry of the factor that takes the weights, a little rounded up: 2⁻⁸ (rounded), 2⁻¹⁰ (cut).
MOVED: dict[Precision, float] = {"exact": 0.0, "bfloat16": 3.92e-3, "tf32": 9.8e-4}


def precision_of(left: Tensor, right: Tensor) -> Precision:
    """The fastest that loses nothing which the user's own products keep."""
    if left.device.type != "cuda" or left.dtype != right.dtype:
        return "exact"
    if left.dtype == torch.bfloat16:
        return "bfloat16"
    allowed = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if left.dtype == torch.float32 and allowed else "exact"


def cut(x: Tensor) -> Tensor:
    """To the 11 bits that TF32 keeps; NaN stays NaN.

    The last op is one on floats: of a view of integers a compiler makes a copy for every product.
    """
    return torch.where(x.isnan(), x, (x.view(torch.int32) & -(2**13)).view(torch.float32))


def cut_once(x: Tensor) -> Tensor:
    """The same from one use of x, which a compiler then need not write first. A NaN may become an infinity, as bad."""
    return (x.view(torch.int32) & -(2**13)).view(torch.float32).clamp(max=float("inf"))


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
    """[b, g, t, n] in rows that begin at multiples of `to`, padded with zeros if need be: others take slow ways."""
    b, g, t, n = x.shape
    rows = [x.stride(axis) for axis, size in ((0, b), (2, t)) if size > 1]
    apart = all(stride % to == 0 and stride >= n for stride in rows) and x.storage_offset() % to == 0
    if x.stride(3) == 1 and apart and (g == 1 or x.is_contiguous()):
        return x
    return F.pad(x, (0, -n % to)).contiguous()


def weighted_product(
    left: Tensor, right: Tensor, weights: Tensor, keep: Tensor, weigh_left: bool, precision: Precision
) -> Tensor:
    """Σ weights·leftᵀ @ right over rows [b·t, ·] of kept examples [b], on a GPU, in float32.

    One factor takes the weights, as narrow as the product takes it: MOVED covers that. The other one goes in as it
    lies; rows of dropped examples, which may hold NaN, are put aside while the product runs. It is the same one, of
    the same kernel, with or without them, so that what the others add up to does not change by a digit.
    """
    if precision == "exact":
        left, right = left.float(), right.float()
    left, right = (
        x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.clone(memory_format=torch.contiguous_format)
        for x in (left, right)
    )  # `contiguous` leaves an axis of one entry as it is
    found: Tensor = torch.ops.clipwise.weighted_product(left, right, weights.float(), ~keep, weigh_left, precision)
    return found


def has_kernel(x: Tensor) -> bool:
    """Sums of [b, t, p] over t have a kernel of their own."""
    return x.device.type == "cuda" and x.dtype != torch.float64 and x.dim() == 3 and x.shape[1] > 1


def column_sums(x: Tensor) -> Tensor:
    """[b, t, p] summed over t, in float32 or wider."""
    if has_kernel(x):
        found: Tensor = torch.ops.clipwise.column_sums(x if x.stride(2) == 1 else x.contiguous())
        return found
    return x.sum(1, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
