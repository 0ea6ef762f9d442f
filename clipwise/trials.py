"""One run of a search, as a worker does it: train under the given noise, score, and hand back only the outcome."""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .accounting.arithmetic import ROOM, tail_delta
from .errors import ClipwiseError, PlanMismatch
from .evaluation import bounded_sum
from .ledger import charges_of_this_thread
from .noise import NoiseSource
from .plan import Plan
from .statement import arithmetic_delta
from .training import PrivateTraining

Score = Callable[[nn.Module], Any]
Train = Callable[["Trial"], PrivateTraining]


@dataclass(frozen=True)
class Trial:
    """What a run is given: its candidate, the numbers that its plan must have, and a folder that is deleted after it.

    Attributes:
        candidate: the hyper-parameters of this run, by name.
        numbers: σ, δ, q, T and the divisor of the plan: the same for every run of the search. A copy, to be read.
        folder: for the run's own ledger and checkpoints; gone when the run is over.
    """

    candidate: Mapping[str, Any]
    numbers: Mapping[str, Any]
    folder: Path | None = None

    def plan(self, **choices: Any) -> Plan:
        """The plan of this run; `choices` may set rule and threshold, nothing that changes its cost."""
        if wrong := choices.keys() - {"rule", "threshold"}:
            raise PlanMismatch(
                f"A trial's plan takes rule and threshold, not {', '.join(sorted(wrong))}: every run of a search must "
                "cost the same, as the search was calibrated for it."
            )
        return Plan(**self.numbers, accountant="rdp", **choices)


@dataclass(frozen=True)
class Outcome:
    """What a run gives back. Secret, unless it wins."""

    score: float
    candidate: Mapping[str, Any]
    weights: dict[str, Tensor] = field(default_factory=dict, repr=False)
    asserted: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    error: str | None = None  # without the words of an exception that may hold data


@dataclass(frozen=True)
class NoisyScore:
    """A score that is itself released from private data: Σ of values in [0, 1], one per record, plus noise."""

    noise_multiplier: float
    size: float  # the declared divisor

    def __call__(self, values: Any) -> float:
        """Mean of the values, with noise on their sum; one record changes the sum by at most 1."""
        given = torch.as_tensor(values, dtype=torch.float64).detach().cpu()
        if given.dim() != 1:
            raise PlanMismatch(f"A private score needs one value per record, a vector; got {given.dim()} axes.")
        total = bounded_sum(torch.where(torch.isfinite(given), given, 0.0))
        noised = NoiseSource().add_(
            {"score": torch.tensor([total], dtype=torch.float64)},
            sensitivity=1.0,
            noise_multiplier=self.noise_multiplier,
            sequence=0,
            stream="score",
        )
        return float(noised["score"]) / self.size


def score_tail_delta(noise_multiplier: float) -> float:
    """What the finite tails of the noise add to δ over the scores of a thousand runs."""
    return tail_delta(reach=NoiseSource().reach, noise_multiplier=noise_multiplier, steps=1000, dimension=1)


def run_trial(train: Train, score: Score, noisy: NoisyScore | None, trial: Trial) -> Outcome:
    """Train and score one candidate. A failure is an outcome too, the worst one: it must not stop the search."""
    folder = Path(tempfile.mkdtemp(dir=_made(trial.folder)))
    before = charges_of_this_thread()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # how often one is printed would tell how many runs there are
            training = train(Trial(copy.deepcopy(dict(trial.candidate)), dict(trial.numbers), folder))
            _check(training, trial, charges_of_this_thread() - before)
            # before the score, which may write into the model what it has seen
            weights = {name: x.detach().cpu().clone() for name, x in training.model.state_dict().items()}
            with torch.no_grad():
                found = score(training.model)
            value = float(found) if noisy is None else noisy(found)
        asserted, notes = dict(training.ledger.head["assertions"]), tuple(training.ledger.notes)
        training.ledger.close()
        return Outcome(-math.inf if math.isnan(value) else value, trial.candidate, weights, asserted, notes)
    except ClipwiseError as error:
        return Outcome(-math.inf, trial.candidate, error=f"{type(error).__name__}: {error}")
    except (Exception, SystemExit) as error:
        return Outcome(-math.inf, trial.candidate, error=type(error).__name__)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _made(folder: Path | None) -> Path | None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)  # on a worker of another machine it is not there yet
    return folder


def _check(training: Any, trial: Trial, charges: int) -> None:
    """The run must have trained once, in private, under the search's own numbers."""
    if not isinstance(training, PrivateTraining):
        raise PlanMismatch(
            f"train(trial) must return the PrivateTraining of privatize(model, optimizer, trial.plan(...), loss_fn), "
            f"got {type(training).__name__}."
        )
    for name, wanted in trial.numbers.items():
        if (used := getattr(training.plan, name)) != wanted:
            raise PlanMismatch(
                f"The run trained with {name}={used!r}, but the search allows {wanted!r}: use trial.plan()."
            )
    if training.plan.evaluations or training.ledger.looks:
        raise PlanMismatch(
            "A run of a search must not look at private records by private_score: the search has not paid for it. Give "
            "the search itself a noisy score (score_noise)."
        )
    if 1e4 * arithmetic_delta(training.plan, training._noise, training.model) > ROOM / 2 * training.plan.delta:
        raise PlanMismatch(
            "The tails of the noise end too early for so little noise and so many runs: use noise='hardened'."
        )
    if training.plan.noise_decay != 1 or training.plan.adjacency != "add_or_remove_one":
        raise PlanMismatch("The run's noise or adjacency is not the search's: use trial.plan().")
    if charges > trial.numbers["steps"]:
        raise PlanMismatch(
            f"One run of the search charged {charges} steps, but the search pays for {trial.numbers['steps']}: train "
            "one model per trial."
        )
    if charges != training.ledger.charges:  # under another plan, or in another thread
        raise PlanMismatch(
            f"The run that a trial returned holds {training.ledger.charges} charges, but the thread of train(trial) "
            f"made {charges}. Train one model per trial, under trial.plan() alone, in the thread that calls train."
        )
    if bad := training.ledger.head["assertions"].keys() & {"seed", "noise"}:
        raise PlanMismatch(f"A run of a search must be private: leave out {' and '.join(sorted(bad))} in privatize().")
