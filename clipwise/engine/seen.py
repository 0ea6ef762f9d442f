"""What the tape knows of a tensor: does it depend on the batch, and are its rows still the examples in order?"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import tensors

_SELECTING = frozenset({"masked_select", "take", "nonzero", "argwhere", "unique", "unique_consecutive"})
_SELECTING_ALONG = frozenset({"index_select", "gather", "take_along_dim"})
_PUTTING_BACK = frozenset(
    {"index_put", "index_put_", "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_"}
    | {"index_copy", "index_copy_", "masked_scatter", "masked_scatter_", "where", "__setitem__"}
)
_INPLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__"})


def is_inplace(func: Any) -> bool:
    """Does the op write to its first argument?"""
    name = getattr(func, "__name__", "")
    return name in _INPLACE or name == "__set__" or (name.endswith("_") and not name.endswith("__"))


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
        """Is the op's result unordered?"""
        if any(self.is_unordered(x) for x in given):
            return not (name in _PUTTING_BACK and isinstance(args[0], Tensor) and not self.is_unordered(args[0]))
        if not (args and isinstance(args[0], Tensor) and self.is_data(args[0])):
            return False
        if name in _SELECTING:
            return True
        if name in _SELECTING_ALONG:
            return kwargs.get("dim", args[1] if len(args) > 1 and isinstance(args[1], int) else None) == 0
        if name == "__getitem__" and len(args) > 1:
            first = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            return self._picks_rows(first)
        return False

    def _picks_rows(self, index: Any) -> bool:
        if isinstance(index, (list, range)):
            return list(index) != list(range(self._size))
        if not isinstance(index, Tensor) or (index.dim() == 0 and not self.is_data(index)):
            return False
        if self.is_data(index) or index.dtype == torch.bool:
            return True
        return not torch.equal(index.flatten().cpu(), torch.arange(self._size))

    def after(self, func: Any, args: tuple[Any, ...], out: Any, unordered: bool) -> None:
        """Mark what an op on data made, and what it wrote to, down to the base of a view."""
        self.mark(out, unordered)
        if is_inplace(func) and args and isinstance(args[0], Tensor):
            self.mark(args[0], unordered)
            if args[0]._base is not None:
                self.mark(args[0]._base, unordered)
