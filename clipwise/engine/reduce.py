"""From recorded uses to norms and weighted sums, the cheapest exact way for each parameter.

Every norm is an upper bound of the norm of what `weighted_sum` really adds up, rounding included:

- a materialised gradient is summed as it stands, so only the rounding of its own sum of squares counts;
- the Gram form n² = Σ_ts ⟨l_t, l_s⟩⟨r_t, r_s⟩ cancels, so its error is bounded by κ·u·ρ² with
  ρ = Σ_t ‖l_t‖‖r_t‖ (κ = p + d + 64: the inner products, then a pairwise sum), and the sum that is formed
  apart from it can be off by a few roundings of ρ:  n̂ = √(max(G, 0) + κ·u·ρ²) + 4·u_sum·ρ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .._types import sum_dtype, unit_roundoff
from .contributions import Contribution, Outer, Rows, Unfolded, materialise, merge_outer, merge_rows

_CHUNK = 64  # length of one float32 sum of squares: its error is at most 64·u
_SMALL = 2**18  # entries up to which float64 products take no time
_SUM_ROUNDINGS = 4  # ‖rounding of the weighted sum of one example‖ / (u·ρ), see docs/engine.md


class Reduced(Protocol):
    """One parameter's gradient of every example, in whatever form is cheapest."""

    def squared_norms(self) -> Tensor:
        """An upper bound of the squared norm, float64, shape [b]."""

    def weighted_sum(self, weights: Tensor, keep: Tensor) -> Tensor:
        """Σ_i weights_i·g_i over the examples with keep_i; the others are not read, even if they hold NaN."""


def product_dtype(device: torch.device, entries: int) -> torch.dtype:
    """The dtype of Gram products: float64 where that costs next to nothing, else float32 with its wider bound."""
    return torch.float64 if device.type == "cpu" and entries <= _SMALL else torch.float32


def product_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """U of the products, which is that of TF32 where torch may use it."""
    if device.type == "cuda" and dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return 2.0**-11
    return unit_roundoff(dtype)


def squares(x: Tensor, keep_dims: int = 1) -> Tensor:
    """An upper bound of Σ x² over all but the first `keep_dims` axes, in float64.

    Sums of squares do not cancel. Short chunks in float32, their total in float64; `tiny` covers squares
    that underflow, without which a large vector of tiny numbers would pass for zero.
    """
    wide = x.to(sum_dtype(x.dtype)).flatten(keep_dims) if x.dim() > keep_dims else x.to(sum_dtype(x.dtype))[..., None]
    info = torch.finfo(wide.dtype)
    length = wide.shape[-1]
    whole = length - length % _CHUNK
    parts = []
    if whole:
        parts.append(torch.linalg.vector_norm(wide[..., :whole].unflatten(-1, (-1, _CHUNK)), dim=-1))
    if whole < length:
        parts.append(torch.linalg.vector_norm(wide[..., whole:], dim=-1, keepdim=True))
    norms = torch.cat(parts, dim=-1).double() if parts else wide.double()
    return norms.square().sum(-1) * (1 + (_CHUNK / 2 + 4) * info.eps) + length * info.tiny


def _select(x: Tensor, keep: Tensor, own: bool = False) -> Tensor:
    """Rows outside `keep` set to 0, by selection: 0·inf and 0·NaN are NaN. In place if the tensor is our own.

    On the CPU filling the few such rows is far faster than `where`.
    """
    if x.device.type != "cpu":
        return torch.where(keep.reshape(-1, *(1,) * (x.dim() - 1)), x, torch.zeros((), dtype=x.dtype, device=x.device))
    dropped = (~keep).nonzero()[:, 0]
    if not len(dropped):
        return x
    return x.index_fill_(0, dropped, 0) if own else x.index_fill(0, dropped, 0)


