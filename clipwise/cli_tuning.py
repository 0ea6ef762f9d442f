"""What the command line says about tuning: its price, and a search over the digits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ._show import shown_delta, shown_epsilon
from .accounting import Search, calibrate, calibrate_search, epsilon
from .rules import Rule
from .tuning import TuningPlan, tune


def tuning_costs(*, epsilon: float, delta: float, sampling_prob: float, steps: int, runs: int) -> list[dict[str, Any]]:
    """For each way to pay: σ of a run, and the ε that a run alone would have, for one total (ε, δ)."""
    common: dict[str, Any] = {"delta": delta, "sampling_prob": sampling_prob, "steps": steps}
    searches = {
        "composition, RDP": Search(runs=runs, method="composition"),
        "composition, PLD": Search(runs=runs, method="composition", accountant="pld"),
        "Liu-Talwar": Search(runs=runs, method="liu-talwar"),
        "random stopping, geometric": Search(runs=runs, method="negative-binomial"),
        "random stopping, logarithmic": Search(runs=runs, method="negative-binomial", shape=0.0),
        "random stopping, Poisson": Search(runs=runs, method="poisson"),
    }
    rows = [_row("no tuning: PSAC, AUTO-S, DC-SGD-E", calibrate(epsilon=epsilon, **common), common, 1)]
    for name, search in searches.items():
        mean = 2 * runs if search.method == "liu-talwar" else runs
        try:
            rows.append(_row(name, calibrate_search(search, epsilon=epsilon, **common), common, mean))
        except ValueError as error:
            rows.append({"way": name, "runs": mean, "noise_multiplier": None, "run_epsilon": None, "why": str(error)})
    return rows


def _row(way: str, sigma: float, common: dict[str, Any], runs: float) -> dict[str, Any]:
    return {
        "way": way,
        "runs": runs,
        "noise_multiplier": sigma,
        "run_epsilon": epsilon(noise_multiplier=sigma, **common),
    }


def tuning_table(rows: list[dict[str, Any]], total: float, delta: float) -> str:
    """The rows for people."""
    free = rows[0]["noise_multiplier"]
    lines = [
        f"For a total epsilon of {total:g} at delta {shown_delta(delta)}:",
        f"{'way to choose C':36s}{'runs':>6s}{'noise multiplier':>18s}{'times the noise':>17s}{'one run alone':>18s}",
    ]
    for row in rows:
        sigma = row["noise_multiplier"]
        if sigma is None:
            lines.append(f"{row['way']:36s}{row['runs']:6g}  impossible: the search alone costs more")
            continue
        numbers = f"{sigma:18.4f}{sigma / free:17.2f}{shown_epsilon(row['run_epsilon']):>18s}"
        lines.append(f"{row['way']:36s}{row['runs']:6g}{numbers}")
    return "\n".join([*lines, "runs: how many trainings it takes, on average where the number is random."])


@dataclass(frozen=True)
class DigitsSearch:
    """A search over the digits, ready to run."""

    plan: TuningPlan
    space: dict[str, list[Any]]

    def run(self, ledger: Path | None, out: Path | None) -> dict[str, Any]:
        """Run it; what comes back may be shown."""
        from .recipes import digits

        if out is not None:  # before anything is spent
            out.parent.mkdir(parents=True, exist_ok=True)
            out.touch()
        winner = tune(
            digits.train_trial, self.space, self.plan, digits.test_accuracy, score_is_public=True, ledger=ledger
        )
        chosen = {k: repr(v) if k == "rule" else v for k, v in (winner.candidate or {}).items()}
        if out is not None and winner.candidate is not None:
            torch.save(winner.weights, out)
        weights = None if out is None or winner.candidate is None else str(out)
        shown = {"candidate": chosen, "test_accuracy": winner.score, "epsilon": winner.epsilon, "delta": winner.delta}
        return {**shown, "weights": weights, "privacy_statement": winner.statement}

    def text(self, winner: dict[str, Any]) -> str:
        """The result for people."""
        if not winner["candidate"]:
            return "The secret draw gave no run, so there is no winner. The search is charged all the same."
        chosen = ", ".join(f"{name} {value}" for name, value in winner["candidate"].items())
        lines = [
            f"winner         {chosen}",
            f"test accuracy  {100 * winner['test_accuracy']:.1f}% on held-out digits, which are public",
            f"privacy spent  epsilon = {shown_epsilon(winner['epsilon'])} at delta = {shown_delta(winner['delta'])}, "
            "the whole search",
        ]
        return "\n".join([*lines, f"weights        {winner['weights']}"] if winner["weights"] else lines)


def digits_search(
    method: str, runs: float, rule: Rule, clip_norms: str, lrs: str, numbers: dict[str, Any]
) -> DigitsSearch:
    """From the words of the command line."""
    from .recipes.digits import TRAIN_SIZE

    space: dict[str, list[Any]] = {"rule": [rule], "clip_norm": _numbers("--clip-norms", clip_norms)}
    space["lr"] = _numbers("--lrs", lrs)
    if method in ("composition", "liu-talwar"):
        runs = int(runs) if float(runs).is_integer() else runs
    search = Search(runs=runs, method=method)
    expected = max(numbers["sampling_prob"] * TRAIN_SIZE, 1)
    return DigitsSearch(TuningPlan(expected_batch_size=expected, search=search, **numbers), space)


def _numbers(option: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{option} must be numbers with commas between them, got {text!r}.") from error
