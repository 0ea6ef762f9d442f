"""Tables, drawn from result files only: `python -m experiments table tuning`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from .papers import LABELS, PRINTED, TASKS
from .results_io import RESULTS, load
from .runs import rows_of


def tuning_table(results: Path = RESULTS) -> str:
    """Tuning-free methods against tuned Abadi, in Markdown."""
    found = load("tuning", results)
    lines = ["| method | noise multiplier of a run | test accuracy | n |", "|---|---|---|---|"]
    for name, row in found["rows"].items():
        lines.append(f"| {name} | {row['noise_multiplier']:.2f} | {_mean(row['accuracy'])} | {len(row['accuracy'])} |")
    unpaid = {c: statistics.mean(values) for c, values in found["unpaid"].items()}
    best, worst = max(unpaid, key=unpaid.__getitem__), min(unpaid, key=unpaid.__getitem__)
    sigma = found["rows"]["PSAC"]["noise_multiplier"]
    for label, c in (("best", best), ("worst", worst)):
        name = f"Abadi at the {label} of ten C ({c}), tuning NOT paid for: not private at this ε"
        lines.append(f"| {name} | {sigma:.2f} | {_mean(found['unpaid'][c])} | {len(found['unpaid'][c])} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f}% ± {100 * spread:.1f}"


def models_table(results: Path = RESULTS) -> str:
    """Which models can be trained, with the error of each."""
    found = load("models", results)
    lines = ["| model | norms | clipped sum | |", "|---|---|---|---|"]
    for name, row in found["rows"].items():
        if "refused" in row:
            lines.append(f"| {name} | | | refused: {row['refused'].split(', for which')[0].split('. ')[0]} |")
        else:
            lines.append(f"| {name} | {row['norms']:.0e} | {row['sum']:.0e} | |")
    return "\n".join(lines)


def papers_table(tasks: Sequence[str], results: Path = RESULTS) -> str:
    """Ours beside the papers', with n; PSAC is also compared with each other method seed by seed."""
    lines = ["| task | method | ours | n | PSAC − method, pairs | printed |", "|---|---|---|---|---|---|"]
    for task in tasks:
        found: dict[str, dict[tuple[int, str], float]] = {}  # noise differs between devices, so pairs do not
        for row in rows_of(task, results):
            if not row["settings"]:
                found.setdefault(row["method"], {})[row["seed"], row["device"]] = 100 * row["accuracy"]
        for method in LABELS:
            if method not in found and method not in PRINTED[task]:
                continue
            ours, printed = found.get(method, {}), PRINTED[task].get(method)
            pairs = [found["psac"][s] - v for s, v in ours.items() if s in found.get("psac", {}) and method != "psac"]
            lines.append(
                f"| {TASKS[task]} | {LABELS[method]} | {_spread(list(ours.values()))} | {len(ours)} | "
                f"{_interval(pairs)} | {'' if printed is None else _printed(*printed)} |"
            )
    return "\n".join(lines)


def _spread(values: list[float]) -> str:
    if not values:
        return "not run"
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def _interval(differences: list[float]) -> str:
    """Mean and 95% interval by Student's t; nothing for fewer than three pairs."""
    if len(differences) < 3:
        return ""
    from scipy import stats

    half = stats.t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.mean(differences):+.2f} ± {half:.2f}"


def _printed(mean: float, spread: float | None) -> str:
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"


TABLES = {
    "tuning": tuning_table,
    "models": models_table,
    "P2": partial(papers_table, ("mnist", "fashion_mnist")),
    "D8": partial(papers_table, ("mnist_dc", "cifar10_dc", "names_dc")),
}
