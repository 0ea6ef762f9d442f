"""Bounds, toy problems and norms, and the figures of them."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments import analysis, encoder, figures, norm_figures, similarity, theory


def test_with_gamma_the_bound_falls_as_the_root_of_x_and_without_it_stays_above_the_noise():
    for xi in (0.1, 1.0):
        for gamma in (0.01, 1.0):
            high, low = (theory.smooth_bound(x, xi, gamma) for x in (1e-6, 1e-8))
            assert high / low == pytest.approx(10, rel=0.02)  # T^(-1/4) where x is of order T^(-1/2)
        found = [theory.normalised_bound(x, xi) for x in (1e-8, 1e-2, 1.0)]
        assert found[0] == pytest.approx(xi, rel=1e-3)
        assert found == sorted(found)
        assert found[0] > xi


def test_the_inverse_inverts_where_it_is_finite():
    """M⁻¹(0) = 0, it grows with x, and ends at x = 2γ/(r² − 1)."""
    r, gamma = np.array([2.0]), 1.0
    end = 2 * gamma / 3
    values = [theory.inverse(x, r, 1.0, gamma)[0] for x in (0.0, 0.1, 0.99 * end, 1.01 * end)]
    assert values[0] == pytest.approx(0, abs=1e-12)
    assert values == sorted(values)
    assert math.isinf(values[-1])


def test_at_a_fixed_budget_the_bounds_stop_and_without_noise_autos_falls_as_fast_as_sgd():
    found = theory.rates()
    steps, curves = np.array(found["steps"]), found["private"]
    for ys in (curves["AUTO-S"]["0"], found["plain"]):
        slope = np.polyfit(np.log(steps[-8:]), np.log(ys[-8:]), 1)[0]
        assert slope == pytest.approx(-0.25, abs=0.01)
    assert min(curves["AUTO-V"]["0"]) >= found["xi"]
    for name, bound in (
        ("AUTO-S", lambda x: theory.smooth_bound(x, found["xi"], found["gamma"])),
        ("AUTO-V", lambda x: theory.normalised_bound(x, found["xi"])),
    ):
        ends = [curves[name][share][-1] for share in ("0.0001", "1e-08", "0")]
        assert ends == sorted(ends, reverse=True)
        assert ends[0] == pytest.approx(bound(4 * math.sqrt(1e-4)), rel=1e-3)


def test_sgd_stays_within_its_bound():
    """½‖w‖² from a distance of √2 (so that L₀ − L* = 1), with gradient noise of variance ξ²/B."""
    rng, xi, batch = np.random.default_rng(0), 1.0, 4
    for steps in (10, 1_000):
        least = []
        for _ in range(200):
            w, seen = np.array([math.sqrt(2), 0.0]), []
            for _ in range(steps):
                seen.append(float(np.linalg.norm(w)))
                w = w - (w + rng.normal(0, xi / math.sqrt(2 * batch), 2)) / math.sqrt(steps)
            least.append(seen)
        expected = np.mean(least, axis=0).min()
        assert expected <= theory.plain_rate(np.array([float(steps)]), xi, batch)[0]


def test_normalised_gradients_stop_between_two_groups_and_plain_ones_do_not():
    found = analysis.mixture(2_000)
    at = next(i for i, t in enumerate(found["thetas"]) if abs(t - 1) < 0.06)
    assert abs(found["curves"]["AUTO-V"][at]) < 0.05
    assert found["curves"]["SGD"][at] == pytest.approx(found["thetas"][at], abs=0.1)
    assert found["curves"]["AUTO-S, γ = 0.01"][at] == pytest.approx(found["curves"]["AUTO-V"][at], abs=0.05)
    assert found["curves"]["AUTO-S, γ = 4"][at] > 0.05  # a stabiliser of the size of the norms leaves no lazy region


def test_shares_and_groups_by_norm():
    norms = [3.0, 1.0, 2.0, 4.0]
    assert norm_figures.share_above(norms, [0.5, 2.0, 4.0]) == [1.0, 0.5, 0.0]
    groups = norm_figures.by_norm(norms, [0.3, 0.1, 0.2, 0.4], bins=2)
    assert groups == [(1.5, 0.15), (3.5, 0.35)]


def test_products_with_the_mean_are_those_of_single_gradients():
    torch.manual_seed(0)
    model = encoder.Encoder(11, 6, 8, 1, 2, 16, 2).double()
    x, y = torch.randint(1, 11, (5, 6)), torch.randint(0, 2, (5,))
    x[0, 3:] = 0
    found = similarity.looked_at(model, x, y)
    flat = [torch.cat([g.flatten() for g in similarity.gradient(model, x[i : i + 1], y[i : i + 1])]) for i in range(5)]
    mean = torch.stack(flat).mean(0)
    assert found["mean"] == [pytest.approx(float(mean.norm()), rel=1e-4)]
    for i, g in enumerate(flat):
        assert found["norms"][i] == pytest.approx(float(g.norm()), rel=1e-4)
        assert found["cosines"][i] == pytest.approx(float(torch.cosine_similarity(g, mean, dim=0)), abs=1e-4)


def test_a_run_that_two_devices_made_is_drawn_once():
    row = {"method": "dc-sgd-e", "seed": 0, "settings": {"epsilon": 1.0}, "steps": 3}
    rows = [row | {"device": d, "clip_norms": [c, c, c]} for d, c in (("cuda", 1.0), ("cpu", 2.0))]
    figure = figures.threshold_figure({"recipe": {"data": "mnist"}, "rows": rows})
    assert [list(line.get_ydata()) for line in figure.axes[0].lines] == [[1.0, 1.0, 1.0]]