def _scaled(x: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
    return _select(x * weights.to(x.dtype).reshape(-1, *(1,) * (x.dim() - 1)), keep, own=True)


@dataclass(frozen=True)
class DenseGrad:
    """Materialised: the norm is that of the very numbers that are summed."""

    grad: Tensor  # [b, *shape]

    def squared_norms(self) -> Tensor:
        """Sums of squares."""
        return squares(self.grad)

    def weighted_sum(self, weights: Tensor, keep: Tensor) -> Tensor:
        """One matrix-vector product."""
        flat = _select(self.grad.reshape(len(self.grad), -1), keep, own=True)
        return (torch.where(keep, weights, 0.0).to(flat.dtype) @ flat).reshape(self.grad.shape[1:])


@dataclass(frozen=True)
class OuterGrad:
    """Never materialised: norms from Gram products, the sum as one ordinary weight-gradient product."""

    uses: Outer
    shape: tuple[int, ...]
    products: torch.dtype | None = None  # of Gram products; chosen from the device unless a test says

    def squared_norms(self) -> Tensor:
        """‖l‖²‖r‖² for one position, else the Gram form with its bound."""
        left, right = self.uses.left, self.uses.right
        if left.shape[2] == 1:
            return (squares(left, 3) * squares(right, 3)).sum((1, 2))
        gram, reach = self.gram()
        return _bounded(gram, reach, self._error(), sum_dtype(left.dtype))

    def gram(self) -> tuple[Tensor, Tensor]:
        """Σ_ts ⟨l_t, l_s⟩⟨r_t, r_s⟩, which may have cancelled, and ρ; both [b]."""
        dtype = self._products()
        size = self.uses.left.shape[0]
        left, right = self.uses.left.to(dtype).flatten(0, 1), self.uses.right.to(dtype).flatten(0, 1)  # [b·g, t, ·]
        gram_left, gram_right = torch.bmm(left, left.mT), torch.bmm(right, right.mT)
        diagonal = gram_left.diagonal(dim1=1, dim2=2) * gram_right.diagonal(dim1=1, dim2=2)
        reach = diagonal.double().clamp(min=0).sqrt().reshape(size, -1).sum(1) * (1 + self._error())
        return (gram_left * gram_right).reshape(size, -1).sum(1, dtype=torch.float64), reach

    def _products(self) -> torch.dtype:
        if self.uses.left.dtype == torch.float64:
            return torch.float64
        return self.products or product_dtype(self.uses.left.device, self.uses.left.numel() + self.uses.right.numel())

    def _error(self) -> float:
        kappa = self.uses.left.shape[3] + self.uses.right.shape[3] + 64
        return kappa * product_roundoff(self._products(), self.uses.left.device)

    def weighted_sum(self, weights: Tensor, keep: Tensor) -> Tensor:
        """Weights on the smaller side, then one product over all examples and positions."""
        dtype = sum_dtype(self.uses.left.dtype)
        left, right = self.uses.left.to(dtype), self.uses.right.to(dtype)
        if left.shape[3] <= right.shape[3]:
            left, right = _scaled(left, weights, keep), _select(right, keep)
        else:
            left, right = _select(left, keep), _scaled(right, weights, keep)
        if left.shape[1] == 1:
            return (left.flatten(0, 2).T @ right.flatten(0, 2)).reshape(self.shape)
        left, right = left.transpose(0, 1).flatten(1, 2), right.transpose(0, 1).flatten(1, 2)  # [g, b·t, ·]
        return torch.matmul(left.mT, right).reshape(self.shape)


@dataclass(frozen=True)
class RowsGrad:
    """An embedding table: at most t rows of it per example."""

    uses: Rows  # merged: no two non-zero rows of an example share an index
    shape: tuple[int, ...]

    def squared_norms(self) -> Tensor:
        """Rows of one example are distinct, so their squares add up."""
        return squares(self.uses.rows)

    def weighted_sum(self, weights: Tensor, keep: Tensor) -> Tensor:
        """Scatter the weighted rows."""
        rows = _scaled(self.uses.rows, weights, keep)
        table = rows.new_zeros(self.shape)
        return table.index_add_(0, self.uses.index.flatten(), rows.flatten(0, 1))


@dataclass(frozen=True)
class TiedGrad:
    """A table that is also a linear weight: one gradient, with the cross terms of its two kinds of use."""

    rows: RowsGrad
    outer: OuterGrad  # left on the table's rows, right on its columns

    def squared_norms(self) -> Tensor:
        """‖E‖² + ‖H‖² + 2⟨E, H⟩, with ⟨E, H⟩ = Σ_ts left_s[index_t]·⟨rows_t, right_s⟩."""
        dtype = self.outer._products()
        index, rows = self.rows.uses.index, self.rows.uses.rows.to(dtype)
        left, right = self.outer.uses.left[:, 0].to(dtype), self.outer.uses.right[:, 0].to(dtype)
        picked = left.gather(2, index[:, None, :].expand(-1, left.shape[1], -1))  # [b, s, t]
        cross = (picked * torch.matmul(right, rows.mT)).sum((1, 2), dtype=torch.float64)
        gram, reach = self.outer.gram()
        total = rows.double().square().sum((1, 2)) + gram + 2 * cross
        reach = reach + squares(self.rows.uses.rows, 2).sqrt().sum(1)
        return _bounded(total, reach, self.outer._error(), sum_dtype(left.dtype))

    def weighted_sum(self, weights: Tensor, keep: Tensor) -> Tensor:
        """The two sums, added."""
        return self.rows.weighted_sum(weights, keep) + self.outer.weighted_sum(weights, keep)


def _bounded(gram: Tensor, reach: Tensor, error: float, dtype: torch.dtype) -> Tensor:
    """(√(max(G, 0) + κuρ²) + 4·u_sum·ρ)²: NaN stays NaN, so that the example is dropped."""
    estimate = (gram.clamp(min=0) + error * reach.square()).sqrt()
    return (estimate + _SUM_ROUNDINGS * unit_roundoff(dtype) * reach).square() + torch.finfo(dtype).tiny


def _materialise_is_cheaper(t: int, p: int, d: int) -> bool:
    """Per example: 2t²(p + d) operations for the Gram form against p·d entries to write and to read twice.

    Both need the 2tpd of the weight gradient. An entry's traffic costs as much as about 40 operations on the
    machines tried. A gradient much larger than the activations is materialised only where t is very large.
    """
    if t == 1:
        return False
    if 2 * t * t > p * d:
        return True
    return p * d <= 2 * t * (p + d) and 40 * p * d < 2 * t * t * (p + d)


def _sides(use: Outer | Unfolded) -> tuple[int, int, int, int]:
    """g, t, p, d."""
    _, g, t, p = use.left.shape
    return g, t, p, use.width if isinstance(use, Unfolded) else use.right.shape[3]


def reduce_uses(uses: Sequence[Contribution], shape: Sequence[int]) -> Reduced:
    """One `Reduced` for all uses of one parameter: uses are summed BEFORE the norm is taken."""
    shape = tuple(shape)
    products = [u for u in uses if isinstance(u, (Outer, Unfolded))]
    rows = [u for u in uses if isinstance(u, Rows)]
    sides = [_sides(u) for u in products]
    if len(products) + len(rows) == len(uses) and len({(g, p, d) for g, _, p, d in sides}) <= 1:
        if not products:
            return RowsGrad(merge_rows(rows), shape)
        groups, _, p, d = sides[0]
        positions = sum(t for _, t, _, _ in sides)
        if not _materialise_is_cheaper(positions, p, d) and (groups == 1 or not rows):
            merged = merge_outer([u.outer() if isinstance(u, Unfolded) else u for u in products])
            grad = OuterGrad(merged, shape)
            return TiedGrad(RowsGrad(merge_rows(rows), shape), grad) if rows else grad
    total = materialise(uses[0], shape)
    for use in uses[1:]:
        total = total + materialise(use, shape)
    return DenseGrad(total)
