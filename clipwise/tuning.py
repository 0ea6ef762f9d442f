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
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._check import count, open_unit, positive, probability
from ._show import shown_delta, shown_epsilon
from .accounting.arithmetic import ROOM, accounted
from .accounting.tuning import Search, calibrate_search, tuning_epsilon
from .errors import BudgetExhausted, TuningFailed
from .ledger import Ledger
from .plan import declared
from .sampling import Coins
from .trials import NoisyScore, Outcome, Score, Train, Trial, run_trial, score_tail_delta

_DEATHS = 3  # how often runs are begun again when no worker lived to finish one


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
        self._set("epsilon", positive(epsilon=self.epsilon))
        self._set("delta", open_unit(delta=self.delta))
        self._set("sampling_prob", probability(sampling_prob=self.sampling_prob))
        self._set("steps", count(steps=self.steps))
        self._set("expected_batch_size", positive(expected_batch_size=self.expected_batch_size))
        if (self.score_noise is None) != (self.score_size is None):
            raise ValueError("Give score_noise and score_size together: a noisy score needs both.")
        if self.score_noise is not None and self.score_size is not None:
            self._set("score_noise", positive(score_noise=self.score_noise))
            self._set("score_size", positive(score_size=self.score_size))
            if (extra := score_tail_delta(self.score_noise)) > ROOM / 2 * self.delta:
                raise ValueError(
                    f"score_noise={self.score_noise:g} is so small that the tails of the noise would add {extra:.1e} "
                    f"to delta={self.delta:g}. Give the score more noise."
                )
        release = {"sampling_prob": self.sampling_prob, "steps": self.steps, "delta": accounted(self.delta)}
        sigma = calibrate_search(self.search, epsilon=self.epsilon, score_noise=self.score_noise, **release)  # type: ignore[arg-type]
        self._set("noise_multiplier", sigma)
        spent = tuning_epsilon(self.search, noise_multiplier=sigma, score_noise=self.score_noise, **release)  # type: ignore[arg-type]
        self._set("spent", spent)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

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

    @property
    def most_looks(self) -> int:
        """None beside the search itself."""
        return 0

    def epsilon_after(self, steps: int, looks: int = 0) -> float:
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
            "not_covered": "how long the search took, which hints at the secret number of runs; workers that die, or "
            "runs that fail, for reasons that lie in the data; what train() and score() print or keep",
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
            in [0, 1] for each private record, and of that record alone: for this you vouch. The winner's weights are
            those from before its score.
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
    if executor is None:
        _check_pickles(train, score)
    noisy = None
    if plan.score_noise is not None and plan.score_size is not None:
        noisy = NoisyScore(plan.score_noise, plan.score_size)
    word = "declared to be public" if score_is_public else "values asserted to be of one record each"
    book = Ledger(plan, ledger, {"score": word})
    folder = Path(tempfile.mkdtemp(prefix="clipwise-search-"))
    try:
        if book.charges:
            raise BudgetExhausted(
                f"Ledger {ledger} holds a search that is spent whole (epsilon={shown_epsilon(plan.spent)}). Another "
                "search needs another ledger, and a budget of its own."
            )
        trials = _drawn(candidates, space, plan, Coins(), folder)
        book.reserve()
        book.commit(event="selection")
        best = _best(trials, lambda trial: (run_trial, train, score, noisy, trial), executor)
        for note in best.notes if best is not None else ():
            book.note(f"the winner's run: {note}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        book.close()
    return _released(plan, best, book)


def _released(plan: TuningPlan, best: Outcome | None, book: Ledger) -> Winner:
    if best is not None and best.error is not None:
        raise TuningFailed(
            f"Every run of the search failed; the selected one with {best.error}. The search is charged. Try train() "
            "on made-up data first: what an exception says about private records is not shown here."
        )
    asserted = {**book.head["assertions"], **(best.asserted if best is not None else {})}
    statement = plan.statement() | {"asserted_by_user": asserted, "notes": list(book.notes)}
    statement["certified"] = not asserted and not book.notes
    if not statement["certified"]:
        statement["guarantee"] += ", provided that what the user asserted is true"
    if best is None:
        return Winner(None, -math.inf, {}, plan.spent, plan.delta, statement)
    return Winner(best.candidate, best.score, best.weights, plan.spent, plan.delta, statement)


def _check_pickles(train: Train, score: Score) -> None:
    """Before anything is charged: worker processes get functions by name."""
    try:
        pickle.dumps((train, score))
    except Exception as error:
        raise TypeError(
            f"train and score must be functions of a module, so that worker processes can import them ({error}). "
            "Or pass executor=ThreadPoolExecutor(1)."
        ) from error


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


def _drawn(
    grid: list[dict[str, Any]] | None, space: Space, plan: TuningPlan, coins: Coins, folder: Path
) -> list[Trial]:
    """The secret draw: how many runs, and a candidate for each, independent of the data."""
    names = ("noise_multiplier", "delta", "sampling_prob", "steps", "expected_batch_size")
    numbers = {name: getattr(plan, name) for name in names}
    runs = plan.search.number_of_runs(coins.uniform())
    if grid is not None and plan.search.method == "composition":
        return [Trial(candidate, numbers, folder) for candidate in grid]
    drawn = [{name: _chosen(values, coins.uniform()) for name, values in space.items()} for _ in range(runs)]
    return [Trial(candidate, numbers, folder) for candidate in drawn]


def _chosen(values: Sequence[Any] | LogUniform, coin: float) -> Any:
    return values.at(coin) if isinstance(values, LogUniform) else values[int(coin * len(values))]


def _best(
    trials: list[Trial],
    call: Callable[[Trial], tuple[Any, ...]],
    executor: Executor | Callable[[], Executor] | None,
) -> Outcome | None:
    """Run all trials; keep only the best outcome so far, the earliest drawn of equals.

    Runs whose worker died are begun again, all together, until nothing comes back any more.
    """
    make = _processes if executor is None else executor if not isinstance(executor, Executor) else None
    workers: Executor = make() if make is not None else executor  # type: ignore[assignment]
    waiting, barren = dict(enumerate(trials)), 0
    best: tuple[tuple[bool, float, int], Outcome] | None = None
    try:
        while waiting:
            before = len(waiting)
            futures, broken = _submitted(workers, waiting, call)
            for future in as_completed(list(futures)):
                number = futures.pop(future)
                try:
                    outcome = future.result()
                except Exception as error:  # run_trial catches its own: this is the worker or its machine
                    broken = error
                    continue
                del waiting[number]
                place = (outcome.error is None, outcome.score, -number)
                if best is None or place > best[0]:
                    best = (place, outcome)
            barren = barren + 1 if len(waiting) == before else 0
            if barren > _DEATHS or isinstance(broken, (pickle.PicklingError, TypeError, AttributeError)):
                raise TuningFailed(
                    f"Workers cannot run the search ({type(broken).__name__}). The search is charged."
                ) from broken
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
    return None if best is None else best[1]


def _submitted(
    workers: Executor, waiting: Mapping[int, Trial], call: Callable[[Trial], tuple[Any, ...]]
) -> tuple[dict[Future[Outcome], int], BaseException | None]:
    futures: dict[Future[Outcome], int] = {}
    for number, trial in waiting.items():
        try:
            futures[workers.submit(*call(trial))] = number
        except BrokenExecutor as error:
            return futures, error
    return futures, None


def _processes() -> Executor:
    """As many processes as there are cores, each with one thread."""
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(os.cpu_count(), mp_context=context, initializer=torch.set_num_threads, initargs=(1,))
