"""Figures of DC-SGD on real data, and of bounds: what is drawn, from made rows."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments import causes, dc_figures, norm_figures, report, sweeps, tables, theory, theory_figures


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
    figure = dc_figures.knob_figure({"rows": rows, "recipe": {"data": "mnist"}})
    assert len(figure.axes) == len(sweeps.DC_KNOBS)
    assert [len(axis.lines) for axis in figure.axes] == [0, 1, 0, 0]  # one point is no curve


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


def test_every_gamma_has_its_cell_and_its_curve():
    rows = [
        row(m, s, 0.6 + s.get("gamma", 0) / 1000) | {"gradients": [2.0, 1.0]}
        for _, m, s in sweeps.steadied()
        if s["lr"] != 8e-3
    ]
    found = {"rows": rows, "recipe": {"watch": 6}}
    cells = texts(norm_figures.steady_figure(found).axes[0])
    assert cells[:5] == ["60.0", "60.0", "60.0", "60.1", "70.0"]
    assert cells[-5:] == [""] * 5  # no run at the last rate
    curves = [axis.lines for axis in norm_figures.falling_figure(found).axes]
    assert [len(lines) for lines in curves] == [5, 5, 5, 0]
    assert list(curves[0][0].get_xdata()) == [1, 7]


def written(folder, name, rows):
    (folder / f"{name}.json").write_text(json.dumps({"rows": rows}))


def test_claims_about_knobs_are_decided_by_how_far_accuracy_moves(tmp_path):
    assert {claim.verdict for claim in report.turned(tmp_path)} == {"not run"}
    rates = {e: i for i, e in enumerate(sweeps.GRID_RATES)}
    rows = [
        row(m, s, 0.5 + 0.05 * rates[s["lr"]] + 0.001 * s.get("clip_norm", 0)) for _, m, s in sweeps.rates_and_norms()
    ]
    rows.append(row("dc-sgd-e", {"epsilon": 1.0}, 0.95))
    rows += [row(m, s, 0.92 if "bins" in s else 0.949) for _, m, s in sweeps.dc_knobs()]
    written(tmp_path, "mnist_dc", rows)
    grid, first, bins, noise, *others = report.turned(tmp_path)
    assert grid.found == "mean spread 1.0 points over C (1.0 at the best rate), 25.0 over the rate; one seed"
    assert [c.verdict for c in (grid, first, bins, noise)] == [report.FAILS, report.HOLDS, report.FAILS, report.HOLDS]
    assert first.found == "0.10 points from 0.01 to 100; one seed (seeds alone: 0.00)"
    assert [c.verdict for c in others] == ["not run"] * 3
    cifar10 = [row("dc-sgd-e", {"epsilon": 8.0}, 0.54), row("dc-sgd-e", {"epsilon": 8.0}, 0.55, seed=1)]
    cifar10 += [row(m, s, 0.545) for _, m, s in sweeps.dc_knobs("cifar10_dc")]
    written(tmp_path, "cifar10_dc", cifar10)
    *_, last = report.turned(tmp_path)
    assert (last.found, last.verdict) == ("0.50 points from 2 to 20; one seed (seeds alone: 1.00)", report.HOLDS)


def test_claims_about_gamma_are_decided_where_something_is_learnt(tmp_path):
    assert [claim.verdict for claim in report.steadied(tmp_path)] == ["not run"]
    rows = [
        row(m, s, (0.5 if s["lr"] < 1e-3 else 0.8) + (0.01 if s.get("gamma") == 1 else 0))
        | {"gradients": [9.0, 1 + (s.get("gamma") == 0.01) * (1 if s["lr"] == 8e-3 else -1) / 2] * 3}
        for _, m, s in sweeps.steadied()
    ]
    written(tmp_path, "sst2_last", rows)
    spread, small, large = report.steadied(tmp_path)
    assert (spread.found, spread.verdict) == ("1.0 at lr 0.002, 1.0 at lr 0.008; one seed", "holds")
    assert small.verdict == "cannot be told"
    assert large.verdict == report.FAILS


def test_views_are_compared_seed_by_seed(tmp_path):
    rows = [row("psac", sweeps.copies_settings(k), 0.9 + k / 1000 + s / 100, s) for k in (1, 4) for s in range(3)]
    written(tmp_path, "mnist", rows)
    assert next(report.views(tmp_path)).found == "+0.30 ± 0.00 (n = 3)"
    table = tables.copies_table(tmp_path)
    assert "| 1 | 91.10 ± 1.00 | 3 |  |" in table
    assert "| 4 | 91.40 ± 1.00 | 3 | +0.30 ± 0.00 |" in table
    assert "| 8 | not run | 0 |  |" in table
    short = [row("psac", settings, 0.9 + i / 100, 0) for i, settings in enumerate(sweeps.VIEWS.values())]
    written(tmp_path, "mnist", short)
    assert "| one view | 90.00 | 1 |  |" in tables.views_table(tmp_path)
    assert "| four, the border moves in, not 0 | 92.00 | 1 | +2.00 |" in tables.views_table(tmp_path)


def test_methods_with_few_seeds_are_named(tmp_path):
    rows = [row("abadi", {"epsilon": 8.0}, 0.5, s, "cuda") for s in range(3)]
    written(tmp_path, "cifar10_dc", [*rows, row("dc-sgd-p", {"epsilon": 8.0}, 0.5, 0, "cuda")])
    wanted = "- CIFAR-10, ResNet18, ε = 8: fewer than three seeds for DC-SGD-P (1), DC-SGD-E (0), AUTO-S (0)."
    assert wanted in report.missing(tmp_path).splitlines()


def test_the_clip_norms_of_both_kinds_are_compared(tmp_path):
    assert causes._resnet(tmp_path) == ""
    rows = [row(m, {"epsilon": 8.0}, 0.5 + s / 100, s, "cuda") for m in ("abadi", "auto-s") for s in range(2)]
    rows += [
        row(m, {"epsilon": 8.0}, 0.5, 0, "cuda") | {"clip_norms": [c] * 3}
        for m, c in (("dc-sgd-p", 60), ("dc-sgd-e", 2))
    ]
    written(tmp_path, "cifar10_dc", rows)
    assert "is 60 along a run (n = 1), where DC-SGD-E takes 2 (n = 1): 30 times" in causes._resnet(tmp_path)
    assert "Against AUTO-S" not in causes._resnet(tmp_path)
    rows += [row("psac", {"epsilon": 8.0}, 0.53 + s / 100, s, "cuda") for s in range(3)]
    written(tmp_path, "cifar10_dc", rows)
    assert "Abadi (C = 1) +0.00, +0.00 (n = 2); PSAC +3.00, +3.00 (n = 2)." in causes._resnet(tmp_path)


def test_what_features_and_privacy_cost(tmp_path):
    rows = [row(m, {}, a, s) for m, a in (("psac", 0.8), ("non-private", 0.85)) for s in range(2)]
    written(tmp_path, "cifar10_features", rows)
    told = causes._features(tmp_path)
    assert "-9.4 points against A's (n = 2); privacy costs 5.0 points with PSAC (n = 2), and 1.6" in told


def test_rates_of_the_feature_runs_stand_beside_the_papers(tmp_path):
    rows = [row("psac", {}, 0.75, 0), row("psac", {}, 0.77, 1), row("psac", {"lr": 8.0}, 0.7)]
    written(tmp_path, "cifar10_features", rows)
    wanted = "| PSAC | not run | not run | 76.00 ± 1.41 (n = 2) | 70.00 (n = 1) | not run |"
    assert wanted in tables.features_table(tmp_path)
    assert all(settings["lr"] != 4.0 for _, _, settings in sweeps.features())


def test_rules_are_compared_at_their_own_best_rates(tmp_path):
    assert {claim.verdict for claim in report.best_rates(tmp_path)} == {"not run"}
    rows = [row(m, {}, 0.7 + 0.01 * (m == "psac")) for m in sweeps.FEATURE_RULES]
    rows += [row(m, s, 0.75 if (m, s["lr"]) == ("abadi", 16.0) else 0.6) for _, m, s in sweeps.features()]
    written(tmp_path, "cifar10_features", rows)
    assert [claim.found for claim in report.best_rates(tmp_path)] == ["-4.00 (n = 1)", "+1.00 (n = 1)"]


def test_what_a_text_model_loses_is_split(tmp_path):
    rows = [row(m, {}, 0.5) | {"bleu": b} for m, b in (("auto-s", 45.0), ("non-private", 60.0))]
    written(tmp_path, "e2e", rows)
    assert "18.6 points of BLEU" in causes._texts(tmp_path)
    assert "3.6 are there without privacy too, and 15.0 come with it" in causes._texts(tmp_path)
