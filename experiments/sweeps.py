"""Grids of runs: `python -m experiments sweep P4 --device cuda` fills what the result files lack."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from .runs import Job, jobs_of

Point = tuple[str, str, dict[str, Any]]  # recipe, method, settings

RATES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
KNOBS: dict[str, tuple[str, tuple[float, ...]]] = {
    "psac": ("r", (0.0001, 0.001, 0.01, 0.1, 0.3, 1.0)),
    "auto-s": ("gamma", (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)),
    "abadi": ("clip_norm", (0.001, 0.01, 0.1, 1.0, 10.0, 100.0)),
}


def heatmap() -> list[Point]:
    """P figure 4: accuracy over the learning rate and each rule's own knob."""
    return [
        ("fashion_mnist", method, {"lr": rate, knob: value})
        for method, (knob, values) in KNOBS.items()
        for rate, value in itertools.product(RATES, values)
    ]


def dc_sgd() -> list[Point]:
    """D table VIII: each task at its three ε, each method."""
    tasks = {"mnist_dc": (1.0, 2.0, 4.0), "names_dc": (8.0, 2.0, 4.0), "cifar10_dc": (8.0, 2.0, 4.0)}
    methods = ("abadi", "dc-sgd-p", "dc-sgd-e", "auto-s", "psac")
    return [(t, m, {"epsilon": e}) for t, levels in tasks.items() for e in levels for m in methods]


def percentiles() -> list[Point]:
    """DC-SGD-P on MNIST at other percentiles than the median."""
    return [("mnist_dc", "dc-sgd-p", {"epsilon": 1.0, "percentile": p}) for p in (0.9, 0.7)]


def fixed() -> list[Point]:
    """D tables IV and V: other clip norms of Abadi, other percentiles of DC-SGD-P, at the ε that a task comes first at.

    C = 1 and p = 0.5 are rows of table VIII.
    """
    changes = [("abadi", {"clip_norm": c}) for c in (0.1, 10.0)] + [("dc-sgd-p", {"percentile": p}) for p in (0.3, 0.7)]
    tasks = {"cifar10_dc": 8.0, "names_dc": 8.0, "mnist_dc": 1.0}
    return [(t, m, {"epsilon": e} | change) for t, e in tasks.items() for m, change in changes]


GRID_RATES = tuple(2**i * 1e-5 for i in (4, 6, 8, 10, 12, 14))
GRID_NORMS = (0.1, 0.5, 1.0, 4.0, 10.0)


def rates_and_norms() -> list[Point]:
    """D figure 1: Abadi over the learning rate and C, at 5 epochs on MNIST; what has no C to choose, over the rate."""
    same = {"epsilon": 1.0, "epochs": 5}
    return [
        *(("mnist_dc", "abadi", same | {"lr": e, "clip_norm": c}) for c in GRID_NORMS for e in GRID_RATES),
        *(("mnist_dc", m, same | {"lr": e}) for m in ("dc-sgd-e", "psac") for e in GRID_RATES),
    ]


DC_KNOBS: dict[str, tuple[float, ...]] = {
    "clip_norm": (0.01, 1.0, 100.0),  # the first one
    "bins": (5, 20, 40),
    "histogram_noise": (2.0, 5.0, 20.0),
    "percentile": (0.3, 0.5, 0.7, 0.9),
}
DC_USUAL = {"clip_norm": 1.0, "bins": 20, "histogram_noise": 5.0, "percentile": 0.5}


KNOB_TASKS = {"mnist_dc": 1.0, "cifar10_dc": 8.0}  # and their ε


def knob_settings(knob: str, value: float, task: str = "mnist_dc") -> dict[str, Any]:
    """A task with one knob of DC-SGD turned; at its usual value that is the row of table VIII."""
    return {"epsilon": KNOB_TASKS[task]} | ({} if value == DC_USUAL[knob] else {knob: value})


def knobs_of(method: str) -> list[str]:
    """DC-SGD-E has no percentile."""
    return [knob for knob in DC_KNOBS if (method, knob) != ("dc-sgd-e", "percentile")]


def dc_knobs(task: str = "mnist_dc") -> list[Point]:
    """DC-SGD with one knob turned at a time."""
    return [
        (task, method, knob_settings(knob, value, task))
        for method in ("dc-sgd-e", "dc-sgd-p")
        for knob in knobs_of(method)
        for value in DC_KNOBS[knob]
        if value != DC_USUAL[knob]
    ]


