"""Logs of released values: a CSV file, or TensorBoard. They take the run itself, so that nothing private gets in.

log = CsvLog("run.csv")             # or TensorBoardLog("runs/first")
for batch in training.batches(dataset):
training.step(batch)
log.write(training)
"""

from __future__ import annotations

import csv
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import MissingExtra
from ..training import PrivateTraining

COLUMNS = ("step", "epsilon", "clip_norm", "learning_rate")


def released(training: PrivateTraining) -> dict[str, float]:
    """What may be shown of a run: steps, ε, C and the learning rate."""
    return {
        "step": training.ledger.charges,
        "epsilon": training.epsilon,
        "clip_norm": training.clip_norm,
        "learning_rate": float(training.optimizer.param_groups[0]["lr"]),
    }


class CsvLog:
    """One row per written step; a resumed run goes on in the same file. ε takes a moment: write every so many steps."""

    def __init__(self, path: str | Path, every: int = 1) -> None:
        """Begin, or go on."""
        self.path, self.every = Path(path), every
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists() or not self.path.stat().st_size:
            self.path.write_text(",".join(COLUMNS) + "\n")

    def write(self, training: PrivateTraining) -> None:
        """Add a row, if its turn has come."""
        if training.ledger.charges % self.every == 0:
            with self.path.open("a", newline="") as file:
                csv.writer(file).writerow(released(training).values())


class TensorBoardLog:
    """Scalars ε, C and learning rate by step."""

    def __init__(self, folder: str | Path, every: int = 1) -> None:
        """Needs the package tensorboard."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("TensorBoardLog needs tensorboard: pip install 'clipwise[tensorboard]'.") from error
        self.every = every
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, training: PrivateTraining) -> None:
        """Add a point to every curve, if its turn has come."""
        if training.ledger.charges % self.every == 0:
            values = released(training)
            step = values.pop("step")
            for name, value in values.items():
                self._writer.add_scalar(f"released/{name}", value, step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def __enter__(self) -> TensorBoardLog:
        """For `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close."""
        self.close()
