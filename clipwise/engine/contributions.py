"""The three forms in which one use of a parameter gives its per-example gradient.

Shape letters: b examples, g groups, t positions, p and d the two sides of a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import native
from .._types import sum_dtype
from .products import cut, precision_of, product
from .static import is_static


@dataclass(frozen=True)
class Dense:
    """The per-example gradient itself."""

    grad: Tensor  # [b, *shape]


@dataclass(frozen=True)
class Outer:
    """Σ_t left_t ⊗ right_t in every group: the gradient of a weight of shape [g·p, d] (or any reshape of it)."""

    left: Tensor  # [b, g, t, p]
    right: Tensor  # [b, g, t, d]
    sides: tuple[int, int] | None = None  # p and d, where left or right have columns of zeros beyond them
    cut: bool = False  # to TF32's bits already

    @property
    def size(self) -> tuple[int, int]:
        """Of the weight: p and d."""
        return self.sides or (self.left.shape[3], self.right.shape[3])

    def swapped(self) -> Outer:
        """The same gradient of the transposed weight."""
        return Outer(self.right, self.left, None if self.sides is None else self.sides[::-1], self.cut)


class Window(NamedTuple):
    """How a convolution on two axes looks at its input."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    before: tuple[int, int]  # zeros before the input
    dilation: tuple[int, int]
    out: tuple[int, int]  # positions of the output

    def places(self, axis: int, k: int) -> tuple[int, int, int]:
        """What place k of the kernel sees along an axis of the padded input: from, to, in steps of."""
        first, hop = k * self.dilation[axis], self.stride[axis]
        return first, first + (self.out[axis] - 1) * hop + 1, hop


