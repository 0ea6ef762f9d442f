"""From recorded uses to norms and weighted sums, the cheapest way for each parameter.

Two laws. Every norm is an upper bound of the norm of what `weighted_sum` really adds up, rounding and
underflow included; and it depends on the example alone, never on who else is in the batch: which way is
taken (its `Path`) is fixed once per parameter.

- A materialised gradient is summed as it stands, so only the rounding of its own sum of squares counts.
- Otherwise the norm comes from the Gram form and its bound (gram.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from .. import native
from .._types import sum_dtype
from .contributions import (
    Contribution,
    Outer,
    Rows,
    Unfolded,
    Window,
    as_multiplied,
    is_native,
    materialise,
    merge_outer,
    merge_rows,
)
from .gram import Gram, gram, gram_bounds, is_fused
from .patches import PatchGrad, example_gradients
from .products import MOVED, ROWS, Precision, aligned, cut, longest, precision_of, product, select, weighted_product
from .static import is_static

_CHUNK = 128  # length of one float32 sum of squares: its error is at most 128·u
_SMALL = 2**13  # t·(p + d) of one example up to which float64 is cheap
_FEW = 2**13  # entries of one example's gradient up to which it is put beside others


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
    wide: bool  # outer: inner products in float64
    single: bool = False  # outer: one position, so that n = ‖l‖‖r‖


Paths = dict[str, Path]


def squares(x: Tensor, keep_dims: int = 1) -> Tensor:
    """An upper bound of Σ x² over all but the first `keep_dims` axes, in float64.

    Sums of squares do not cancel. Short chunks in float32, their total in float64; `tiny` covers squares
    that underflow, without which a large vector of tiny numbers would pass for zero.
    """
    wide = x.to(sum_dtype(x.dtype)).flatten(keep_dims) if x.dim() > keep_dims else x.to(sum_dtype(x.dtype))[..., None]
    length = wide.shape[-1]
    if wide.device.type == "cuda" and wide.dtype == torch.float32 and wide.dim() == 2 and length > _FEW:
        total: Tensor = torch.ops.clipwise.squares(wide if wide.stride(1) == 1 else wide.contiguous(), _CHUNK)
        return _with_room(total, length, wide.dtype)
    whole = length - length % _CHUNK
    parts = []
    if whole:
        parts.append(torch.linalg.vector_norm(wide[..., :whole].unflatten(-1, (-1, _CHUNK)), dim=-1))
    if whole < length:
        parts.append(torch.linalg.vector_norm(wide[..., whole:], dim=-1, keepdim=True))
    norms = torch.cat(parts, dim=-1).double() if parts else wide.double()
    return _with_room(norms.square().sum(-1), length, wide.dtype)


def _with_room(total: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """For the rounding of a sum of squares, and for their underflow."""
    info = torch.finfo(dtype)
    return total * (1 + (_CHUNK / 2 + 4) * info.eps) + length * info.tiny


def _squared(grad: Tensor, known: Tensor | None) -> Tensor:
    """The bound from sums of squares in float64, if there are some."""
    return squares(grad) if known is None else _with_room(known, math.prod(grad.shape[1:]), grad.dtype)


def _scaled(x: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
    return select(x * weights.to(x.dtype).reshape(-1, *(1,) * (x.dim() - 1)), keep, own=True)


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
        flat = grad.reshape(len(grad), -1)
        if flat.device.type == "cuda" and flat.dtype == torch.float32:
            total: Tensor = torch.ops.clipwise.weighted_rows(flat.contiguous(), weights.float(), keep)
        else:
            kept = torch.where(keep, weights, 0.0).to(flat.dtype)
            total = product(kept[None], select(flat, keep, own=True), flat.dtype)[0]
        return total.reshape(grad.shape[1:]).permute([order.index(axis) for axis in range(1, grad.dim())])


def is_small(grad: Reduced | None) -> bool:
    """Biases and scales: less work than starting it."""
    return isinstance(grad, DenseGrad) and grad.squared is None and grad.grad[0].numel() <= _FEW


def small(grads: Sequence[Reduced | None]) -> list[list[DenseGrad]]:
    """The small ones, those of one device and dtype together."""
    kinds: dict[object, list[DenseGrad]] = {}
    for grad in grads:
        if is_small(grad):
            assert isinstance(grad, DenseGrad)
            kinds.setdefault((grad.grad.device, grad.grad.dtype), []).append(grad)
    return list(kinds.values())


def join(grads: Sequence[DenseGrad]) -> DenseGrad:
    """Side by side, each flat."""
    flat = [grad.grad.reshape(len(grad.grad), grad.grad[0].numel()) for grad in grads]
    if flat[0].device.type == "cuda":  # one kernel, where a compiler makes one for each
        return DenseGrad(torch.ops.clipwise.cat(flat))
    return DenseGrad(torch.cat(flat, dim=1))


@dataclass(frozen=True)
class OuterGrad:
    """Never materialised: norms from Gram products, the sum as one ordinary weight-gradient product."""

    uses: Outer
    shape: tuple[int, ...]
    wide: bool = False  # inner products in float64
    single: bool = False  # ‖l‖‖r‖ while there is one position
    precision: Precision = "exact"

    @property
    def dtype(self) -> torch.dtype:
        """Of the sum."""
        return torch.float64 if self.uses.left.dtype == torch.float64 else torch.float32

    def squared_norms(self) -> Tensor:
        """‖l‖²‖r‖² for one position, else the Gram form with its bound."""
        if not self.single:
            return self.gram().bound()
        left, right = self.uses.left, self.uses.right
        product_of_norms = squares(left, 3) * squares(right, 3)  # [b, g, t]
        one = product_of_norms.sum((1, 2)) * (1 + MOVED[self.precision]) ** 2
        if left.shape[2] == 1:
            return one
        used = ((left != 0).any(3) & (right != 0).any(3)).any(1).sum(1)  # a longer example must not change the others
        return torch.where(used <= 1, one, self.gram().bound())

    def gram(self) -> Gram:
        """What the norm is made of."""
        return gram(self.uses, torch.float64 if self.wide else self.dtype, self.precision, self.dtype)

    def weighted_sum(self, weights: Tensor, keep: Tensor) -> Tensor:
        """Weights on the smaller side, then one product over all examples and positions, or a few of limited length."""
        left, right = self.uses.left, self.uses.right
        if left.shape[1] == 1 and left.device.type == "cuda" and self.dtype == torch.float32:
            both = (left.flatten(0, 2), right.flatten(0, 2))
            total = weighted_product(*both, weights, keep, self.weighs_left, self.precision)
        elif is_native(left):
            summed = torch.ops.clipwise.native_sum if is_static() else native.weighted_sum
            total = summed(left.float(), right.float(), weights.float(), keep, self.weighs_left)
        else:
            left, right = (
                self._weighted(x, weights, keep) if weighs else select(x, keep)
                for x, weighs in ((left, self.weighs_left), (right, not self.weighs_left))
            )
            rows = ROWS[self.precision] if left.device.type == "cpu" else longest(self.precision, left.shape[2])
            left, right = _all_rows(left), _all_rows(right)
            parts = zip(*(x.split(rows, dim=-2) for x in (left, right)), strict=True)
            total = functools.reduce(torch.add, (product(a.mT, b, self.dtype, self.precision) for a, b in parts))
        p, d = self.uses.size
        return total[..., :p, :d].reshape(self.shape)

    @property
    def weighs_left(self) -> bool:
        """The smaller factor takes the weights, as it lies in memory; gram.py counts on it."""
        return self.uses.left.shape[3] <= self.uses.right.shape[3]

    def _weighted(self, x: Tensor, weights: Tensor, keep: Tensor) -> Tensor:
        """The factor with the weights, as narrow as products take it: MOVED covers that."""
        scaled = _scaled(x.to(self.dtype), weights, keep)
        if self.precision == "tf32":
            return cut(scaled)
        return scaled.to(torch.bfloat16) if self.precision == "bfloat16" else scaled


def _all_rows(x: Tensor) -> Tensor:
    """[b, g, t, ·] as [b·t, ·], or [g, b·t, ·] for several groups."""
    return x.flatten(0, 2) if x.shape[1] == 1 else x.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class RowsGrad:
    """An embedding table: at most t rows of it per example."""

    uses: Rows  # merged: no two non-zero rows of an example share an index
    shape: tuple[int, ...]

    def squared_norms(self) -> Tensor:
        """Rows of one example are distinct, so their squares add up."""
        return squares(self.uses.rows)

    def weighted_sum(self, weights: Tensor, keep: Tensor, onto: Tensor | None = None) -> Tensor:
        """Scatter the weighted rows, onto zeros or another sum."""
        rows = self.uses.rows
        table = rows.new_zeros(self.shape) if onto is None else onto
        rows = _scaled(rows.to(table.dtype), weights, keep)
        add = table.index_add if is_static() else table.index_add_  # a compiler writes a part of a tensor twice
        return add(0, self.uses.index.flatten(), rows.flatten(0, 1))


@dataclass(frozen=True)
class TiedGrad:
    """A table that is also a linear weight: one gradient, with the cross terms of its two kinds of use."""

    rows: RowsGrad
    outer: OuterGrad  # left on the table's rows, right on its columns

    def squared_norms(self) -> Tensor:
        """‖E‖² + ‖H‖² + 2⟨E, H⟩."""
        return self.outer.gram().bound(self.more())

    def more(self) -> tuple[Tensor, Tensor, Tensor]:
        """What the rows add to ‖H‖², to ρ and to the positions: ⟨E, H⟩ = Σ_ts left_s[index_t]·⟨rows_t, right_s⟩."""
        index, rows = self.rows.uses.index, self.rows.uses.rows.double()
        left, right = self.outer.uses.left[:, 0], self.outer.uses.right[:, 0, :, : rows.shape[2]].double()
        picked = left.gather(2, index[:, None, :].expand(-1, left.shape[1], -1)).double()  # [b, s, t]
        cross = (picked * torch.matmul(right, rows.mT)).sum((1, 2))
        reach = squares(self.rows.uses.rows, 2).sqrt().sum(1)
        return rows.square().sum((1, 2)) + 2 * cross, reach, (rows != 0).any(2).sum(1).double()

    def weighted_sum(self, weights: Tensor, keep: Tensor) -> Tensor:
        """The two sums, added."""
        return self.rows.weighted_sum(weights, keep, self.outer.weighted_sum(weights, keep))


def squared_norms(grads: Sequence[Reduced]) -> list[Tensor]:
    """Of each; those with a fused kernel at once."""
    kinds: dict[object, list[tuple[int, OuterGrad]]] = {}
    for i, grad in enumerate(grads):
        outer = grad.outer if isinstance(grad, TiedGrad) else grad
        if isinstance(outer, OuterGrad) and not outer.single and is_fused(outer.uses, outer.precision):
            kinds.setdefault((outer.uses.left.device, len(outer.uses.left)), []).append((i, outer))
    found: dict[int, Tensor] = {}
    for same in kinds.values():
        tied = {i: grad.more() for i, _ in same if isinstance(grad := grads[i], TiedGrad)}
        same.sort(
            key=lambda pair: (pair[0] in tied, pair[1].uses.left.shape, pair[1].uses.right.shape)
        )  # like together
        first = same[0][1].uses.left
        zeros = first.new_zeros(len(same) - len(tied), 3, len(first), dtype=torch.float64)
        stacked = torch.cat([zeros, *(torch.stack(tied[i])[None] for i, _ in same if i in tied)])
        rows = gram_bounds([outer.uses for _, outer in same], [outer.precision for _, outer in same], stacked)
        found.update(zip((i for i, _ in same), rows.unbind(0), strict=True))
    return [found[i] if i in found else grad.squared_norms() for i, grad in enumerate(grads)]


_ENTRY = {"bfloat16": 840, "tf32": 410}  # operations of the Gram kernel in the time that one entry goes to memory
_CACHED = 2**16  # entries of a gradient up to which the GPU's cache takes those of a batch


def choose_path(
    t: int, p: int, d: int, device: torch.device, precision: Precision = "exact", natively: bool = False
) -> Path:
    """From shapes alone, and once per parameter.

    Both forms need the 2tpd operations of the weight gradient; the Gram form takes 2t²(p + d) more, and half as much
    again for what becomes of them. A materialised gradient has p·d entries to write and to read twice (about 10
    operations each, on the machines tried), and many small products run at two thirds the speed of a large one (t more
    per entry). In float64 inner products take twice as long. A gradient much larger than the activations is
    materialised only where t is very large. Tensor cores compute far faster than memory takes entries, and their kernel
    does half of the symmetric products. So does native code, for which an entry of a gradient is 80 operations, and one
    of a factor 100 more in the Gram form, which reads them three times.
    """
    if precision != "exact":
        entry = _ENTRY[precision] / (9 if p * d <= _CACHED else 1)  # and the Gram form starts more kernels
        dense = p * d * entry < t * (t + 128) * (p + d)
        return Path("dense" if t > 1 and dense else "outer", False, t == 1)
    wide = device.type == "cpu" and t * (p + d) <= _SMALL
    if natively:
        cheaper = p * d <= 3 * t * (p + d) and 40 * p * d < ((12 if wide else 1) * t + 53) * t * (p + d)
    else:
        cheaper = p * d <= 2 * t * (p + d) and p * d * (t + 10) < (6 if wide else 3) * t * t * (p + d)
    if t > 1 and (2 * t * t > p * d or cheaper):
        return Path("dense", wide)
    return Path("outer", wide and t > 1, t == 1)


def choose_patch_path(use: Unfolded, precision: Precision) -> Path:
    """For a convolution by patches.py: inner products of all its input's positions, which are written, or gradients."""
    _, _, t, p = use.left.shape
    images, *lines, c = use.input.shape
    inputs, entry = math.prod(lines), _ENTRY[precision]
    outer = 2 * (inputs * inputs * (c + entry) + t * t * p)
    dense = p * use.width * entry / (2 if p * use.width <= _CACHED else 1)
    return Path("dense" if dense < outer or images != len(use.left) else "outer", False)


