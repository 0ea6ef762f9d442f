"""The three forms in which one use of a parameter gives its per-example gradient.

Shape letters: b examples, g groups, t positions, p and d the two sides of a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._types import sum_dtype


@dataclass(frozen=True)
class Dense:
    """The per-example gradient itself."""

    grad: Tensor  # [b, *shape]


@dataclass(frozen=True)
class Outer:
    """Σ_t left_t ⊗ right_t in every group: the gradient of a weight of shape [g·p, d] (or any reshape of it)."""

    left: Tensor  # [b, g, t, p]
    right: Tensor  # [b, g, t, d]

    def swapped(self) -> Outer:
        """The same gradient of the transposed weight."""
        return Outer(self.right, self.left)


@dataclass(frozen=True)
class Rows:
    """rows_t added to row index_t: the gradient of an embedding table."""

    index: Tensor  # [b, t], int64
    rows: Tensor  # [b, t, d]


Contribution = Dense | Outer | Rows


def materialise(use: Contribution, shape: Sequence[int]) -> Tensor:
    """The per-example gradient [b, *shape] of one use, in float32 or wider."""
    if isinstance(use, Dense):
        return _wide(use.grad).reshape(-1, *shape)
    if isinstance(use, Outer):
        grad = torch.matmul(_wide(use.left).mT, _wide(use.right))
        return grad.reshape(-1, *shape)
    size, positions = use.index.shape
    rows = _wide(use.rows).reshape(size * positions, -1)
    offset = torch.arange(size, device=rows.device)[:, None] * shape[0]
    table = rows.new_zeros(size * shape[0], rows.shape[1])
    return table.index_add_(0, (use.index + offset).flatten(), rows).reshape(size, *shape)


def merge_outer(uses: Sequence[Outer]) -> Outer:
    """Several uses of one weight are one gradient: positions side by side."""
    if len(uses) == 1:
        return uses[0]
    return Outer(torch.cat([u.left for u in uses], dim=2), torch.cat([u.right for u in uses], dim=2))


def merge_rows(uses: Sequence[Rows]) -> Rows:
    """Join the uses of a table and add up the rows that one example hits more than once.

    The sum sits at the first position of each index; the later ones are zero. So no two non-zero rows of
    an example share an index, and norms need no cross terms.
    """
    index = torch.cat([u.index for u in uses], dim=1)
    rows = torch.cat([_wide(u.rows) for u in uses], dim=1)
    size, positions, width = rows.shape
    first = (index[:, :, None] == index[:, None, :]).to(torch.uint8).argmax(dim=2)
    flat = (first + torch.arange(size, device=index.device)[:, None] * positions).flatten()
    joined = torch.zeros_like(rows).reshape(size * positions, width).index_add_(0, flat, rows.flatten(0, 1))
    return Rows(index, joined.reshape(size, positions, width))


def _wide(x: Tensor) -> Tensor:
    return x.to(sum_dtype(x.dtype))
