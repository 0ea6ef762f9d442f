"""tune(): search over hyper-parameters, pay for it, and release only the winner.

Data flow: TuningPlan solves σ of each run from the total (ε, δ) → the whole search is charged, once,
before the first run → a secret coin draws the number of runs and their candidates → workers train and
score → the best outcome is released. The number of runs, the losers and their ledgers are never shown
and are gone when `tune` returns. How long the search took hints at the number of runs: do not publish it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._check import count, open_unit, positive, probability
from ._show import shown_delta, shown_epsilon
from .accounting.tuning import Search, calibrate_search, tuning_epsilon
from .errors import TuningFailed
from .ledger import Ledger
from .plan import declared
from .sampling import Coins
from .trials import NoisyScore, Outcome, Score, Train, Trial, run_trial

_DEATHS = 3  # how often one run is begun again after its worker died


@dataclass(frozen=True)
class LogUniform:
    """A random space: uniform in the logarithm, between low and high."""

    low: float
    high: float

    def __post_init__(self) -> None:
        """0 < low < high."""
        if positive(low=self.low) >= positive(high=self.high):
            raise ValueError(f"low must lie below high, got {self.low!r} and {self.high!r}.")

    def at(self, coin: float) -> float:
        """The value for a uniform coin."""
        return float(self.low * (self.high / self.low) ** coin)


Space = Mapping[str, Sequence[Any] | LogUniform]


@dataclass(frozen=True, kw_only=True)
class TuningPlan:
    """Every public number of a search. `epsilon` and `delta` are those of the WHOLE search, winner released.

    Guarantee: `noise_multiplier`, the same for every run, is solved so that the search never exceeds `epsilon`.

    Attributes:
        epsilon: the target; `spent` is what the search achieves.
        delta: δ of the whole search.
        sampling_prob: q of every run.
        steps: T of every run.
        expected_batch_size: the divisor of every run.
        search: how many runs, and how their number is chosen.
        score_noise: None if scores come from data that is declared public; else the noise multiplier of the score.
        score_size: the declared number of records behind a noisy score.
    """

    epsilon: float
    delta: float
    sampling_prob: float
    steps: int
    expected_batch_size: float
    search: Search = field(default_factory=Search)
    score_noise: float | None = None
    score_size: float | None = None
    noise_multiplier: float = field(init=False)
    spent: float = field(init=False)

    def __post_init__(self) -> None:
        """Check every number, then solve σ."""
        positive(epsilon=self.epsilon)
        open_unit(delta=self.delta)
        probability(sampling_prob=self.sampling_prob)
        count(steps=self.steps)
        positive(expected_batch_size=self.expected_batch_size)
        if (self.score_noise is None) != (self.score_size is None):
            raise ValueError("Give score_noise and score_size together: a noisy score needs both.")
        if self.score_noise is not None and self.score_size is not None:
            positive(score_noise=self.score_noise)
            positive(score_size=self.score_size)
        release = {"sampling_prob": self.sampling_prob, "steps": self.steps, "delta": self.delta}
        sigma = calibrate_search(self.search, epsilon=self.epsilon, score_noise=self.score_noise, **release)  # type: ignore[arg-type]
        object.__setattr__(self, "noise_multiplier", sigma)
        spent = tuning_epsilon(self.search, noise_multiplier=sigma, score_noise=self.score_noise, **release)  # type: ignore[arg-type]
        object.__setattr__(self, "spent", spent)

    @classmethod
    def for_dataset(cls, *, size: int, batch_size: int, epochs: float, **others: Any) -> TuningPlan:
        """As Plan.for_dataset: `size` is declared public."""
        return cls(**declared(size, batch_size, epochs), **others)

    @property
    def most_charges(self) -> int:
        """A search is charged once, whole."""
        return 1

    @property
    def accountant(self) -> str:
        """Of the search."""
        return self.search.accountant

    def epsilon_after(self, steps: int) -> float:
        """A search that has begun is spent whole."""
        return self.spent if steps else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All public numbers."""
        return asdict(self)

    @property
    def digest(self) -> str:
        """A fingerprint of what was given."""
        return hashlib.sha256(json.dumps(self.as_dict(), sort_keys=True).encode()).hexdigest()

    def statement(self) -> dict[str, Any]:
        """What can be promised about the winner, and what cannot."""
        score = "on data declared public by the user" if self.score_noise is None else "noisy, and paid for"
        return {
            "guarantee": f"({shown_epsilon(self.spent)}, {shown_delta(self.delta)})-differential privacy of the winner",
            "event": f"selection by {self.search.method}",
            **self.as_dict(),
            "unit": "one example; a person with several examples is NOT covered as one",
            "adjacency": "add_or_remove_one",
            "score": score,
            "not_covered": "how long the search took, which hints at the secret number of runs; workers that die for "
            "reasons that lie in the data",
        }

    def __str__(self) -> str:
        """A privacy statement that can be read aloud."""
        runs = f"{self.search.runs:g}" if not self.search.secret_runs else f"a secret number ({self._about()})"
        score = "public data, as declared" if self.score_noise is None else f"noisy, multiplier {self.score_noise:g}"
        return "\n".join(
            (
                f"Search: ({shown_epsilon(self.spent)}, {shown_delta(self.delta)})-DP for the winner, by "
                f"{self.search.method} (target {self.epsilon:g})",
                "  privacy unit    one example, add-or-remove-one",
                f"  runs            {runs}; losers are never shown",
                f"  each run        {self.steps} steps, noise multiplier {self.noise_multiplier:.4f}, q "
                f"{self.sampling_prob:.6g}",
                f"  score           {score}",
            )
        )

    def _about(self) -> str:
        return (
            f"{2 * self.search.runs:g} on average"
            if self.search.method == "liu-talwar"
            else f"mean {self.search.runs:g}"
        )


