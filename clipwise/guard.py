"""What outlives a run object: the guard before the optimizer, and what was spent on a model; one run, one thread."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from .clipping import trainable
from .errors import ParameterMismatch, WrongOrder
from .ledger import Ledger


class StepGuard:
    """Stands before optimizer.step(): only a release may pass, so that no un-noised gradient ever does."""

    def __init__(self, optimizer: torch.optim.Optimizer, ledger: Ledger) -> None:
        """Register with the optimizer."""
        self.open = False
        self.ledger = ledger
        optimizer.register_step_pre_hook(self)
        GUARDS[optimizer] = self

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Raise unless a release is under way."""
        if not self.open:
            raise WrongOrder(
                "optimizer.step() was called outside training.step() or training.release(): its gradients would be "
                "neither clipped nor noised. Leave the optimizer to clipwise; step a learning-rate scheduler yourself."
            )


GUARDS: weakref.WeakKeyDictionary[torch.optim.Optimizer, StepGuard] = weakref.WeakKeyDictionary()
_RUNS: weakref.WeakKeyDictionary[nn.Module, Ledger] = weakref.WeakKeyDictionary()  # what was spent on a model
_PARTS = WeakTensorKeyDictionary()  # and on its parameters, which may be in another model, too


def belongs_to(model: nn.Module, ledger: Ledger) -> None:
    """What is spent on this model from now on stands in this ledger."""
    _RUNS[model] = ledger
    for p in trainable(model).values():
        _PARTS[p] = ledger


def earlier_ledgers(model: nn.Module) -> list[Ledger]:
    """Of runs that trained this model, or a parameter of it."""
    found = [_RUNS.get(model), *(_PARTS.get(p) for p in model.parameters())]
    return list({id(ledger): ledger for ledger in found if ledger is not None}.values())


class Turn:
    """One batch at a time: two threads in one step would add up their sums and charge once."""

    def __init__(self) -> None:
        """Nobody's."""
        self._holder: dict[str, list[int]] = {}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """It stays taken, unless what is tried fails. Raise where a batch has it, of whatever thread."""
        mine = [get_ident()]
        if (held := self._holder.setdefault("batch", mine)) is not mine:
            if held == mine:
                raise WrongOrder("The batch before this one was not released; call training.release() once per batch.")
            raise WrongOrder("Another thread is in the middle of a step of this run, which takes one batch at a time.")
        try:
            yield
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """For the next batch, of whatever thread."""
        self._holder.clear()


def check_newest(model: nn.Module, guard: StepGuard, ledger: Ledger) -> None:
    """A run must not go on beside a later one on the same model: each would state its own ε alone."""
    others = any(_PARTS.get(p, ledger) is not ledger for p in trainable(model).values())
    if _RUNS.get(model) is not ledger or guard.ledger is not ledger or others:
        raise ParameterMismatch(
            "privatize() was called again for this model or optimizer, with another ledger, since this run was made: "
            "the two would each state only their own epsilon. Go on with the later run, or pass ledger=training.ledger."
        )


@dataclass(frozen=True)
class Seen:
    """A model as the preflight saw it: its modules, their training flags, and what runs before and after them."""

    modules: tuple[nn.Module, ...]
    flags: list[bool]
    hooks: list[Any]

    @classmethod
    def of(cls, model: nn.Module, wrapped: bool = False) -> Seen:
        """As it is now. Of a model that is `wrapped`, whose wrapper changes its hooks, the flags alone."""
        modules = tuple(model.modules())
        hooks = [] if wrapped else [hook for module in modules for hook in _hooks(module)]
        return cls(() if wrapped else modules, [module.training for module in modules], hooks)

    def check(self, model: nn.Module) -> None:
        """Raise unless it still is so."""
        now = Seen.of(model, wrapped=not self.modules)
        if now.flags != self.flags:
            raise ParameterMismatch(
                "model.train() or model.eval() was called since batches() checked the model: what was checked is not "
                "what would run. Set the mode before batches(), and set it back after an evaluation."
            )
        for before, after in ((self.modules, now.modules), (self.hooks, now.hooks)):
            if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
                raise ParameterMismatch(
                    "A module, its forward function or a hook was changed, added or removed since batches() checked "
                    "the model: what was checked is not what would run. Do so before batches()."
                )


def _hooks(module: nn.Module) -> Iterator[Any]:
    """Functions that run with a module, and a forward of its own; between those of two kinds the name of the kind."""
    yield vars(module).get("forward")
    for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"):
        yield kind
        yield from getattr(module, kind).values()
