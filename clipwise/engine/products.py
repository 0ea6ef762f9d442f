"""Matrix products as exact as float32, by the fastest way that the device has.

On a GPU, products of bfloat16 tensors run on tensor cores: the products themselves are exact in float32, and sums are
kept in float32. A float32 factor is split into two bfloat16 ones first, which keeps 16 of its bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

SPLIT_ERROR = 2.0**-16  # of a factor in two halves: each keeps eight bits


def on_tensor_cores(x: Tensor) -> bool:
    """Whether products of such tensors are taken as they are, with sums in float32."""
    return x.device.type == "cuda" and x.dtype == torch.bfloat16


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Left @ right (three axes each, or two) in `dtype`, float32 or wider."""
    if dtype == torch.float32 and on_tensor_cores(left) and on_tensor_cores(right):
        return (torch.mm if left.dim() == 2 else torch.bmm)(left, right, out_dtype=torch.float32)
    return torch.matmul(left.to(dtype), right.to(dtype))


def split_product(left: Tensor, right: Tensor) -> Tensor:
    """leftᵀ @ right where one is float32 and the other bfloat16, on tensor cores: the float32 one in two halves."""
    total: Tensor | None = None
    for part in _halves(left) if left.dtype == torch.float32 else _halves(right):
        a, b = (part, right) if left.dtype == torch.float32 else (left, part)
        found = product(a.mT, b, torch.float32)
        total = found if total is None else total + found
    assert total is not None
    return total


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    high = x.bfloat16()
    return high, (x - high.float()).bfloat16()