@dataclass(frozen=True)
class Winner:
    """What a search releases. `candidate` is None if the secret draw gave no run at all (Poisson only)."""

    candidate: Mapping[str, Any] | None
    score: float
    weights: dict[str, Tensor] = field(repr=False)
    epsilon: float
    delta: float
    statement: dict[str, Any] = field(repr=False)


def tune(
    train: Train,
    space: Space,
    plan: TuningPlan,
    score: Score,
    *,
    score_is_public: bool = False,
    executor: Executor | Callable[[], Executor] | None = None,
    ledger: str | Path | None = None,
) -> Winner:
    """Search `space`, and release the run with the highest score.

    Guarantee: the winner (weights, candidate and score together) is (`plan.spent`, `plan.delta`)-DP. The search is
    charged whole before its first run, so a crash has paid for it; the same ledger refuses a second one.

    A run whose worker dies is begun again with new noise, inside the same draw: its first attempt gave nothing to
    anyone. That is right as long as workers do not die because of what a record holds.

    Args:
        train: train(trial) → the PrivateTraining that it made with trial.plan(...). It runs in a worker.
        space: names → values to choose from (a grid), or LogUniform(low, high).
        plan: every public number of the search.
        score: score(model) → a number, the larger the better, from public data; or, with plan.score_noise, a value
            in [0, 1] for each private record.
        score_is_public: you declare that `score` looks at public data only. Needed unless plan.score_noise is given.
        executor: any concurrent.futures.Executor, or a function that makes one; None: processes on this machine.
        ledger: a path, so that the charge survives.
    """
    if (plan.score_noise is None) != score_is_public:
        raise ValueError(
            "Say where scores come from: score_is_public=True for data that is public, or TuningPlan(score_noise=..., "
            "score_size=...) for private data, whose score is then noised and paid for. Not both."
        )
    candidates = _checked(space, plan.search)
    book = Ledger(plan, ledger, {"score": "declared to be public"} if score_is_public else {})
    try:
        book.reserve()
        book.commit(event="selection")
        coins = Coins()
        trials = _drawn(candidates, space, plan, coins)
        noisy = None
        if plan.score_noise is not None and plan.score_size is not None:
            noisy = NoisyScore(plan.score_noise, plan.score_size)
        best = _best(trials, lambda trial: (run_trial, train, score, noisy, trial), executor)
    finally:
        book.close()
    if best is not None and best.error is not None:
        raise TuningFailed(f"Every run of the search failed; the selected one with {best.error}")
    statement = plan.statement() | {"asserted_by_user": {**book.head["assertions"], **(best.asserted if best else {})}}
    if best is None:
        return Winner(None, -math.inf, {}, plan.spent, plan.delta, statement)
    return Winner(best.candidate, best.score, best.weights, plan.spent, plan.delta, statement)


