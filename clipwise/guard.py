"""What outlives a run object: the guard before the optimizer, and what was spent on a model; one run, one thread."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
RUNS: weakref.WeakKeyDictionary[nn.Module, Ledger] = weakref.WeakKeyDictionary()  # what was spent on a model


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
    if RUNS.get(model) is not ledger or guard.ledger is not ledger:
        raise ParameterMismatch(
            "privatize() was called again for this model or optimizer, with another ledger, since this run was made: "
            "the two would each state only their own epsilon. Go on with the later run, or pass ledger=training.ledger."
        )


def check_modes(model: nn.Module, modes: Sequence[bool] | None) -> None:
    """The training flags are those that the preflight saw."""
    if modes is not None and list(modes) != [module.training for module in model.modules()]:
        raise ParameterMismatch(
            "model.train() or model.eval() was called since batches() checked the model: what was checked is not "
            "what would run. Set the mode before batches(), and set it back after an evaluation."
        )
