"""Figures of the DC-SGD paper on real data: the grid that a search walks, knobs of the histogram, levels of ε."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .paint import COLORS, LINES, heatmap, panels
from .papers import D8, LABELS
from .sweeps import (
    DC_KNOBS,
    GRID_C,
    GRID_NORMS,
    GRID_RATES,
    KNOB_TASKS,
    PAID_TASKS,
    SEARCHES,
    knob_settings,
    knobs_of,
    paid,
)
from .tables import by_seed

Rows = Sequence[Mapping[str, Any]]
METHOD_COLORS = dict(zip(("abadi", "auto-s", "psac", "dc-sgd-p", "dc-sgd-e"), LINES[:2] + LINES[3:], strict=True))
FREE = ("dc-sgd-e", "psac")  # what has no C to choose
TASKS = {"mnist": "mnist_dc", "names": "names_dc", "cifar10": "cifar10_dc"}  # by their data


def grid_cells(rows: Rows) -> dict[str, list[float]]:
    """Percent over the learning rates, seed 0: Abadi at each C, then what has none."""
    same = {"epsilon": 1.0, "epochs": 5}
    lines = {f"C = {c:g}": ("abadi", {"clip_norm": c}) for c in GRID_NORMS}
    lines |= {LABELS[m]: (m, {}) for m in FREE}
    return {
        name: [by_seed(rows, m, same | {"lr": e} | change).get(0, float("nan")) for e in GRID_RATES]
        for name, (m, change) in lines.items()
    }


def grid_figure(found: dict[str, Any]) -> Any:
    """D figure 1, on MNIST: which C is best depends on the learning rate; below, what has no C to choose."""
    from matplotlib.figure import Figure

    cells = grid_cells(found["rows"])
    figure = Figure(figsize=(6.4, 4.4))
    axis = figure.subplots()
    heatmap(axis, list(cells.values()), low=10, high=100)
    axis.axhline(len(GRID_NORMS) - 0.5, color="white", lw=4)
    axis.invert_yaxis()
    axis.set_xticks(range(len(GRID_RATES)), [f"{e:.2g}" for e in GRID_RATES])
    axis.set_yticks(range(len(cells)), list(cells))
    axis.set(xlabel="learning rate of Adam", ylabel="Abadi")
    axis.yaxis.set_label_coords(-0.16, 0.64)
    axis.set_title("MNIST, CNN of 28,058 parameters, ε = 1, 5 epochs:\ntest accuracy in percent, one seed", fontsize=10)
    return figure


def knob_points(rows: Rows, method: str, knob: str, task: str = "mnist_dc") -> list[tuple[float, float]]:
    """(value, percent) of seed 0, in order; of two devices, the CPU's."""
    if knob not in knobs_of(method):
        return []
    points = []
    for value in DC_KNOBS[knob]:
        settings = knob_settings(knob, value, task)
        same = [r for r in rows if (r["method"], r["seed"], r["settings"]) == (method, 0, settings)]
        same.sort(key=lambda r: r["device"] != "cpu")
        points += [(value, 100 * r["accuracy"]) for r in same[:1]]
    return points


def knob_figure(found: dict[str, Any]) -> Any:
    """In the place of D figures 8 to 11: accuracy against each knob of DC-SGD, the others as usual."""
    task = TASKS[found["recipe"]["data"]]
    names = {"clip_norm": "first C", "bins": "bins b", "histogram_noise": "σ_H", "percentile": "percentile p"}
    figure, axes = panels(len(DC_KNOBS), sharey=True)
    for axis, knob in zip(axes, DC_KNOBS, strict=True):
        for method in ("dc-sgd-e", "dc-sgd-p"):
            if len(points := knob_points(found["rows"], method, knob, task)) > 1:
                color = METHOD_COLORS[method]
                axis.plot(*zip(*points, strict=True), "o-", ms=4, color=color, label=LABELS[method])
        axis.set(xlabel=names[knob], xscale="linear" if knob == "percentile" else "log")
        if knob in ("bins", "histogram_noise"):
            axis.set_xticks(DC_KNOBS[knob], [f"{v:g}" for v in DC_KNOBS[knob]])
            axis.minorticks_off()
        if axis.lines:
            axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("test accuracy, percent")
    label = next(c.label for c in D8 if c.recipe == task and c.settings["epsilon"] == KNOB_TASKS[task])
    figure.suptitle(f"{label}, Adam: one knob turned, one seed", y=1.02)
    return figure


def level_figure(found: dict[str, Any]) -> Any:
    """D table VIII as curves: accuracy against ε, ours (mean, whole range of seeds) beside the printed numbers."""
    cells = [c for c in D8 if c.recipe == TASKS[found["recipe"]["data"]]]
    figure, (left, right) = panels(2, sharey=True)
    for method, color in METHOD_COLORS.items():
        ours = [(c.settings["epsilon"], list(by_seed(found["rows"], method, c.settings).values())) for c in cells]
        ours = [(e, values) for e, values in ours if values]
        if ours:
            means = [statistics.mean(v) for _, v in ours]
            below, above = zip(*((m - min(v), max(v) - m) for m, (_, v) in zip(means, ours, strict=True)), strict=True)
            at, look = [e for e, _ in ours], {"fmt": "o-", "ms": 4, "capsize": 2, "color": color}
            left.errorbar(at, means, [below, above], label=LABELS[method], **look)
        printed = [(c.settings["epsilon"], c.printed[method][0]) for c in cells if method in c.printed]
        if printed:
            right.plot(*zip(*printed, strict=True), "o--", ms=4, color=color, mfc="white")
    for axis, title in ((left, "ours"), (right, "printed")):
        axis.set(title=title, xlabel="ε", xscale="log")
        axis.set_xticks([c.settings["epsilon"] for c in cells], [f"{c.settings['epsilon']:g}" for c in cells])
        axis.minorticks_off()
    left.set_ylabel("test accuracy, percent")
    figure.legend(
        *left.get_legend_handles_labels(), frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(0.91, 0.5)
    )
    figure.suptitle(cells[0].label.rpartition(", ")[0], y=1.02)
    return figure


def paid_figure(found: dict[str, Any]) -> Any:
    """D tables II and III as curves: Abadi against C with the noise of a whole search, and what needs no search."""
    from matplotlib.figure import Figure

    task = TASKS[found["recipe"]["data"]]
    cell = next(c for c in D8 if c.recipe == task and c.settings["epsilon"] == PAID_TASKS[task])
    figure = Figure(figsize=(5.6, 3.8))
    axis = figure.subplots()
    kinds = {"composition": "Abadi, all ten runs composed", "liu-talwar": "Abadi, Liu and Talwar's search"}
    for color, search in zip(COLORS, SEARCHES, strict=False):
        by_norm = [by_seed(found["rows"], m, s) for _, m, s in paid(task, search)]
        for seed in sorted(set.intersection(*(set(one) for one in by_norm))):
            label = kinds[search] if seed == 0 else None
            axis.plot(GRID_C, [one[seed] for one in by_norm], "o-", ms=3, lw=0.9, color=color, label=label)
    for method, style in (("dc-sgd-e", "-"), ("auto-s", "--"), ("psac", ":")):
        if ours := by_seed(found["rows"], method, cell.settings):
            mean, label = statistics.mean(ours.values()), f"{LABELS[method]}, no search (mean of {len(ours)})"
            axis.axhline(mean, color="black", lw=1.1, ls=style, label=label)
    axis.margins(y=0.08)
    axis.set(xscale="log", xlabel="clip norm C", ylabel="test accuracy, percent")
    axis.set_title(f"{cell.label}, search included", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
