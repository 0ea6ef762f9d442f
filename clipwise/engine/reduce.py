"""From recorded uses to norms and weighted sums, the cheapest way for each parameter.

Two laws. Every norm is an upper bound of the norm of what `weighted_sum` really adds up, rounding and
underflow included; and it depends on the example alone, never on who else is in the batch: which way is
taken (its `Path`) is fixed once per parameter.

- A materialised gradient is summed as it stands, so only the rounding of its own sum of squares counts.
- The Gram form G = Σ_ts ⟨l_t, l_s⟩⟨r_t, r_s⟩ cancels. Its error is at most κ·u·ρ² with ρ = Σ_t ‖l_t‖‖r_t‖ and
  κ = p + d + 64 (chunks of 1024 count once), and the separate sum of t terms can be off by (t + 4)·u·ρ:
  n̂ = √(max(G, 0) + κ·u·ρ² + underflow) + (t + 4)·u·ρ. See docs/engine.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from .._types import sum_dtype, unit_roundoff
from .contributions import Contribution, Outer, Rows, Unfolded, materialise, merge_outer, merge_rows
from .products import SPLIT_ERROR, on_tensor_cores, product, split_product
from .static import is_static

_CHUNK = 64  # length of one float32 sum of squares: its error is at most 64·u
_SMALL = 2**15  # t·(p + d) of one example up to which float64 is cheap
_LONG = 1024  # inner products longer than this are cut


class Reduced(Protocol):
    """One parameter's gradient of every example, in whatever form is cheapest."""

    def squared_norms(self) -> Tensor:
        """An upper bound of the squared norm, float64, shape [b]."""

    def weighted_sum(self, weights: Tensor, keep: Tensor) -> Tensor:
        """Σ_i weights_i·g_i over the examples with keep_i; the others are not read, even if they hold NaN."""


@dataclass(frozen=True)
class Path:
    """How one parameter's gradients are reduced: fixed at its first use, so that no later batch can change it."""

    form: Literal["dense", "outer"]
    wide: bool  # outer: products and sums in float64
    single: bool = False  # outer: one position, so that n = ‖l‖‖r‖


