"""Tables of the DC-SGD paper that compare choices: what a search costs (I–III), fixed C and p (IV, V), NAMES."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .papers import D8, LABELS, Cell
from .results_io import RESULTS
from .runs import rows_of
from .sweeps import GRID_C, NAMES_CHANGES, NARROW, NARROW_CHANGES, PAID_TASKS, SEARCHES, fixed, names, paid
from .tables import accuracies, interval, ran_on, spread

SEARCHED = {"composition": "all runs composed (RDP)", "liu-talwar": "a secret number of runs (LT)"}
UNTUNED = ("dc-sgd-e", "auto-s", "psac")


def expected_best(found: Sequence[float], search: str) -> float:
    """The accuracy of the winner, on average over the coins of a search whose candidates score `found`.

    Composition tries each once. Liu & Talwar draw candidates with replacement, and stop after each run with
    probability γ = 1/(2·G): P[every run scores ≤ x] = Σ_k γ(1 − γ)^(k−1)·F(x)^k = γF/(1 − (1 − γ)F).

    >>> expected_best([1.0, 2.0], "composition"), round(expected_best([1.0, 2.0], "liu-talwar"), 3)
    (2.0, 1.8)
    """
    ordered, n = sorted(found), len(found)
    if search == "composition":
        return ordered[-1]
    gamma = 1 / (2 * n)
    below = [gamma * f / (1 - (1 - gamma) * f) for f in (k / n for k in range(n + 1))]
    return sum(value * (q - p) for value, (p, q) in zip(ordered, itertools.pairwise(below), strict=True))


def _cell(task: str, epsilon: float | None = None) -> Cell:
    """Of table VIII, at the ε of the searches unless told."""
    wanted = PAID_TASKS[task] if epsilon is None else epsilon
    return next(c for c in D8 if c.recipe == task and c.settings["epsilon"] == wanted)


def _rows(task: str, method: str, settings: Mapping[str, Any], results: Path) -> list[dict[str, Any]]:
    return [r for r in rows_of(task, results) if r["method"] == method and r["settings"] == settings]


def _sigma(rows: Sequence[Mapping[str, Any]]) -> str:
    return f"{rows[0]['noise_multiplier']:.2f}" if rows else ""


def searched(task: str, search: str, results: Path = RESULTS) -> dict[int, dict[float, float]]:
    """Percent by seed and clip norm, of the seeds whose search is whole."""
    by_norm = {s["clip_norm"]: accuracies(task, m, s, results) for _, m, s in paid(task, search)}
    seeds = sorted(set.intersection(*(set(found) for found in by_norm.values())))
    return {seed: {c: found[seed] for c, found in by_norm.items()} for seed in seeds}


def paid_table(results: Path = RESULTS) -> str:
    """D tables II and III: Abadi with C searched for at a price, against methods that have nothing to search for."""
    lines = ["| task | method | noise multiplier | accuracy | n | C that won |", "|---|---|---|---|---|---|"]
    for task in PAID_TASKS:
        cell = _cell(task)
        for search in SEARCHES:
            found = searched(task, search, results)
            best = [expected_best(list(one.values()), search) for one in found.values()]
            won = ", ".join(f"{max(one, key=one.__getitem__):g}" for one in found.values())
            sigma = _sigma(_rows(task, "abadi", paid(task, search)[0][2], results))
            name = f"Abadi, {len(GRID_C)} values of C, {SEARCHED[search]}"
            lines.append(f"| {cell.label} | {name} | {sigma} | {spread(best)} | {len(best)} | {won} |")
        for method in ("abadi", *UNTUNED):
            ours = accuracies(task, method, cell.settings, results)
            sigma = _sigma(_rows(task, method, cell.settings, results))
            name = f"{LABELS[method]}, {'C = 1 for granted' if method == 'abadi' else 'no search'}"
            lines.append(f"| {cell.label} | {name} | {sigma} | {spread(ours.values())} | {len(ours)} | |")
    return "\n".join(lines)


def time_table(results: Path = RESULTS) -> str:
    """D table I: how long a search takes, as runs times the median of their times, on one core, against one run."""
    lines = ["| task | what | machine | runs | seconds | against DC-SGD-E |", "|---|---|---|---|---|---|"]
    for task in PAID_TASKS:
        rows = [r for r in rows_of(task, results) if r["device"] == "cpu" and r["seed"] == 0]
        one = [r for r in rows if r["method"] == "dc-sgd-e" and r["settings"] == _cell(task).settings]
        for search in SEARCHES:
            tried = [r for r in rows if r["settings"].get("search") == search]
            if len(tried) < len(GRID_C) or not one:
                continue
            label, machine = _cell(task).label, tried[0]["machine"]
            runs = 2 * len(tried) if search == "liu-talwar" else len(tried)  # LT: the mean number of runs
            seconds = runs * statistics.median(r["seconds"] for r in tried)
            name = f"search over C, {SEARCHED[search]}"
            lines.append(
                f"| {label} | {name} | {machine} | {runs} | {seconds:.0f} | {seconds / one[0]['seconds']:.1f}× |"
            )
            if search == SEARCHES[-1]:
                lines.append(f"| {label} | DC-SGD-E | {machine} | 1 | {one[0]['seconds']:.0f} | 1.0× |")
    return "\n".join(lines) if len(lines) > 2 else "Not run."


def fixed_table(results: Path = RESULTS) -> str:
    """D tables IV and V: other clip norms and percentiles than those of table VIII."""
    lines = ["| task | method | setting | accuracy | n | on a |", "|---|---|---|---|---|---|"]
    usual = {"abadi": ("clip_norm", 1.0), "dc-sgd-p": ("percentile", 0.5)}
    for task in dict.fromkeys(point[0] for point in fixed()):
        points = [(m, s) for t, m, s in fixed() if t == task]
        for method, (knob, value) in usual.items():
            same = {"epsilon": points[0][1]["epsilon"]}
            every = sorted([(value, same), *((s[knob], s) for m, s in points if m == method)], key=lambda p: p[0])
            for at, settings in every:
                ours = accuracies(task, method, settings, results)
                label, sign = _cell(task, same["epsilon"]).label, "C" if knob == "clip_norm" else "p"
                shown, where = spread(ours.values()), ran_on(task, method, settings, results)
                lines.append(f"| {label} | {LABELS[method]} | {sign} = {at:g} | {shown} | {len(ours)} | {where} |")
    return "\n".join(lines)


def names_table(results: Path = RESULTS) -> str:
    """NAMES with one choice changed at a time."""
    lines = ["| changed | method | accuracy | n | on a | changed − ours, pairs |", "|---|---|---|---|---|---|"]
    methods = tuple(dict.fromkeys(point[1] for point in names()))
    for label, change in {"nothing": {}, **NAMES_CHANGES}.items():
        for method in methods:
            ours = accuracies("names_dc", method, {"epsilon": 8.0}, results)
            found = accuracies("names_dc", method, {"epsilon": 8.0} | change, results)
            pairs = [found[s] - ours[s] for s in found if s in ours and change]
            apart = interval(pairs) or ", ".join(f"{v:+.2f}" for v in pairs)
            where = ran_on("names_dc", method, {"epsilon": 8.0} | change, results)
            if pairs and where != ran_on("names_dc", method, {"epsilon": 8.0}, results):
                apart = f"{statistics.mean(found.values()) - statistics.mean(ours.values()):+.2f}, no pairs"
            shown = spread(found.values())
            lines.append(f"| {label} | {LABELS[method]} | {shown} | {len(found)} | {where} | {apart} |")
    return "\n".join(lines)


def narrow_rows(change: Mapping[str, Any], results: Path = RESULTS, method: str = "abadi") -> dict[int, dict[str, Any]]:
    """By seed, of the small LSTM on a CPU."""
    return {r["seed"]: r for r in _rows("names_dc", method, {**NARROW, **change}, results) if r["device"] == "cpu"}


def narrow_table(results: Path = RESULTS) -> str:
    """The small LSTM with one choice changed at a time, and how well it does where every language counts alike."""
    lines = ["| changed | accuracy | n | changed − nothing, pairs | languages alike |", "|---|---|---|---|---|"]
    ours = narrow_rows({}, results)
    for label, change in {"nothing": {}, **NARROW_CHANGES}.items():
        found = narrow_rows(change, results)
        pairs = [100 * (found[s]["accuracy"] - ours[s]["accuracy"]) for s in found if s in ours and change]
        apart = interval(pairs) or ", ".join(f"{v:+.2f}" for v in pairs)
        shown, alike = (spread(100 * r[k] for r in found.values()) for k in ("accuracy", "balanced"))
        lines.append(f"| {label} | {shown} | {len(found)} | {apart} | {alike} |")
    return "\n".join(lines)


DC_TABLES: dict[str, Callable[..., str]] = {
    "D1": time_table,
    "D2": paid_table,
    "D4": fixed_table,
    "names": names_table,
    "names_narrow": narrow_table,
}
