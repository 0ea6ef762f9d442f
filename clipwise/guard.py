"""What outlives a run object: the guard before the optimizer, and what was spent on a model."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from .errors import WrongOrder
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
