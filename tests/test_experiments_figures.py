"""Figures of DC-SGD on real data, and of bounds: what is drawn, from made rows."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments import dc_figures, norm_figures, sweeps, theory, theory_figures


def row(method, settings, accuracy, seed=0, device="cpu"):
    return {"method": method, "seed": seed, "settings": settings, "device": device, "accuracy": accuracy}


def texts(axis):
    return [text.get_text() for text in axis.texts]


def test_the_grid_shows_every_run_at_its_rate_and_clip_norm_and_leaves_others_empty():
    points = sweeps.rates_and_norms()
    rows = [row(m, s, i / 100) for i, (_, m, s) in enumerate(points[:-1])]
    cells = dc_figures.grid_cells(rows)
    assert list(cells) == [*(f"C = {c:g}" for c in sweeps.GRID_NORMS), "DC-SGD-E", "PSAC"]
    assert cells["C = 0.1"] == pytest.approx(range(6))
    assert cells["DC-SGD-E"] == pytest.approx(range(30, 36))
    assert math.isnan(cells["PSAC"][-1])
    shown = texts(dc_figures.grid_figure({"rows": rows}).axes[0])
    assert shown[:2] == ["0.0", "1.0"]
    assert shown[-1] == ""


def test_a_knob_has_the_usual_run_among_its_values():
    usual, other = ({"epsilon": 1.0}, {"epsilon": 1.0, "bins": 5})
    rows = [row("dc-sgd-e", usual, 0.95), row("dc-sgd-e", other, 0.9), row("dc-sgd-e", usual, 0.1, device="cuda")]
    assert dc_figures.knob_points(rows, "dc-sgd-e", "bins") == [(5, 90.0), (20, 95.0)]
    assert dc_figures.knob_points(rows, "dc-sgd-e", "clip_norm") == [(1.0, 95.0)]
    figure = dc_figures.knob_figure({"rows": rows})
    assert len(figure.axes) == len(sweeps.DC_KNOBS)
    assert [len(axis.lines) for axis in figure.axes] == [1, 1, 1, 0]


def test_levels_are_ours_beside_the_printed():
    rows = [row("abadi", {"epsilon": e}, 0.6 + e / 100, seed) for e in (2.0, 4.0, 8.0) for seed in (0, 1)]
    left, right = dc_figures.level_figure({"rows": rows, "recipe": {"data": "names"}}).axes
    assert list(left.lines[0].get_ydata()) == pytest.approx([62, 64, 68])
    assert list(right.lines[0].get_ydata()) == [55.14, 57.24, 59.91]


def test_only_whole_searches_are_drawn_and_what_needs_none_is_a_line():
    both = [sweeps.paid("names_dc", search) for search in sweeps.SEARCHES]
    rows = [row(m, s, 0.5 + i / 100) for i, (_, m, s) in enumerate(both[0])]
    rows += [row(m, s, 0.4) for _, m, s in both[1][:-1]]
    rows.append(row("psac", {"epsilon": 2.0}, 0.7))
    (axis,) = dc_figures.paid_figure({"rows": rows, "recipe": {"data": "names"}}).axes
    first, last = (list(line.get_ydata()) for line in axis.lines)
    assert first == pytest.approx([50 + i for i in range(10)])
    assert last == pytest.approx([70, 70])


def test_parts_of_the_bounds_meet_where_the_theorems_say():
    found = theory.bound_parts()
    assert found["inverse"]["2"][0] == 0
    assert None in found["inverse"]["2"]  # infinite from x = 2γ/(r² − 1) on
    assert found["pair"]["0.5"][-1] == pytest.approx(2)  # errors along the gradient, smaller than it, leave it whole
    assert found["pair"]["2"][-1] == pytest.approx(0, abs=1e-12)  # larger than it, they cancel it
    least = min(v for v in found["sum"]["0.01"] if v is not None)
    assert least == pytest.approx(theory.smooth_bound(0.01, 1.0, 1.0), rel=0.01)
    smooth, stuck = found["against_steps"]["1"], found["against_steps"]["0"]
    assert smooth[-1] < 0.01 < 1 <= stuck[-1]
    assert len(theory_figures.parts_figure(found).axes) == 4


def test_rules_shorten_norms_to_one_at_most():
    norms = [0.01, 0.5, 1.0, 90.0]
    found = norm_figures.after(norms)
    assert found["Abadi, C = 1"] == pytest.approx([0.01, 0.5, 1.0, 1.0])
    assert found["AUTO-V"] == pytest.approx([1.0] * 4)
    assert all(max(values) <= 1 + 1e-12 for values in found.values())
    parts = [{"step": k, "norms": norms} for k in range(3)]
    left, right = norm_figures.rule_figure({"title": "made", "rows": 4, "examples": parts}).axes
    assert left.get_legend().get_texts()[0].get_text() == "step 0: 50% below 1"
    assert len(right.lines) == len(found)
