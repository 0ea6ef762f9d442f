"""Tables, drawn from result files only: `python -m experiments table tuning`."""

from __future__ import annotations

import statistics
from pathlib import Path

from .results_io import RESULTS, load


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


TABLES = {"tuning": tuning_table, "models": models_table}
