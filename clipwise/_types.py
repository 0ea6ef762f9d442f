"""Types that several modules share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

Adjacency = Literal["add_or_remove_one", "replace_one"]
Engine = Literal["bookkeeping", "vmap"]
LossFn = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True)
class ClippedSum:
    """The clipped gradient sum of one batch, without noise: everything here but `sensitivity` is secret.

    Guarantee: adding or removing one example changes `grads`, taken as one long vector, by at most
    `sensitivity` in Euclidean norm, whatever the example holds (see docs/engine.md for rounding).

    Attributes:
        grads: parameter name to Σ_i w_i·g_i, in float32 or wider.
        norms: an upper bound of every example's gradient norm, shape [b]; [b, layers] under PerLayer.
        sensitivity: the bound on one example's influence; what noise must be scaled by.
        losses: the per-example losses, shape [b].
    """

    grads: Mapping[str, Tensor]
    norms: Tensor
    sensitivity: float
    losses: Tensor


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of gradients of `dtype` are kept in: float32 or wider.

    >>> sum_dtype(torch.bfloat16), sum_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def unit_roundoff(dtype: torch.dtype) -> float:
    """The largest relative error of one correctly rounded operation in `dtype`."""
    return float(torch.finfo(dtype).eps) / 2


def largest_batch(expected: float) -> float:
    """A Poisson batch is larger than this with probability below 1e-15. Public."""
    return 1.5 * expected + 64


ROUNDINGS = 4  # how far, in units of u, one more example moves what another one contributes, by rounding alone
CHAIN = 2**15  # and, on a GPU, the whole sum: tensor cores cut off some of it in each addition
