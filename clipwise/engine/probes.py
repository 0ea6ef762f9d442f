"""Made-up records: the structure of one record, none of its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import UnsupportedOp

_SCALES = (1.0, 1000.0, 30.0, 1.0, 300.0)  # of records that are unlike each other


class MadeUp(list[Any]):
    """Records made up elsewhere: of the user's structure, none of their values given."""


def _values(shape: Sequence[int], kind: torch.dtype, number: int, unlike: bool = False) -> Tensor:
    """Made-up values without a generator: smooth for floats, 0 and 1 for integers (always a valid class or token).

    Each record has another share of ones: a model that counts what is not 0 must not see the same count in all.
    `unlike` records differ in size and sign: `if x.max() > 1` for a whole batch is another answer than for one record.
    """
    total = int(np.prod(shape)) if len(shape) else 1
    steps = torch.arange(total, dtype=torch.float64)
    wave = torch.sin(steps * (1.3 + 0.7 * number) + 0.9 * number + 0.4)
    if unlike and kind.is_floating_point:
        wave = (wave.abs() if number % 2 else wave) * _SCALES[number % len(_SCALES)]
    if kind.is_floating_point or kind.is_complex:
        return wave.to(kind).reshape(tuple(shape))
    if kind == torch.uint8 and not (unlike and number % 2):
        return ((wave + 1) * 127).to(kind).reshape(tuple(shape))
    return (wave > (0.0, -0.6, 0.6, -0.3, 0.3)[number % 5]).to(kind).reshape(tuple(shape))


def made_record(
    like: Any, number: int, keep: tuple[int, int] | None = None, every: bool = False, unlike: bool = False
) -> Any:
    """A record of the structure of `like`; keep=(length, other) changes first axes of that length, or `every` axis."""

    def made(item: Any) -> Any:
        return made_record(item, number, keep, every, unlike)

    if isinstance(like, Tensor):
        shape, (length, other) = list(like.shape), keep or (0, 0)
        for axis in range(len(shape) if every else min(len(shape), 1)):
            shape[axis] = other if keep and shape[axis] == length else shape[axis]
        return _values(shape, like.dtype, number, unlike).to(like.device)
    if isinstance(like, np.ndarray):
        return made(torch.as_tensor(like)).numpy()
    if isinstance(like, bool):
        return bool(number % 2)
    if isinstance(like, (int, np.integer)):
        return type(like)(number % 2)
    if isinstance(like, (float, np.floating)):
        return type(like)(0.5 * number + 0.1)
    if isinstance(like, Mapping):
        return {key: made(item) for key, item in like.items()}
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*(made(item) for item in like))
    if isinstance(like, (list, tuple)):
        if keep is not None and len(like) == keep[0]:
            like = (like * (1 + keep[1] // len(like)))[: keep[1]]
        return type(like)(made(item) for item in like)
    if like is None:
        return None
    raise UnsupportedOp(
        f"The preflight cannot make up a {type(like).__name__}. Pass a few public records, "
        "privatize(..., probe=[record, record, record]), or preflight=False to go without the check."
    )


def lengths(like: Any) -> set[int]:
    """Axes that could be of another length in another record."""
    if isinstance(like, (Tensor, np.ndarray)):
        return set(like.shape)
    items = like.values() if isinstance(like, Mapping) else like if isinstance(like, (list, tuple)) else ()
    own = {len(like)} if isinstance(like, list) and like else set()
    return own.union(*(lengths(item) for item in items))


def map_integers(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same record with each of its integer tensors, arrays, numbers, and lists of integers changed."""

    def changed(item: Any) -> Any:
        return map_integers(item, change)

    if isinstance(tree, Tensor):
        whole = not (tree.is_floating_point() or tree.is_complex() or tree.dtype == torch.bool)
        return change(tree) if whole else tree
    if isinstance(tree, np.ndarray):
        return changed(torch.as_tensor(tree.copy())).numpy() if tree.dtype.kind in "iu" else tree
    if isinstance(tree, (int, np.integer)) and not isinstance(tree, bool):
        return type(tree)(int(change(torch.tensor(int(tree)))))
    if isinstance(tree, Mapping):
        return {key: changed(item) for key, item in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(changed, tree))
    if isinstance(tree, list) and tree and all(type(item) is int for item in tree):
        return change(torch.tensor(tree)).tolist()
    return type(tree)(map(changed, tree)) if isinstance(tree, (list, tuple)) else tree


def with_integer(record: Any, value: int, number: int, only: int | None = None) -> Any:
    """The record with `value` in all its integer tensors, or in one only: where, says `number` (`_where`)."""
    count = iter(range(1_000_000))

    def change(x: Tensor) -> Tensor:
        if only is not None and next(count) != only:
            return x
        if not torch.iinfo(x.dtype).min <= value <= torch.iinfo(x.dtype).max:
            raise ValueError(f"{x.dtype} does not hold {value}")
        elsewhere = torch.where(x == value, 0 if value else 1, x)
        return torch.where(_where(x, number), value, elsewhere).to(x.dtype)

    return map_integers(record, change)


def _where(x: Tensor, number: int) -> Tensor:
    """0: nowhere; 1: the second half; 2: the first third; 3: every fourth place; 4: the last quarter, rows first."""
    axis = 0 if number == 4 else -1
    if x.dim() == 0 or x.shape[axis] < 2:
        return torch.full_like(x, number % 2, dtype=torch.bool)
    n = x.shape[axis]
    place = torch.arange(n, device=x.device)
    chosen = {
        1: place >= (n + 1) // 2,
        2: place < max(n // 3, 1),
        3: place % 4 == 1,
        4: place >= n - max(n // 4, 1),
    }.get(number, place < 0)
    return (chosen if axis else chosen.reshape(-1, *[1] * (x.dim() - 1))).expand(x.shape)
