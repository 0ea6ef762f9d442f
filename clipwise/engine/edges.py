"""Gradient edges: where the backward pass is caught."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..errors import ParameterMismatch, UnrecordedGradient
from .contributions import Contribution
from .derived import Derived, Source


class Tap(torch.autograd.Function):
    """Gives an output that needs no gradient a place in the graph; the same tensor, so in-place ops still work."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor) -> Tensor:
        """The tensor itself."""
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        """The gradient is caught at the edge; nothing lies behind it."""
        return None, None


class Unview(torch.autograd.Function):
    """The same memory, but no longer a view.

    An in-place op on a view rewrites the history of its base, and an edge recorded before it would lie off
    the path: its gradient would be missed in silence (linear with a bias on a 3-D input returns a view).
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        """An alias."""
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The identity."""
        return grads[0]


@dataclass(frozen=True)
class Record:
    """One use: the edge whose gradient is needed, and how it becomes contributions."""

    edge: GradientEdge | Tensor
    targets: tuple[Source | Derived, ...]
    contributions: Callable[[Tensor], Iterator[tuple[Source | Derived, Contribution]]]


def not_seen(names: Sequence[str]) -> UnrecordedGradient:
    """The refusal for a gradient that arrives by an unknown way."""
    return UnrecordedGradient(
        f"Parameter(s) {', '.join(names)} got a gradient by a way the tape did not see (a scripted or compiled "
        "function, a custom autograd.Function, or an in-place write). It would not be clipped. Use plain PyTorch ops "
        "there, or engine='vmap'."
    )


def name_now(model: nn.Module, parameter: nn.Parameter, sharded: bool) -> str | None:
    """The name under which a module holds a parameter at this moment: a sharded one is swapped for the whole one."""
    for name, p in model.named_parameters(remove_duplicate=False):
        if p is parameter:
            return name
    if sharded:  # it is being made ready
        return None
    raise ParameterMismatch(
        f"A trainable parameter of shape {tuple(parameter.shape)} is used in the loss but does not belong to the "
        "model, so it would not be clipped. Make its module a part of the model, or freeze it."
    )
