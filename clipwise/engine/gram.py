"""Norms of Σ_t l_t ⊗ r_t without making it: from inner products of positions, as an upper bound.

G = Σ_ts ⟨l_t, l_s⟩⟨r_t, r_s⟩ cancels. Its error is at most κ·u·ρ² with ρ = Σ_t ‖l_t‖‖r_t‖ and κ = p + d + 64 (chunks of
1024 count once), and the separate sum of t terms can be off by (t + 4)·u·ρ. A factor L that is rounded when it takes
its weight (relative error e: products.py) moves the sum by at most e·‖L‖_F‖R‖₂, and by e·ρ; a largest singular value
is at most (Σ_ts ⟨r_t, r_s⟩²)^¼.

    n̂ = √(max(G, 0) + κ·u·ρ² + underflow) + (t + 4)·u·ρ + rounded        (docs/engine.md)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import native
from .._types import unit_roundoff
from .contributions import Outer
from .products import MOVED, Precision, product
from .static import is_static

LONG = 1024  # inner products longer than this are cut
_STRIP = 128  # positions that meet those after them at once, on a CPU: fewer make products slow
_FEW = 8  # positions, up to which plain products are as good as the fused kernel


@dataclass(frozen=True)
class Gram:
    """What a norm needs to know of an Outer, float64."""

    total: Tensor  # [b]: G, which may have cancelled
    left: Tensor  # [b, g, t]: ‖l_t‖, never below the truth
    right: Tensor  # [b, g, t]: ‖r_t‖
    lost: Tensor  # [b]: what underflow may have taken from G
    used: Tensor  # [b]: positions that are not zero, so that padding does not change an example's norm
    error: float  # κ·u
    unit: float  # u of the sum
    rounded: Tensor | float  # [b]: what rounding of factors can add to the norm

    @property
    def reach(self) -> Tensor:
        """ρ."""
        return (self.left * self.right).sum((1, 2))

    def bound(self, more: Sequence[Tensor | float] = (0.0, 0.0, 0.0)) -> Tensor:
        """n̂², with `more` added to G, ρ and the positions. NaN stays NaN, so that the example is dropped."""
        total, reach, used = (own + other for own, other in zip((self.total, self.reach, self.used), more, strict=True))
        estimate = (total.clamp(min=0) + self.error * reach.square() + self.lost).sqrt()
        return (estimate + (used + 4) * self.unit * reach + self.rounded).square()


def is_fused(uses: Outer, precision: Precision) -> bool:
    """Whether a kernel does it in one piece."""
    return precision != "exact" and uses.left.device.type == "cuda" and uses.left.shape[2] > _FEW


def errors(
    sides: tuple[int, int], dtype: torch.dtype, precision: Precision, weigh_left: bool
) -> tuple[float, float, float, float]:
    """κ·u, u, and how far the entries of left and right may move."""
    p, d = sides
    unit = (1 if precision == "exact" else 2) * unit_roundoff(dtype)  # tensor cores cut where others round
    error = (min(p, LONG) + min(d, LONG) + p // LONG + d // LONG + 64) * unit
    return error, unit, *((MOVED[precision], 0.0) if weigh_left else (0.0, MOVED[precision]))


def gram_bounds(uses: Sequence[Outer], precisions: Sequence[Precision], more: Tensor) -> Tensor:
    """`gram(…).bound(more)` of several, those for which `is_fused`, as rows; `more` is [n, 3, b], float64."""
    all_errors: list[float] = []
    for use, precision in zip(uses, precisions, strict=True):
        sides = (use.left.shape[3], use.right.shape[3])
        all_errors += errors(sides, torch.float32, precision, sides[0] <= sides[1])
    lefts, rights = [use.left for use in uses], [use.right for use in uses]
    found: Tensor = torch.ops.clipwise.gram_bounds(lefts, rights, more, [p == "tf32" for p in precisions], all_errors)
    return found


def gram(uses: Outer, dtype: torch.dtype, precision: Precision, sums: torch.dtype | None = None) -> Gram:
    """Of inner products in `dtype`, for a sum in `sums` (the same if not given); fused where there is a kernel."""
    left, right = uses.left, uses.right
    size, groups, t, p = left.shape
    sides = (p, right.shape[3])
    if precision == "exact":
        natively = dtype == torch.float32 and left.device.type == "cpu" and native.has_gram()
        return (_natively if natively else _by_strips)(left, right, dtype, sums or dtype)
    if not is_fused(uses, precision):
        products = [
            inner_products(x.flatten(0, 1), dtype, precision).reshape(size, groups, t, t) for x in (left, right)
        ]
        return gram_of(products, sides, dtype, precision, p <= sides[1], sums)
    found, squares = torch.ops.clipwise.gram(left, right, precision == "tf32")
    total, *spreads = found.reshape(3, size, groups).unbind(0)
    return _gram(total, squares.unbind(0), spreads, sides, dtype, errors(sides, dtype, precision, p <= sides[1]))


def _natively(left: Tensor, right: Tensor, dtype: torch.dtype, sums: torch.dtype) -> Gram:
    """One op, which makes half of the symmetric products and keeps none."""
    sums_of = torch.ops.clipwise.native_gram if is_static() else native.gram_sums
    total, squares = sums_of(left.to(dtype), right.to(dtype))
    sides = (left.shape[3], right.shape[3])
    return _gram(total, squares.unbind(0), [], sides, sums, _known(sides, dtype, sums))


def _known(sides: tuple[int, int], dtype: torch.dtype, sums: torch.dtype) -> tuple[float, float, float, float]:
    """κ·u of the products, u of the sum."""
    error, unit, *_ = errors(sides, dtype, "exact", sides[0] <= sides[1])
    return error, unit if sums == dtype else unit_roundoff(sums), 0.0, 0.0


def _by_strips(left: Tensor, right: Tensor, dtype: torch.dtype, sums: torch.dtype) -> Gram:
    """Inner products are symmetric: a strip of positions meets only itself and those that come after it."""
    size, groups, t, p = left.shape
    d = right.shape[3]
    strip = _STRIP if left.device.type == "cpu" else max(t, 1)
    total: Tensor | float = 0.0
    diagonals: tuple[list[Tensor], list[Tensor]] = ([], [])
    for first in range(0, max(t, 1), strip):
        own, seen = (inner_products(x[:, :, first:].flatten(0, 1), dtype, "exact", strip) for x in (left, right))
        both = own * seen
        total += both.sum((1, 2), dtype=torch.float64) + both[:, :, strip:].sum((1, 2), dtype=torch.float64)
        for found, x in zip(diagonals, (own, seen), strict=True):
            found.append(x.diagonal(dim1=1, dim2=2).reshape(size, groups, -1))
    assert isinstance(total, Tensor)
    squares = [torch.cat(x, dim=2) for x in diagonals]
    known = _known((p, d), dtype, sums)  # what underflows in the sum is lost, too
    return _gram(total.reshape(size, groups), squares, [], (p, d), sums, known)


def gram_of(
    products: Sequence[Tensor],
    sides: tuple[int, int],
    dtype: torch.dtype,
    precision: Precision,
    weigh_left: bool,
    sums: torch.dtype | None = None,
) -> Gram:
    """From the inner products of positions [b, g, t, t], left and right."""
    sums = sums or dtype
    error, *rest = errors(sides, dtype, precision, weigh_left)
    known = (error, rest[0] if sums == dtype else unit_roundoff(sums), rest[1], rest[2])
    total = (products[0] * products[1]).sum((2, 3), dtype=torch.float64)
    diagonals = [x.diagonal(dim1=2, dim2=3) for x in products]
    spreads = [x.double().square().sum((2, 3)) for x in products] if any(known[2:]) else []
    return _gram(total, diagonals, spreads, sides, sums, known)  # what underflows in the sum is lost as well


def _gram(
    total: Tensor,
    diagonals: Sequence[Tensor],
    spreads: Sequence[Tensor],
    sides: tuple[int, int],
    dtype: torch.dtype,
    errors: tuple[float, float, float, float],
) -> Gram:
    (p, d), tiny, (error, unit, *moved) = sides, torch.finfo(dtype).tiny, errors
    _, groups, t = diagonals[0].shape
    norms = [(x.double().clamp(min=0) * (1 + error) + k * tiny).sqrt() for x, k in zip(diagonals, (p, d), strict=True)]
    lost = tiny * (
        p * norms[1].sum((1, 2)).square() + d * norms[0].sum((1, 2)).square() + p * d * (groups * t) ** 2 * tiny
    )
    used = ((diagonals[0] != 0) & (diagonals[1] != 0)).sum((1, 2)).double()
    rounded = _moved(norms, spreads, error, moved) if any(moved) else 0.0
    return Gram(total.sum(1), norms[0], norms[1], lost, used, error, unit, rounded)


def _moved(norms: Sequence[Tensor], spreads: Sequence[Tensor], error: float, moved: Sequence[float]) -> Tensor:
    """How far the product moves [b] if every entry of one factor does by so much of its own size at most."""
    first, second = (0, 1) if moved[0] else (1, 0)
    whole, other = (norms[i].square().sum(2).sqrt() for i in (first, second))  # ‖·‖_F, [b, g]
    largest = (spreads[second].sqrt() + error * other.square()).sqrt()  # ‖·‖₂
    return max(moved) * torch.minimum((whole * largest).sum(1), (norms[0] * norms[1]).sum((1, 2)))


def inner_products(x: Tensor, dtype: torch.dtype, precision: Precision, rows: int | None = None) -> Tensor:
    """x·xᵀ, or its first rows; long inner products in chunks that are added in float64: their error does not grow."""
    if x.shape[2] <= LONG:
        return product(x[:, :rows], x.mT, dtype, precision)
    parts = x.split(LONG, dim=2)
    total = product(parts[0][:, :rows], parts[0].mT, dtype, precision).double()
    for part in parts[1:]:
        total += product(part[:, :rows], part.mT, dtype, precision)
    return total
