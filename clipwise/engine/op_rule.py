"""What a rule is, and what it sees: one call of one op."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .._types import sum_dtype
from ..errors import UnsupportedOp
from .contributions import Contribution
from .products import column_sums


@dataclass(frozen=True)
class Call:
    """One recorded call: the op's name, its arguments by name, which of them are trained, and b."""

    op: str
    values: Mapping[str, Any]
    trained: frozenset[str]
    size: int

    def batch_major(self, x: Tensor, features: int) -> Tensor:
        """View [b·k, …, *features] as [b, t, *features]."""
        if x.dim() <= features or x.shape[0] % self.size:
            raise UnsupportedOp(
                f"{self.op}: an input of {x.dim()} axes does not have the examples as its first axis, so "
                "per-example gradients cannot be told apart. Keep the batch axis first."
            )
        shape = x.shape[x.dim() - features :]
        return x.reshape(self.size, -1, *shape)


Uses = Iterator[tuple[str, Contribution]]


@dataclass(frozen=True)
class OpRule:
    """A rule for one op. `check_op_rule` compares it with brute force.

    Attributes:
        arguments: the op's argument names, in order.
        parameters: those that may be trained; every other must not depend on a trained parameter alone.
        keep: the arguments that `uses` reads later; their tensors must not change in place.
        uses: yields (argument name, Contribution) for the trained arguments of a call.
        check: refuses calls that the rule cannot take.
    """

    arguments: tuple[str, ...]
    parameters: frozenset[str]
    keep: frozenset[str]
    uses: Callable[[Call, Tensor], Uses]
    check: Callable[[Call], None] = lambda call: None


def total_of(x: Tensor, axes: tuple[int, ...] = (1,)) -> Tensor:
    """A sum that half precision cannot overflow."""
    return column_sums(x) if axes == (1,) and x.dim() == 3 else x.sum(axes, dtype=sum_dtype(x.dtype))


def per_channel(call: Call, x: Tensor) -> Tensor:
    """[b·k, c, …] summed to [b, c]."""
    return total_of(x.reshape(call.size, -1, x.shape[1], math.prod(x.shape[2:])), (1, 3))