EXAMPLE: dict[str, Any] = {"data": "names_bytes"}  # as the public example of Opacus reads names
NAMES_CHANGES: dict[str, dict[str, Any]] = {
    "the state after the padding, not after the last letter": {"model": "lstm-padding"},
    "bytes between marks, the state after the padding, 16 places": EXAMPLE | {"model": "lstm-padding"},
    "the same, lr 0.00128": EXAMPLE | {"model": "lstm-padding", "lr": 0.00128},
    "the same, lr 0.00256": EXAMPLE | {"model": "lstm-padding", "lr": 0.00256},
    "letters one-hot, not embedded": {"model": "lstm-one-hot"},
    "32 states a layer, not 128": {"model": "lstm-narrow"},
    "no name twice": {"data": "names_unique"},
    "SGD with momentum, lr 0.1": {"optimizer": "sgd", "lr": 0.1},
}


def names() -> list[Point]:
    """NAMES with one choice changed at a time, at ε = 8: which of them moves the number."""
    changes: list[dict[str, Any]] = [{}, *NAMES_CHANGES.values()]
    return [("names_dc", m, {"epsilon": 8.0} | change) for change in changes for m in ("abadi", "auto-s")]


NARROW: dict[str, Any] = {"epsilon": 8.0, "model": "lstm-narrow"}
PADDED: dict[str, Any] = {"model": "lstm-narrow-padding"}
NARROW_CHANGES: dict[str, dict[str, Any]] = {
    "the state after the padding, 20 places": PADDED,
    "the state after the padding, 14 places": PADDED | {"data": "names_14"},
    "bytes between marks, the state after the padding, 16 places": PADDED | EXAMPLE,
    "another split": {"data": "names_split"},
    "C = 0.1": {"clip_norm": 0.1},
    "C = 10": {"clip_norm": 10.0},
    "lr 0.00032": {"lr": 2**5 * 1e-5},
    "lr 0.00512": {"lr": 2**9 * 1e-5},
}


def names_narrow() -> list[Point]:
    """The same with 32 states a layer, which a CPU trains in two minutes, and with other choices."""
    return [("names_dc", "abadi", NARROW | change) for change in ({}, *NARROW_CHANGES.values())]


SEARCHES = ("composition", "liu-talwar")
GRID_C = (0.1, 0.2, 0.5, 0.8, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0)
PAID_TASKS = {"mnist_dc": 1.0, "names_dc": 2.0}


def paid(task: str, search: str) -> list[Point]:
    """Abadi with every clip norm of the paper's grid; each run has the noise that the whole search needs."""
    how = {"epsilon": PAID_TASKS[task], "search": search, "searched": len(GRID_C)}
    return [(task, "abadi", how | {"clip_norm": c}) for c in GRID_C]


def paid_for() -> list[Point]:
    """D tables II and III: searches whose cost is paid, all within the same ε."""
    return [point for task in PAID_TASKS for search in SEARCHES for point in paid(task, search)]


QUARTERS: dict[str, Any] = {"model": "resnet9-2x2"}  # as the public code of Klause et al. has this network
SCALED: dict[str, Any] = {"model": "resnet9-2x2-scaled"}  # and with a norm after each sum, which they add
TINY: dict[str, Any] = {"data": "imagenette_32"}
IMAGENETTE_CHANGES: dict[str, dict[str, Any]] = {
    "96 pixels": {},
    "32 pixels": TINY,
    "32 pixels, the head sees quarters": TINY | QUARTERS,
    "32 pixels, quarters, a norm after each sum": TINY | SCALED,
    "32 pixels, quarters, a norm after each sum, lr 0.002": TINY | SCALED | {"lr": 2e-3},
    "32 pixels, quarters, a norm after each sum, lr 0.002 falling to 0": TINY | SCALED | {"lr": 2e-3, "decay": True},
    "32 pixels, quarters, a norm after each sum, lr 0.004 falling to 0": TINY | SCALED | {"lr": 4e-3, "decay": True},
    "32 pixels, quarters, lr 0.0005 falling to 0": TINY | QUARTERS | {"decay": True},
    "32 pixels, quarters, lr 0.001": TINY | QUARTERS | {"lr": 1e-3},
    "32 pixels, quarters, lr 0.001 falling to 0": TINY | QUARTERS | {"lr": 1e-3, "decay": True},
    "32 pixels, quarters, lr 0.002 falling to 0": TINY | QUARTERS | {"lr": 2e-3, "decay": True},
}


def imagenette() -> list[Point]:
    """P table 2 on imagenette, large and small, and PSAC with one choice changed at a time."""
    rules = ("psac", "abadi", "auto-s", "non-private")
    small = [("imagenette", method, TINY | QUARTERS) for method in rules]
    rest = [
        ("imagenette", method, change) for change in IMAGENETTE_CHANGES.values() for method in ("non-private", "psac")
    ]
    large: list[Point] = [("imagenette", method, {}) for method in rules]
    return [*small, *(point for point in rest if point not in [*small, *large]), *large]


