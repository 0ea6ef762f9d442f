"""Checkpoints: weights, optimizer, threshold and plan. The ledger stays its own file and always wins.

A checkpoint holds no key, no coins and no batch: a resumed run draws everything anew.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import torch

from .errors import LedgerError, PlanMismatch
from .thresholds import State
from .training import PrivateTraining


def save_checkpoint(training: PrivateTraining, path: str | Path) -> None:
    """Write a checkpoint atomically: an old one stays whole until the new one is on disk.

    A run whose ledger lives in memory can be saved, but not resumed: what it spent dies with its process.
    """
    path = Path(path)
    content = {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "threshold": asdict(training.threshold_state),
        "plan": training.plan.digest,
        "ledger": training.ledger.position if training.ledger.persistent else None,
    }
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(draft, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)


def load_checkpoint(training: PrivateTraining, path: str | Path) -> None:
    """Restore weights, optimizer and threshold into a run made with the same plan and ledger.

    Guarantee: ε never falls. The ledger must have passed through the state that the checkpoint remembers; steps
    charged since then stay charged.
    """
    content = torch.load(path, weights_only=True, map_location="cpu")
    if content["plan"] != training.plan.digest:
        raise PlanMismatch(f"Checkpoint {path} belongs to another plan. Resume with the plan that it was saved under.")
    if content["ledger"] is None:
        raise LedgerError(
            f"Checkpoint {path} was saved by a run whose ledger lived in memory: what it had spent is lost, so it "
            "cannot be resumed under this plan. Give privatize() a ledger path next time."
        )
    if not training.ledger.holds(content["ledger"]):
        raise LedgerError(
            f"Ledger {training.ledger.path} is older than checkpoint {path}, or is another one: going on would forget "
            "what was spent. Restore the ledger that the run wrote."
        )
    training.model.load_state_dict(content["model"])
    training.optimizer.load_state_dict(content["optimizer"])
    if training.plan.release is not None:  # others follow from the number of charges, which the ledger knows better
        training._restore_threshold(State(**content["threshold"]))