def _in_place(use: Unfolded, window: Window, shape: tuple[int, ...], name: str, paths: Paths) -> Reduced:
    """Patches are read where they lie in the input."""
    copies, precision = len(use.input) // len(use.left), precision_of(use.left, use.input)
    if name not in paths:
        paths[name] = choose_patch_path(use, precision)
    if paths[name].form == "outer" and copies == 1:
        return PatchGrad(use.left[:, 0], use.input, window, shape, precision)
    assert use.arrange is not None
    left = use.left[:, 0].reshape(len(use.input), -1, use.left.shape[3])
    made, squared = example_gradients(left, use.input, window, copies, precision, use.cut, _CHUNK)
    grad = use.arrange(made.flatten(2)).reshape(-1, *shape)
    return DenseGrad(grad, None if squared is None else _with_room(squared, grad[0].numel(), grad.dtype))


def _sides(use: Outer | Unfolded) -> tuple[int, int, int, int]:
    """g, t, p, d."""
    _, g, t, p = use.left.shape
    return (g, t, p, use.width) if isinstance(use, Unfolded) else (g, t, *use.size)


def reduce_uses(uses: Sequence[Contribution], shape: Sequence[int], name: str, paths: Paths) -> Reduced:
    """One `Reduced` for all uses of one parameter: uses are summed BEFORE the norm is taken."""
    shape = tuple(shape)
    if len(uses) == 1 and isinstance(uses[0], Unfolded) and uses[0].window is not None:
        return _in_place(uses[0], uses[0].window, shape, name, paths)
    uses = [as_multiplied(u) for u in uses]
    products = [u for u in uses if isinstance(u, (Outer, Unfolded))]
    rows = [u for u in uses if isinstance(u, Rows)]
    sides = [_sides(u) for u in products]
    if len(products) + len(rows) == len(uses) and len({(g, p, d) for g, _, p, d in sides}) <= 1:
        if not products:
            return RowsGrad(merge_rows(rows), shape)
        groups, _, p, d = sides[0]
        if name not in paths:
            left, positions = products[0].left, sum(t for _, t, _, _ in sides)
            paths[name] = choose_path(positions, p, d, left.device, _precision(products), is_native(left))
        if paths[name].form == "outer" and (not rows or (groups == 1 and (p, d) == shape)):
            grad = _outer(products, shape, paths[name])
            return TiedGrad(RowsGrad(merge_rows(rows), shape), grad) if rows else grad
    if len(uses) == 1 and isinstance(uses[0], (Outer, Unfolded)):
        seen: list[Tensor] = []
        total = materialise(uses[0], shape, lambda part, known: seen.append(_squared(part, known)))
        return DenseGrad(total, torch.cat(seen) if seen else None)
    total = materialise(uses[0], shape)
    for use in uses[1:]:
        total = total + materialise(use, shape)
    return DenseGrad(total)


def _precision(uses: Sequence[Outer | Unfolded]) -> Precision:
    """That of all uses, or exact."""
    found = {precision_of(use.left, _right(use)) for use in uses}
    return found.pop() if len(found) == 1 else "exact"


def _right(use: Outer | Unfolded) -> Tensor:
    return use.input if isinstance(use, Unfolded) else use.right


def _outer(uses: Sequence[Outer | Unfolded], shape: tuple[int, ...], path: Path) -> OuterGrad:
    precision = _precision(uses)
    merged = merge_outer([u.outer() if isinstance(u, Unfolded) else u for u in uses])
    if precision == "exact":
        return OuterGrad(merged, shape, path.wide, path.single)
    lined = Outer(aligned(merged.left), aligned(merged.right), merged.size)
    return OuterGrad(lined, shape, False, path.single, precision)  # tensor cores sum in float32, whatever a path says
