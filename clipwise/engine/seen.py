"""What the tape knows of a tensor: does it depend on the batch, and are its rows still the examples in order?"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import tensors
from .static import assume, is_static

_SELECTING = frozenset({"masked_select", "take", "nonzero", "argwhere", "unique", "unique_consecutive"})
_SELECTING_ALONG = frozenset({"index_select", "gather", "sort", "argsort", "topk", "msort"})
_MOVING = frozenset({"flip", "flipud", "roll", "take_along_dim"})
_PUTTING_BACK = frozenset(
    {"index_put", "index_put_", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_"}
    | {"index_copy", "index_copy_", "masked_scatter", "masked_scatter_", "where", "__setitem__"}
)
_BY_INDEX = frozenset({"__setitem__", "index_put", "index_put_"})
_INPLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__"})


def is_inplace(func: Any) -> bool:
    """Does the op write to its first argument?"""
    name = getattr(func, "__name__", "")
    return name in _INPLACE or name == "__set__" or (name.endswith("_") and not name.endswith("__"))


def _along_first(x: Tensor, dim: Any) -> bool:
    """Does `dim`, one or several, possibly negative, name the first axis?"""
    dims = dim if isinstance(dim, (tuple, list)) else (dim,)
    return any(isinstance(d, int) and not isinstance(d, bool) and d % max(x.dim(), 1) == 0 for d in dims)


def _row_index(x: Tensor, index: Any) -> Any:
    """What `index` does to the first axis: skip new axes, and an ellipsis that stands for nothing."""
    parts = list(index) if isinstance(index, (tuple, list)) and _is_mixed(index) else [index]
    taken = sum(p is not None and p is not Ellipsis for p in parts)
    for part in parts:
        if part is Ellipsis and taken < x.dim():
            return slice(None)
        if part is not None and part is not Ellipsis:
            return part
    return slice(None)


def _is_mixed(index: Any) -> bool:
    """A tuple is an index per axis; a list of numbers is one index."""
    return isinstance(index, tuple) or any(not isinstance(part, int) for part in index)


class Seen:
    """Marks on tensors, kept beside them: weak references by identity, nothing on the tensors themselves."""

    def __init__(self, size: int) -> None:
        """`size` examples are in the batch."""
        self._size = size
        self._data: dict[int, weakref.ref[Tensor]] = {}
        self._unordered: dict[int, weakref.ref[Tensor]] = {}

    def mark(self, tree: Any, unordered: bool = False) -> None:
        """Everything in `tree` depends on the batch."""
        for x in tensors(tree):
            for marks in (self._data, self._unordered)[: 1 + unordered]:
                marks[id(x)] = weakref.ref(x)

    def is_data(self, x: Tensor) -> bool:
        """Depends on the batch, or carries a gradient from where the tape did not look: never a constant."""
        known = self._data.get(id(x))
        if known is not None and known() is x:
            return True
        return x.requires_grad and not isinstance(x, nn.Parameter)

    def is_unordered(self, x: Tensor) -> bool:
        """Rows were picked by data, so the first axis no longer runs over the examples in order."""
        known = self._unordered.get(id(x))
        return known is not None and known() is x

    def loses_order(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> bool:
        """Is the op's result, or what it writes to, unordered?"""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None:
            return any(self.is_unordered(x) for x in given)
        if name in _PUTTING_BACK:
            put = tensors((args[2:], kwargs)) if name in _BY_INDEX else given  # which places is another question
            return any(map(self.is_unordered, [first, *put])) or self._puts_rows(name, args, kwargs)
        if any(self.is_unordered(x) for x in given):
            return True
        if not self.is_data(first):
            return False
        if name in _SELECTING:
            return True
        if name in _MOVING:
            return _along_first(first, kwargs.get("dims", kwargs.get("dim", args[-1] if len(args) > 1 else None)))
        if name in _SELECTING_ALONG:
            default = -1 if name in ("sort", "argsort", "topk") else None
            return _along_first(first, kwargs.get("dim", args[1] if len(args) > 1 else default))
        return name == "__getitem__" and len(args) > 1 and self._picks_rows(_row_index(first, args[1]))

    def _puts_rows(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Are rows of data written to places that data chose?"""
        target = args[0]
        if name in _BY_INDEX:
            value = args[2] if len(args) > 2 else kwargs.get("values")
            rows = isinstance(value, Tensor) and value.dim() > 0 and self.is_data(value)
            return rows and self._picks_rows(_row_index(target, args[1]))
        if name in ("where", "masked_scatter", "masked_scatter_"):
            return name != "where"
        return _along_first(target, kwargs.get("dim", args[1] if len(args) > 1 else None))

    def _picks_rows(self, index: Any) -> bool:
        if isinstance(index, (list, range)):
            return list(index) != list(range(self._size))
        if not isinstance(index, Tensor) or (index.dim() == 0 and not self.is_data(index)):
            return False
        if self.is_data(index) or index.dtype == torch.bool:
            return True
        if is_static():  # a constant, whose values a tracer does not know
            assume()
            return False
        return not torch.equal(index.flatten().cpu(), torch.arange(self._size))

    def after(self, func: Any, args: tuple[Any, ...], out: Any, unordered: bool) -> None:
        """Mark what an op on data made, and what it wrote to, down to the base of a view."""
        self.mark(out, unordered)
        if is_inplace(func) and args and isinstance(args[0], Tensor):
            self.mark(args[0], unordered)
            if args[0]._base is not None:
                self.mark(args[0]._base, unordered)
