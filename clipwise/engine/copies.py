"""What the preflight runs: copies of a model in float64, with generators, buffers and batches as they should be."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import default_collate

from ..batch import check_size, map_tensors
from .quiet import Quiet
from .recompute import no_recompute
from .state import kept_state, restore_state

Collate = Callable[[list[Any]], Any]


@contextmanager
def still() -> Iterator[None]:
    """Generators stand afterwards where they stood."""
    outside = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(outside[0])
        np.random.set_state(outside[1])


@contextmanager
def quiet(level: float | None) -> Iterator[None]:
    """Randomness made repeatable; without a level as it comes."""
    with still(), torch.enable_grad(), nullcontext() if level is None else Quiet(level), no_recompute():
        yield


@contextmanager
def untouched(model: nn.Module, level: float | None) -> Iterator[None]:
    """The same, and buffers as they were afterwards."""
    buffers = kept_state(model)
    try:
        with quiet(level):
            yield
    finally:
        restore_state(model, buffers)


def collated_by(collate_fn: Collate | None, device: torch.device | str | None) -> Callable[[Sequence[Any]], Any]:
    """How records become a batch: one row for each."""

    def collated(chosen: Sequence[Any]) -> Any:
        data = (collate_fn or default_collate)(list(chosen))
        check_size(data, len(chosen))
        return data if device is None else map_tensors(data, lambda x: x.to(device))

    return collated


def copy_of(subject: Any) -> Any:
    """A copy, or None."""
    try:
        return copy.deepcopy(subject)
    except Exception:
        return None


def double(model: nn.Module) -> nn.Module | None:
    """A copy in float64, or None."""
    found = copy_of(model)
    try:
        return found.double() if found is not None else None
    except Exception:
        return None


def as_double(data: Any) -> Any:
    """A batch for such a copy."""
    return map_tensors(data, lambda x: x.double() if x.is_floating_point() else x)


def move(model: nn.Module, zeros: bool = False) -> None:
    """Change every trained entry by a few percent, without a generator; `zeros`: of parameters that are all 0 alone."""
    with torch.no_grad():
        for number, p in enumerate(q for q in model.parameters() if q.requires_grad):
            if zeros and p.any():
                continue
            wave = torch.sin(torch.arange(p.numel(), device=p.device, dtype=p.dtype) * 1.7 + number)
            p.add_((0.05 * p.abs().mean() + 0.02) * wave.reshape(p.shape))
