"""Derived parameters with rows of their own for every example, and what is not followed at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batch import tensors
from .contributions import Contribution, Dense
from .derived import Derived, Source, no_rule


def no_complex(op: str, trained: Sequence[Source | Derived], tree: Any) -> None:
    """Gradients through complex numbers are not followed."""
    if any(x.is_complex() for x in tensors(tree)):
        raise no_rule(op, trained, "together with complex numbers")


_SPREAD = 2**24  # entries that are pushed back at a time


def spread_rows(target: Derived, grad: Tensor, size: int) -> Iterator[tuple[Source | Derived, Contribution]]:
    """Example i reaches `target` through its own rows alone: push those back, a few examples at a time."""
    own = grad.reshape(size, -1, *grad.shape[1:])
    count = max(1, _SPREAD // max(grad.numel(), 1))
    found: dict[str, tuple[Source, list[Tensor]]] = {}
    for start in range(0, size, count):
        chosen = own[start : start + count]
        padded = torch.zeros(len(chosen), *own.shape, dtype=grad.dtype, device=grad.device)
        padded[torch.arange(len(chosen)), torch.arange(start, start + len(chosen))] = chosen
        for source, use in target.push_back([Dense(padded.flatten(1, 2))]):
            found.setdefault(source.name, (source, []))[1].append(use.grad)
    for source, parts in found.values():
        yield source, Dense(torch.cat(parts))
