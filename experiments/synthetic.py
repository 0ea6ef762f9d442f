"""DC-SGD, figures 2 and 3: thresholds on 256 draws of N(100, 20²), against the truth."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from clipwise import MinErrorThreshold, PercentileThreshold
from clipwise.thresholds import Facts, State

BATCH, MEAN, SPREAD = 256, 100.0, 20.0
EVERYONE = torch.ones(BATCH, dtype=torch.bool)
FACTS = Facts(step=1, steps=100, expected_batch_size=BATCH, gradient_noise_multiplier=1.0, dimension=100_000)
SETTINGS = [(bins, noise) for bins in (10, 20, 40) for noise in (1.0, 5.0, 10.0)]


def noisy_histogram(threshold: Any, state: State, norms: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The threshold's own observation, with simulated (not secret) noise."""
    counts = threshold.observe(state, torch.tensor(norms), EVERYONE).numpy()
    noisy: np.ndarray = counts + rng.normal(0, threshold.histogram_noise, len(counts))
    return noisy


def percentiles(trials: int = 200, seed: int = 0) -> dict[str, Any]:
    """Figure 2: the clip norm that DC-SGD-P finds for each percentile, R = 150."""
    rng, state, reach = np.random.default_rng(seed), State(75.0, 150.0), 150.0
    points = [round(0.05 * k, 2) for k in range(1, 20)]
    curves = []
    for bins, noise in SETTINGS:
        rows = []
        for p in points:
            threshold = PercentileThreshold(p, bins=bins, histogram_noise=noise)
            found, truth = [], []
            for _ in range(trials):
                norms = rng.normal(MEAN, SPREAD, BATCH)
                histogram = torch.tensor(noisy_histogram(threshold, state, norms, rng))
                found.append(threshold.update(state, histogram, FACTS).clip_norm)
                truth.append(float(np.quantile(norms, p)))
            off = np.abs(np.array(found) - truth)
            within = {f"within_{k}": float((off <= k * reach / bins).mean()) for k in (1, 3)}
            rows.append({"p": p, "truth": float(np.mean(truth)), **_spread(found), **within})
        curves.append({"bins": bins, "noise": noise, "rows": rows})
    return {"trials": trials, "range": reach, "curves": curves}


def errors(trials: int = 200, seed: int = 0) -> dict[str, Any]:
    """Figure 3: the expected squared error as a histogram shows it, and where its minimum lies, R = 120."""
    rng, state = np.random.default_rng(seed), State(40.0, 120.0)
    grid = np.linspace(2, 120, 60)
    noise_part = FACTS.gradient_noise_multiplier**2 * FACTS.dimension / BATCH**2 * grid**2
    norms = rng.normal(MEAN, SPREAD, BATCH)
    exact = noise_part + (np.maximum(norms[:, None] - grid, 0) ** 2).mean(0)
    curves = []
    for bins, noise in SETTINGS:
        threshold = MinErrorThreshold(bins=bins, histogram_noise=noise)
        middles = (np.arange(bins) + 0.5) * state.range / bins
        seen, chosen = [], []
        for _ in range(trials):
            histogram = noisy_histogram(threshold, state, norms, rng)
            clipped = np.maximum(middles[:, None] - grid, 0) ** 2
            seen.append(noise_part + (histogram / histogram.sum()) @ clipped)
            chosen.append(threshold.update(state, torch.tensor(histogram), FACTS).clip_norm)
        low, middle, high = np.quantile(seen, [0.05, 0.5, 0.95], axis=0)
        band = {"low": low.tolist(), "median": middle.tolist(), "high": high.tolist()}
        curves.append({"bins": bins, "noise": noise, **band, "chosen": _spread(chosen)})
    best = float(grid[int(exact.argmin())])
    return {"trials": trials, "grid": grid.tolist(), "exact": exact.tolist(), "best": best, "curves": curves}


def _spread(values: list[float]) -> dict[str, float]:
    low, middle, high = np.quantile(values, [0.05, 0.5, 0.95])
    return {"low": float(low), "median": float(middle), "high": float(high)}