Paths = dict[str, Path]


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Products as precise as their dtype: no autocast, no TF32, whatever the user has set for the model."""
    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda":
            yield
            return
        matmul: Any = torch.backends.cuda.matmul
        before = matmul.fp32_precision
        matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = before


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
    if x.device.type != "cpu" or is_static():
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
    squared: Tensor | None = None  # squared norms, where they are known already

    def _in_memory_order(self) -> tuple[Tensor, list[int]]:
        """The gradient with its axes as they lie in memory, and their order: flattening it copies nothing."""
        strides = self.grad.stride()
        order = sorted(range(1, self.grad.dim()), key=lambda axis: -strides[axis])
        return self.grad.permute(0, *order), order

    def squared_norms(self) -> Tensor:
        """Sums of squares."""
        return squares(self._in_memory_order()[0]) if self.squared is None else self.squared

    def weighted_sum(self, weights: Tensor, keep: Tensor) -> Tensor:
        """One matrix-vector product."""
        grad, order = self._in_memory_order()
        flat = _select(grad.reshape(len(grad), -1), keep, own=True)
        total = (torch.where(keep, weights, 0.0).to(flat.dtype) @ flat).reshape(grad.shape[1:])
        return total.permute([order.index(axis) for axis in range(1, grad.dim())])


@dataclass(frozen=True)
class OuterGrad:
    """Never materialised: norms from Gram products, the sum as one ordinary weight-gradient product."""

    uses: Outer
    shape: tuple[int, ...]
    wide: bool = False  # in float64
    single: bool = False  # ‖l‖‖r‖ while there is one position

    @property
    def dtype(self) -> torch.dtype:
        """Of products and sums."""
        return torch.float64 if self.wide or self.uses.left.dtype == torch.float64 else torch.float32

    def squared_norms(self) -> Tensor:
        """‖l‖²‖r‖² for one position, else the Gram form with its bound."""
        left, right = self.uses.left, self.uses.right
        if self.single and left.shape[2] == 1:
            lost = self.split * (2 + self.split)
            return (squares(left, 3) * squares(right, 3)).sum((1, 2)) * (1 + lost)
        return _bounded(*self.gram(), self.error, self.dtype, self.split)

    def gram(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """G, which may have cancelled, ρ, what underflow may have lost of G, and t; float64, all [b].

        t counts the positions that are not zero, so that padding does not change an example's norm.
        """
        size, _, _, p = self.uses.left.shape
        d, tiny = self.uses.right.shape[3], torch.finfo(self.dtype).tiny
        gram_left, gram_right = (_gram(x.flatten(0, 1), self.dtype) for x in (self.uses.left, self.uses.right))
        left, right = (  # norms of the positions [b, g·t], never below the truth
            (g.diagonal(dim1=1, dim2=2).double().clamp(min=0) * (1 + self.error) + k * tiny).sqrt().reshape(size, -1)
            for g, k in ((gram_left, p), (gram_right, d))
        )
        lost = tiny * (p * right.sum(1).square() + d * left.sum(1).square() + p * d * left.shape[1] ** 2 * tiny)
        total = (gram_left * gram_right).reshape(size, -1).sum(1, dtype=torch.float64)
        used = (gram_left.diagonal(dim1=1, dim2=2) != 0) & (gram_right.diagonal(dim1=1, dim2=2) != 0)
        return total, (left * right).sum(1), lost, used.reshape(size, -1).sum(1).double()

    @property
    def fast(self) -> bool:
        """Whether products run on tensor cores."""
        return self.dtype == torch.float32 and on_tensor_cores(self.uses.left) and on_tensor_cores(self.uses.right)

    @property
    def error(self) -> float:
        """κ·u; tensor cores cut where others round, which is twice as much."""
        p, d = self.uses.left.shape[3], self.uses.right.shape[3]
        return (2 if self.fast else 1) * (min(p, _LONG) + min(d, _LONG) + 64) * unit_roundoff(self.dtype)

    @property
    def split(self) -> float:
        """What halving a factor of the weighted sum loses, as a share of ρ."""
        return SPLIT_ERROR if self.fast else 0.0

    def weighted_sum(self, weights: Tensor, keep: Tensor) -> Tensor:
        """Weights on the smaller side, then one product over all examples and positions."""
        left, right = self.uses.left, self.uses.right
        if left.shape[3] <= right.shape[3]:
            left, right = _scaled(left.to(self.dtype), weights, keep), _select(right, keep)
        else:
            left, right = _select(left, keep), _scaled(right.to(self.dtype), weights, keep)
        if left.shape[1] == 1:
            left, right = left.flatten(0, 2), right.flatten(0, 2)  # [b·t, ·]
        else:
            left, right = left.transpose(0, 1).flatten(1, 2), right.transpose(0, 1).flatten(1, 2)  # [g, b·t, ·]
        if self.fast:
            return split_product(left, right).reshape(self.shape)
        return torch.matmul(left.mT.to(self.dtype), right.to(self.dtype)).reshape(self.shape)


def _gram(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x·xᵀ; long inner products in chunks that are added in float64, so that their error does not grow."""
    if x.shape[2] <= _LONG:
        return product(x, x.mT, dtype)
    parts = x.split(_LONG, dim=2)
    total = product(parts[0], parts[0].mT, dtype).double()
    for part in parts[1:]:
        total += product(part, part.mT, dtype)
    return total


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
        index, rows = self.rows.uses.index, self.rows.uses.rows.double()
        left, right = self.outer.uses.left[:, 0], self.outer.uses.right[:, 0].double()
        picked = left.gather(2, index[:, None, :].expand(-1, left.shape[1], -1)).double()  # [b, s, t]
        cross = (picked * torch.matmul(right, rows.mT)).sum((1, 2))
        gram, reach, lost, used = self.outer.gram()
        total = rows.square().sum((1, 2)) + gram + 2 * cross
        reach = reach + squares(self.rows.uses.rows, 2).sqrt().sum(1)
        used = used + (rows != 0).any(2).sum(1)
        precision = sum_dtype(self.outer.uses.left.dtype)
        return _bounded(total, reach, lost, used, self.outer.error, precision, self.outer.split)

    def weighted_sum(self, weights: Tensor, keep: Tensor) -> Tensor:
        """The two sums, added."""
        return self.outer.weighted_sum(weights, keep) + self.rows.weighted_sum(weights, keep)


