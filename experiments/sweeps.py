"""Grids of runs: `python -m experiments sweep P4 --device cuda` fills what the result files lack."""

from __future__ import annotations

import itertools
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
    tasks = {"mnist_dc": (1.0, 2.0, 4.0), "names_dc": (2.0, 4.0, 8.0), "cifar10_dc": (8.0,)}
    methods = ("abadi", "dc-sgd-p", "dc-sgd-e", "auto-s", "psac")
    return [(t, m, {"epsilon": e}) for t, levels in tasks.items() for e in levels for m in methods]


SWEEPS = {"P4": heatmap, "D8": dc_sgd}


def sweep(name: str, seeds: int, device: str, compile: bool) -> list[Job]:
    """Every run of a grid, in order."""
    return [
        job
        for recipe, method, settings in SWEEPS[name]()
        for job in jobs_of(recipe, [method], seeds, device, settings, compile)
    ]