FEATURE_RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
FEATURE_RULES = ("psac", "auto-s", "abadi")


def features() -> list[Point]:
    """CIFAR-10 on features at other learning rates than the paper's 4, which is the row of table 2."""
    return [("cifar10_features", m, {"lr": rate}) for rate in FEATURE_RATES for m in FEATURE_RULES if rate != 4.0]


def glue() -> list[Point]:
    """P table 3, A table 2, on SST-2: each rule at two ε, and without privacy."""
    methods = ("abadi", "auto-v", "auto-s", "psac")
    return [("sst2", m, {"epsilon": e}) for e in (3.0, 8.0) for m in methods] + [("sst2", "non-private", {})]


STEADY_RATES = (1e-4, 5e-4, 2e-3, 8e-3)
STEADIED = (1e-4, 1e-2, 1.0, 100.0)


def steadied() -> list[Point]:
    """A figures 14 and 15: γ of AUTO-S, 0 being AUTO-V, over the learning rate, on SST-2 with MiniLM's last layer."""
    points: list[Point] = [("sst2_last", "auto-v", {"lr": rate}) for rate in STEADY_RATES]
    return points + [("sst2_last", "auto-s", {"lr": r, "gamma": g}) for g in STEADIED for r in STEADY_RATES]


COPIES = (1, 2, 4, 8)


def copies_settings(copies: int) -> dict[str, Any]:
    """Several moved views of each example, without mirrors: digits would change their meaning; 10 epochs."""
    return {"epochs": 10} | ({"copies": copies, "flip": False} if copies > 1 else {})


def copies() -> list[Point]:
    """What several views of each example bring on MNIST."""
    return [("mnist", "psac", copies_settings(k)) for k in COPIES]


FOUR = copies_settings(4) | {"epochs": 3}
VIEWS: dict[str, dict[str, Any]] = {
    "one view": {"epochs": 3},
    "four": FOUR,
    "four, the border moves in, not 0": FOUR | {"edges": True},
    "four, the border moves in, by 1 pixel at most": FOUR | {"edges": True, "shift": 1},
    "four, lr 1": FOUR | {"lr": 1.0},
}


def views() -> list[Point]:
    """Why four views are worse than one on MNIST: one choice changed at a time, in short runs."""
    return [("mnist", "psac", settings) for settings in VIEWS.values()]


BEST = ("mnist_best", "fashion_mnist_best", "cifar10_best")
WITHOUT: dict[str, dict[str, Any]] = {  # what the best recipes are made of, each left out in turn
    "PLD": {"accountant": "rdp"},
    "averaged weights": {"ema": 0.0},
    "scattering": {"features": "pixels"},
}


def best() -> list[Point]:
    """The best recipes, and what each part of them brings."""
    changes: list[dict[str, Any]] = [{}, *WITHOUT.values()]
    return [(name, "psac", change) for name in BEST for change in changes] + [
        (name, method, {}) for name in BEST for method in ("abadi", "non-private")
    ]


def choice() -> list[Point]:
    """What the best recipes' model and learning rate were chosen from, on public data, with one seed."""
    grid = {"flat": (2.0, 4.0, 8.0, 16.0), "small-cnn": (1.0, 2.0, 4.0)}
    return [
        (name, "psac", {"model": model, "lr": rate}) for name in BEST for model, rates in grid.items() for rate in rates
    ]


SWEEPS: dict[str, Callable[[], list[Point]]] = {
    "P4": heatmap,
    "D1": rates_and_norms,
    "D2": paid_for,
    "D4": fixed,
    "D8": dc_sgd,
    "P3": glue,
    "A15": steadied,
    "names": names,
    "names_narrow": names_narrow,
    "imagenette": imagenette,
    "copies": copies,
    "views": views,
    "features": features,
    "best": best,
    "choice": choice,
    "percentiles": percentiles,
    "knobs": dc_knobs,
    "knobs_cifar10": partial(dc_knobs, "cifar10_dc"),
}


def sweep(name: str, seeds: int, device: str, compile: bool, only: Sequence[str] = ()) -> list[Job]:
    """Every run of a grid, all of one seed before the next; `only` names recipes."""
    jobs = [
        job
        for recipe, method, settings in SWEEPS[name]()
        if not only or recipe in only
        for job in jobs_of(recipe, [method], seeds, device, settings, compile)
    ]
    return sorted(jobs, key=lambda job: job.seed)