def _bounded(
    gram: Tensor, reach: Tensor, lost: Tensor, positions: Tensor, error: float, dtype: torch.dtype, split: float = 0.0
) -> Tensor:
    """(√(max(G, 0) + κuρ² + underflow) + ((t + 4)·u + split)·ρ)²: NaN stays NaN, so that the example is dropped."""
    estimate = (gram.clamp(min=0) + error * reach.square() + lost).sqrt()
    return (estimate + ((positions + 4) * unit_roundoff(dtype) + split) * reach).square()


def choose_path(t: int, p: int, d: int, device: torch.device) -> Path:
    """From shapes alone, and once per parameter.

    Both forms need the 2tpd operations of the weight gradient; the Gram form takes 2t²(p + d) more. A materialised
    gradient has p·d entries to write and to read twice (about 10 operations each, on the machines tried), and many
    small products run at two thirds the speed of a large one (t more per entry). A gradient much larger than the
    activations is materialised only where t is very large.
    """
    wide = device.type == "cpu" and t * (p + d) <= _SMALL
    if t > 1 and (2 * t * t > p * d or (p * d <= 2 * t * (p + d) and p * d * (t + 10) < 2 * t * t * (p + d))):
        return Path("dense", wide)
    return Path("outer", wide and t > 1, t == 1)


def _sides(use: Outer | Unfolded) -> tuple[int, int, int, int]:
    """g, t, p, d."""
    _, g, t, p = use.left.shape
    return g, t, p, use.width if isinstance(use, Unfolded) else use.right.shape[3]


def reduce_uses(uses: Sequence[Contribution], shape: Sequence[int], name: str, paths: Paths) -> Reduced:
    """One `Reduced` for all uses of one parameter: uses are summed BEFORE the norm is taken."""
    shape = tuple(shape)
    products = [u for u in uses if isinstance(u, (Outer, Unfolded))]
    rows = [u for u in uses if isinstance(u, Rows)]
    sides = [_sides(u) for u in products]
    if len(products) + len(rows) == len(uses) and len({(g, p, d) for g, _, p, d in sides}) <= 1:
        if not products:
            return RowsGrad(merge_rows(rows), shape)
        groups, _, p, d = sides[0]
        if name not in paths:
            paths[name] = choose_path(sum(t for _, t, _, _ in sides), p, d, products[0].left.device)
        if paths[name].form == "outer" and (not rows or (groups == 1 and (p, d) == shape)):
            merged = merge_outer([u.outer() if isinstance(u, Unfolded) else u for u in products])
            grad = OuterGrad(merged, shape, paths[name].wide, paths[name].single)
            return TiedGrad(RowsGrad(merge_rows(rows), shape), grad) if rows else grad
    if len(uses) == 1 and isinstance(uses[0], Unfolded):
        seen: list[Tensor] = []
        total = materialise(uses[0], shape, lambda part: seen.append(squares(part)))
        return DenseGrad(total, torch.cat(seen))
    total = materialise(uses[0], shape)
    for use in uses[1:]:
        total = total + materialise(use, shape)
    return DenseGrad(total)