@dataclass(frozen=True)
class Unfolded:
    """An Outer whose right side is cut from `input` only when it is needed: the patches of a convolution.

    Patches repeat the input many times over, so they are made for a few examples at a time where possible.
    """

    left: Tensor  # [b, g, t, p]
    input: Tensor  # [b·k, …]
    unfold: Callable[[Tensor], Tensor]  # rows of `input` → [rows / k, g, t, d]
    width: int  # d
    arrange: Callable[[Tensor], Tensor] | None = None  # a view of […, d] in the weight's own order, if it has another
    window: Window | None = None  # for kernels that read patches where they lie
    cut: bool = False  # left, to TF32's bits already
    view: Callable[[Tensor], Tensor] | None = None  # as `unfold`, without writing: [rows / k, g, *positions, *entries]
    axes: int = 1  # of the view's positions

    def outer(self) -> Outer:
        """With all patches in memory."""
        right = self.unfold(self.input)
        return Outer(self.left, right if self.arrange is None else self.arrange(right).flatten(3))

    def parts(self) -> Iterator[Outer]:
        """The same, a few examples at a time."""
        size, groups, positions, _ = self.left.shape
        copies = self.input.shape[0] // size
        rows = max(1, _PART[self.left.device.type != "cpu"] // (groups * positions * self.width))
        if is_static() and self.left.device.type == "cpu":
            rows = max(rows, min(-(-size // _PARTS), _MOST // (groups * positions * self.width)))
        for i in range(0, size, rows):
            yield Outer(self.left[i : i + rows], self.unfold(self.input[i * copies : (i + rows) * copies]))


@dataclass(frozen=True)
class Rows:
    """rows_t added to row index_t: the gradient of an embedding table."""

    index: Tensor  # [b, t], int64
    rows: Tensor  # [b, t, d]


Contribution = Dense | Outer | Unfolded | Rows
_PARTS, _MOST = 8, 2**24  # parts in a graph, which a compiler takes time for, as long as each has no more entries
_LINE = 16  # entries of a line of the cache
_PART = (2**20, 2**26)  # entries of the patches that are made at a time: on a CPU they stay in its caches


def as_multiplied(use: Contribution) -> Contribution:
    """TF32 factors are cut once, here (convolutions in place: patches.py): no kernel can then cut them otherwise."""
    if isinstance(use, Unfolded) and precision_of(use.left, use.input) == "tf32":
        return replace(use, left=cut(use.left), input=cut(use.input))
    if isinstance(use, Outer) and not use.cut and precision_of(use.left, use.right) == "tf32":
        return replace(use, left=cut(use.left), right=cut(use.right))
    return use


def materialise(
    use: Contribution, shape: Sequence[int], look: Callable[[Tensor, Tensor | None], None] | None = None
) -> Tensor:
    """The per-example gradient [b, *shape] of one use, in float32 or wider.

    `look` sees that of products too, a few examples at a time, while the cache holds them; with its sums of squares,
    if they are known.
    """
    if isinstance(use, (Outer, Unfolded)) and is_native(use.left) and (isinstance(use, Outer) or use.view is not None):
        grad, squared = _natively(use)
        if look is not None:
            look(grad, squared)
        arranged = use.arrange(grad).flatten(1, 2) if isinstance(use, Unfolded) and use.arrange is not None else grad
        return arranged.reshape(len(grad), *shape)
    if isinstance(use, Dense):
        return _wide(use.grad).reshape(len(use.grad), *shape)
    if isinstance(use, Unfolded):
        grad = _unfolded(use, look)
        return grad.reshape(-1, *shape) if use.arrange is None else use.arrange(grad).flatten(1, 2).reshape(-1, *shape)
    if isinstance(use, Outer):
        p, d = use.size
        return _product(use)[..., :p, :d].reshape(len(use.left), *shape)
    size, positions = use.index.shape
    rows = _wide(use.rows).reshape(size * positions, -1)
    offset = torch.arange(size, device=rows.device)[:, None] * shape[0]
    table = rows.new_zeros(size * shape[0], rows.shape[1])
    return table.index_add_(0, (use.index + offset).flatten(), rows).reshape(size, *shape)


def is_native(left: Tensor) -> bool:
    """Whether native code makes gradients from it: on a CPU, in float32."""
    return left.device.type == "cpu" and sum_dtype(left.dtype) == torch.float32 and native.has_products()


def _natively(use: Outer | Unfolded) -> tuple[Tensor, Tensor]:
    """[b, g, p, d] and sums of squares [b]; each example's the same to the last bit, whoever is beside it."""
    if isinstance(use, Outer):
        left, base, axes = use.left[..., : use.size[0]], use.right[..., : use.size[1]], 1
    else:
        left, base, axes = use.left, use.input, use.axes

    def view(x: Tensor) -> Tensor:
        return use.view(x) if isinstance(use, Unfolded) and use.view is not None else x

    if not is_static():
        return native.example_gradients(_wide(left), view(_wide(base)), axes)
    whole = _wide(base).contiguous()  # a compiler would write the patches of a view
    seen = view(whole)
    made, squared = torch.ops.clipwise.native_gradients(_wide(left), whole, seen.shape, seen.stride(), axes)
    return made, squared


def _unfolded(use: Unfolded, look: Callable[[Tensor, Tensor | None], None] | None) -> Tensor:
    """[b, g, p, d], a few examples at a time: on a CPU straight to where it stays."""
    size, groups, _, side = use.left.shape
    shape, dtype = (size, groups, side, use.width), sum_dtype(use.left.dtype)
    whole = torch.empty(shape, dtype=dtype) if use.left.device.type == "cpu" else None
    done, made = 0, []
    for part in use.parts():
        if whole is None:
            made.append(_product(part))
        else:
            made.append(whole[done : done + len(part.left)])
            left, right = (_wide(x).flatten(0, 1) for x in (part.left, part.right))
            _alike(left.mT, right, made[-1].flatten(0, 1))
        if look is not None:
            look(made[-1], None)
        done += len(part.left)
    return whole if whole is not None else made[0] if len(made) == 1 else torch.cat(made)


def _product(use: Outer) -> Tensor:
    """[b, g, p, d]; in any precision: what is measured is what is summed."""
    left, right = use.left.flatten(0, 1), use.right.flatten(0, 1)
    if left.device.type == "cpu":
        made = _alike(_wide(left).mT, _wide(right))
    else:
        made = product(left.mT, right, sum_dtype(left.dtype), precision_of(left, right))
    return made.reshape(*use.left.shape[:2], *made.shape[1:])


def _alike(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """[b, p, t] @ [b, t, d] on a CPU: each product the same to the last bit, wherever it lies and whoever is beside it.

    Libraries have other kernels for one matrix alone, and for one that begins in the middle of a line of the cache.
    What cancels within an example is then rounded otherwise, and where little else is left, nothing bounds the change.
    """
    (size, p, t), d = left.shape, right.shape[2]
    apart = t * p % _LINE or t * d % _LINE or p * d % _LINE
    left, right = (x.contiguous() if x.stride(0) % _LINE else x for x in (left, right))
    if size > 1 and not apart:
        return torch.bmm(left, right) if out is None else torch.bmm(left, right, out=out)
    if apart:
        left = F.pad(left, (0, -t % _LINE, 0, -p % _LINE))
        right = F.pad(right, (0, 0, 0, -t % _LINE))
    if size == 1:
        left, right = (torch.cat([x, x]) for x in (left, right))
    made = torch.bmm(left, right)[:size, :p]
    return made if out is None else out.copy_(made)


def merge_outer(uses: Sequence[Outer]) -> Outer:
    """Several uses of one weight are one gradient: positions side by side."""
    if len(uses) == 1:
        return uses[0]
    p, d = uses[0].size
    return Outer(torch.cat([u.left[..., :p] for u in uses], dim=2), torch.cat([u.right[..., :d] for u in uses], dim=2))


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
