"""A batch as a tree of tensors with the examples on the first axis: size, slices, padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import BatchShape

_PLAIN = frozenset({int, float, bool, str, type(None), slice, type(Ellipsis), torch.dtype, torch.device})  # no tensors


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with every tensor changed. Knows dicts, mappings, lists, tuples, named tuples, data classes.

    >>> map_tensors({"x": torch.tensor([1.0]), "id": "a"}, lambda x: x + 1)
    {'x': tensor([2.]), 'id': 'a'}
    """
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) in _PLAIN:
        return tree
    if isinstance(tree, Mapping):
        changed = {key: map_tensors(item, change) for key, item in tree.items()}
        return changed if type(tree) is dict else _rebuilt(tree, changed)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(item, change) for item in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)([map_tensors(item, change) for item in tree])
    if is_dataclass(tree) and not isinstance(tree, type):
        changed_ = copy(tree)
        for name in tree.__dataclass_fields__:
            object.__setattr__(changed_, name, map_tensors(getattr(tree, name), change))
        return changed_
    return tree


def _rebuilt(tree: Mapping[str, Any], items: dict[str, Any]) -> Any:
    try:
        return type(tree)(items)  # type: ignore[call-arg]
    except TypeError:
        return items


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a batch, in order."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif type(tree) in _PLAIN:
        return
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            _collect(item, found)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            _collect(item, found)
    elif is_dataclass(tree) and not isinstance(tree, type):
        for name in tree.__dataclass_fields__:
            _collect(getattr(tree, name), found)


def batch_size(data: Any) -> int:
    """How many examples a collated batch holds.

    >>> batch_size((torch.zeros(3, 2), torch.zeros(3)))
    3
    """
    sizes = {x.shape[0] if x.dim() else -1 for x in tensors(data)}
    if len(sizes) != 1 or -1 in sizes:
        raise BatchShape(
            "A batch must hold tensors that all have the examples as their first axis, but their first axes differ or "
            "are missing. Change the collate function so that every tensor has one row per example."
        )
    return sizes.pop()


def check_size(data: Any, size: int) -> None:
    """Refuse a collate function that merged or dropped examples."""
    if batch_size(data) != size:  # neither number is shown: the size of a Poisson batch is secret
        raise BatchShape(
            "The collate function made another number of rows than there were examples. Packing, merging or "
            "dropping examples mixes their gradients; collate one row per example."
        )


def padded_slice(data: Any, start: int, stop: int, rows: int, size: int) -> tuple[Any, Tensor]:
    """Rows start…stop of `size`, the last one repeated up to `rows`, and the mask of the real ones."""
    mask = torch.arange(rows) < stop - start
    if (start, stop, rows) == (0, size, size):
        return data, mask
    index = torch.arange(start, start + rows).clamp(max=stop - 1)
    return take(data, index, size), mask


def take(data: Any, index: Tensor, size: int) -> Any:
    """The rows `index` of a batch of `size`: of tensors, arrays and plain lists; constants stay as they are.

    >>> take({"x": torch.tensor([5, 6]), "word": ["a", "b"], "scale": 2.0}, torch.tensor([1]), 2)
    {'x': tensor([6]), 'word': ['b'], 'scale': 2.0}
    """
    if isinstance(data, Tensor):
        return data[index.to(data.device)]
    if isinstance(data, np.ndarray) and data.ndim and len(data) == size:
        return data[index.numpy()]
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, Mapping):
        chosen = {key: take(item, index, size) for key, item in data.items()}
        return chosen if type(data) is dict else _rebuilt(data, chosen)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(take(item, index, size) for item in data))
    if isinstance(data, (list, tuple)):
        if any(isinstance(item, (Tensor, np.ndarray, Mapping, list, tuple)) for item in data):
            return type(data)([take(item, index, size) for item in data])
        if len(data) == size:
            return type(data)([data[i] for i in index.tolist()])
    raise BatchShape(
        f"A batch holds a {type(data).__name__} that cannot be split into microbatches, so rows of different examples "
        "would be mixed. Collate it to a tensor, or to a list with one entry per example."
    )
