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
_RUNS: weakref.WeakKeyDictionary[nn.Module, Ledger] = weakref.WeakKeyDictionary()  # what was spent on a module


def earlier_ledgers(model: nn.Module) -> list[Ledger]:
    """Of runs that trained this model, or a part of it, in whatever model it was then."""
    found = [_RUNS[module] for module in model.modules() if module in _RUNS]
    return list({id(ledger): ledger for ledger in found}.values())


def belongs_to(model: nn.Module, ledger: Ledger) -> None:
    """What is spent on this model from now on stands in this ledger; runs on a part of it are over."""
    before = set(map(id, earlier_ledgers(model)))
    own = [m for m in model.modules() if m is model or any(p.requires_grad for p in m.parameters(recurse=False))]
    for module in [*own, *(m for m, found in list(_RUNS.items()) if id(found) in before)]:
        _RUNS[module] = ledger


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
    if _RUNS.get(model) is not ledger or guard.ledger is not ledger:
        raise ParameterMismatch(
            "privatize() was called again for this model or optimizer, with another ledger, since this run was made: "
            "the two would each state only their own epsilon. Go on with the later run, or pass ledger=training.ledger."
        )


@dataclass(frozen=True)
class Seen:
    """A model as it was checked: its modules, their training flags, and what runs before and after them."""

    modes: list[tuple[nn.Module, bool]]
    parts: list[Any]  # compared by identity
    wrapped: bool = False

    @classmethod
    def of(cls, model: nn.Module, wrapped: bool = False) -> Seen:
        """As it is now. Of a model that is `wrapped`, whose wrapper changes its hooks, the flags alone."""
        parts = [] if wrapped else [part for module in model.modules() for part in _parts(module)]
        parts += [] if wrapped else [hook for held in _everywhere() for hook in held.values()]
        return cls([(module, module.training) for module in model.modules()], parts, wrapped)

    @property
    def flags(self) -> list[bool]:
        """Which modules trained."""
        return [training for _, training in self.modes]

    def changed(self, model: nn.Module) -> bool:
        """Whether something else would run."""
        now = Seen.of(model, self.wrapped).parts
        return len(now) != len(self.parts) or any(a is not b for a, b in zip(now, self.parts, strict=True))

    def check_modes(self) -> None:
        """Raise unless the training flags are the same."""
        if any(module.training != training for module, training in self.modes):
            raise ParameterMismatch(
                "model.train() or model.eval() was called since batches() checked the model: what was checked is not "
                "what would run. Set the mode before batches(), and set it back after an evaluation."
            )


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def _parts(module: nn.Module) -> Iterator[Any]:
    """What decides what a module does: itself, its type, a forward of its own, and its hooks, each after its kind."""
    held = vars(module)
    yield from (module, type(module), held.get("forward"))
    for kind in _HOOKS:
        if held[kind]:
            yield kind
            yield from held[kind].values()


def _everywhere() -> tuple[dict[Any, Any], ...]:
    """Hooks of all modules."""
    kept = torch.nn.modules.module
    return kept._global_forward_pre_hooks, kept._global_forward_hooks
