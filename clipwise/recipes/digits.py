"""Digits: 1,797 real scans of 8×8 pixels, bundled with scikit-learn; 1,500 to train on privately, 297 to test.

The test images are declared public, so their accuracy may be shown.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import BudgetExhausted
from ..plan import Plan
from ..privatize import privatize
from ..report import save_report
from ..rules import Abadi
from ..statement import save_statement
from ..thresholds import FixedThreshold
from ..training import PrivateTraining
from ..trials import Trial

TRAIN_SIZE = 1_500
_SPLIT_SEED = 0  # of the public split into training and test images


@dataclass(frozen=True)
class RunResult:
    """What a run may show: released values and public numbers only."""

    test_accuracy: float
    test_size: int
    epsilon: float
    delta: float
    steps: int
    seconds: float
    report: str | None


def load_digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(train images, labels), (test images, labels), pixels in [0, 1]."""
    try:
        from sklearn.datasets import load_digits as bundled
    except ImportError as error:
        raise ImportError("The digits come with scikit-learn: pip install 'clipwise[digits]'.") from error
    data = bundled()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    images = torch.tensor(data.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(data.target, dtype=torch.int64)[order]
    return (images[:TRAIN_SIZE], labels[:TRAIN_SIZE]), (images[TRAIN_SIZE:], labels[TRAIN_SIZE:])


def digits_model() -> nn.Module:
    """A small perceptron."""
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One loss per example."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def trained(
    plan: Plan,
    lr: float,
    ledger: str | Path | None = None,
    progress: Callable[[PrivateTraining, int], None] | None = None,
) -> PrivateTraining:
    """The run itself."""
    train, _ = load_digits()
    model = digits_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    training = privatize(model, optimizer, plan, cross_entropy, ledger=ledger)
    if training.ledger.charges >= plan.steps:
        training.ledger.close()
        raise BudgetExhausted(f"Ledger {ledger} is spent: nothing is left to train with. Give a new --ledger file.")
    for number, batch in enumerate(training.batches(train), start=1):
        training.step(batch)
        if progress is not None:
            progress(training, number)
    return training


def test_accuracy(model: nn.Module) -> float:
    """On the held-out digits, which are declared public."""
    _, (images, labels) = load_digits()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


test_accuracy.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever its name says


def train_trial(trial: Trial) -> PrivateTraining:
    """One run of a search over lr and clip_norm, for `tune`."""
    rule, clip_norm = trial.candidate.get("rule", Abadi()), trial.candidate.get("clip_norm", 1.0)
    return trained(trial.plan(rule=rule, threshold=FixedThreshold(clip_norm)), trial.candidate.get("lr", 0.2))


def train_digits(
    plan: Plan,
    *,
    lr: float = 0.2,
    ledger: str | Path | None = None,
    out: str | Path | None = None,
    progress: Callable[[PrivateTraining, int], None] | None = None,
) -> RunResult:
    """Train on digits under `plan`; write a report to the folder `out`."""
    began = time.perf_counter()
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)  # before anything is spent
    clip_norms: list[float] = []

    def look(run: PrivateTraining, number: int) -> None:
        clip_norms.append(run.clip_norm)
        if progress is not None:
            progress(run, number)

    training = trained(plan, lr, ledger, look)
    accuracy, test_labels = test_accuracy(training.model), load_digits()[1][1]
    seconds = time.perf_counter() - began
    report = None if out is None else str(Path(out) / "report.html")
    result = RunResult(
        accuracy, len(test_labels), training.epsilon, plan.delta, training.ledger.charges, seconds, report
    )
    if out is not None:
        _write_report(Path(out), result, training, clip_norms)
    return result


def _write_report(folder: Path, result: RunResult, training: PrivateTraining, clip_norms: list[float]) -> None:
    save_report(training, folder, title="Digits, trained privately", result=asdict(result), clip_norms=clip_norms)
    torch.save(training.model.state_dict(), folder / "model.pt")
    save_statement(training, folder / "statement.json")