def _checked(space: Space, search: Search) -> list[dict[str, Any]] | None:
    """The whole grid, or None for a random space."""
    if not isinstance(space, Mapping) or not space:
        raise ValueError("space must map names to lists of values or LogUniform(low, high).")
    lists = {name: values for name, values in space.items() if not isinstance(values, LogUniform)}
    if empty := [name for name, values in lists.items() if isinstance(values, str) or not len(values)]:
        raise ValueError(f"space[{empty[0]!r}] must be a list of at least one value.")
    if len(lists) < len(space):
        return None
    grid = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    if search.method == "composition" and len(grid) != search.runs:
        raise ValueError(
            f"The grid has {len(grid)} candidates, but Search(runs={search.runs:g}) pays for another number."
        )
    return grid


def _drawn(grid: list[dict[str, Any]] | None, space: Space, plan: TuningPlan, coins: Coins) -> list[Trial]:
    """The secret draw: how many runs, and a candidate for each, independent of the data."""
    names = ("noise_multiplier", "delta", "sampling_prob", "steps", "expected_batch_size")
    numbers = {name: getattr(plan, name) for name in names}
    runs = plan.search.number_of_runs(coins.uniform())
    if grid is not None and plan.search.method == "composition":
        return [Trial(candidate, numbers) for candidate in grid]
    return [Trial({name: _chosen(v, coins.uniform()) for name, v in space.items()}, numbers) for _ in range(runs)]


def _chosen(values: Sequence[Any] | LogUniform, coin: float) -> Any:
    return values.at(coin) if isinstance(values, LogUniform) else values[int(coin * len(values))]


def _best(
    trials: list[Trial],
    call: Callable[[Trial], tuple[Any, ...]],
    executor: Executor | Callable[[], Executor] | None,
) -> Outcome | None:
    """Run all trials; keep only the best outcome so far, the earliest drawn of equals."""
    make = _processes if executor is None else executor if not isinstance(executor, Executor) else None
    workers: Executor = make() if make is not None else executor  # type: ignore[assignment]
    waiting, deaths = dict(enumerate(trials)), dict.fromkeys(range(len(trials)), 0)
    best: tuple[float, int, Outcome] | None = None
    try:
        while waiting:
            futures: dict[Future[Outcome], int] = {}
            broken: BaseException | None = None
            for number, trial in waiting.items():
                try:
                    futures[workers.submit(*call(trial))] = number
                except BrokenExecutor as error:
                    broken = error
                    break
            for future in as_completed(futures):
                number = futures[future]
                try:
                    outcome = future.result()
                except Exception as error:  # run_trial catches its own: this is the worker or its machine
                    broken = error
                    deaths[number] += 1
                    if deaths[number] > _DEATHS:
                        raise TuningFailed(
                            f"A run was begun {_DEATHS + 1} times, and its worker died every time "
                            f"({type(error).__name__}). The search is charged."
                        ) from error
                    continue
                del waiting[number]
                if best is None or (outcome.score, -number) > (best[0], -best[1]):
                    best = (outcome.score, number, outcome)
            if isinstance(broken, BrokenExecutor):
                if make is None:
                    raise TuningFailed(
                        "The executor broke and cannot be made again from here: pass a function that makes one. "
                        "The search is charged."
                    ) from broken
                workers.shutdown(wait=False, cancel_futures=True)
                workers = make()
    finally:
        if make is not None:
            workers.shutdown(wait=True, cancel_futures=True)
    return None if best is None else best[2]


def _processes() -> Executor:
    """As many processes as there are cores, each with one thread."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(os.cpu_count(), mp_context=context, initializer=torch.set_num_threads, initargs=(1,))
