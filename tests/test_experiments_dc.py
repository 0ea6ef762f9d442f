"""Searches that are paid for, NAMES with a choice changed, and the tables of both."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments import causes, datasets, dc_tables, figures, models, papers, recipes, report, sweeps, tables


def test_a_search_that_is_paid_for_has_more_noise_in_every_run():
    base = recipes.RECIPES["mnist_dc"]
    free = recipes.plan_of(base, "abadi", 60_000)
    found = [
        recipes.plan_of(base.changed({"search": how, "searched": n}), "abadi", 60_000)
        for how, n in (("composition", 3), ("composition", 30), ("liu-talwar", 30))
    ]
    sigmas = [free.noise_multiplier, *(p.noise_multiplier for p in found)]
    assert sigmas == sorted(sigmas)
    assert found[0].epsilon < free.epsilon
    points = sweeps.paid("mnist_dc", "composition")
    assert {p[2]["searched"] for p in points} == {len(points)}


def test_every_knob_of_dc_sgd_reaches_its_threshold():
    changed = recipes.RECIPES["mnist_dc"].changed({"bins": "7", "histogram_noise": "9", "clip_norm": "3"})
    for method in ("dc-sgd-e", "dc-sgd-p"):
        found = recipes.METHODS[method](changed)["threshold"]
        assert (found.bins, found.histogram_noise, found.initial) == (7, 9.0, 3.0)
        assert recipes.METHODS[method](recipes.RECIPES["mnist_dc"])["threshold"].histogram_noise is None
    turned = sweeps.dc_knobs()
    assert all(len(settings) == 2 for _, _, settings in turned)
    assert ("mnist_dc", "dc-sgd-p", {"epsilon": 1.0, "percentile": 0.9}) in turned
    assert len({str(point) for point in turned}) == len(turned) == 2 * (2 + 2 + 2) + 3


def test_names_lstm_reads_the_state_it_is_told_to():
    torch.manual_seed(0)
    name = torch.tensor([[3, 4, 0, 0], [3, 4, 5, 6]])
    longer = torch.tensor([[3, 4, 0, 0, 0, 0]])
    for one_hot in (False, True):
        plain, padded = (models.NamesLstm(9, 2, 8, one_hot=one_hot, padding=p) for p in (False, True))
        assert torch.allclose(plain(name)[0], plain(longer)[0])
        assert not torch.allclose(padded(name)[0], padded(longer)[0])


def test_unique_names_do_not_train_and_test(made):
    every, unique = (datasets.load(name) for name in ("names", "names_unique"))

    def shared(data):
        rows = [{(*x.tolist(), int(y)) for x, y in zip(*part, strict=True)} for part in (data.train, data.test)]
        return rows[0] & rows[1]

    assert shared(every)
    assert not shared(unique)


def test_names_are_read_as_letters_or_as_bytes_between_marks(made):
    assert datasets._letters("Á b") == [27, 53, 2]
    assert datasets._bytes("Áb") == [257, 0xC3, 0x81, ord("b"), 258]
    assert datasets._bytes("") == []
    assert {name: datasets.load(name).train[0].shape[1] for name in ("names", "names_14", "names_bytes")} == {
        "names": 20,
        "names_14": 14,
        "names_bytes": 16,
    }
    one, other = (datasets.load(name).train[1].tolist() for name in ("names", "names_split"))
    assert one != other
    recipe = recipes.RECIPES["names_dc"].changed(sweeps.PADDED | sweeps.EXAMPLE)
    model = recipes.MODELS[recipe.model](recipe, datasets.load(recipe.data))
    assert model.embed.num_embeddings == datasets.BYTES


def test_balanced_accuracy_counts_every_class_alike():
    x, y = torch.eye(3)[[0, 0, 0, 1]], torch.tensor([0, 0, 0, 2])
    assert recipes.balanced(torch.nn.Identity(), (x, y), 3) == 0.5


def test_moved_views_show_the_border_again_or_zeros():
    images = torch.full((8, 1, 6, 6), -0.5)
    moved = [models.flipped_and_shifted(images, 2, shift=2, edges=edges) for edges in (True, False)]
    assert bool((moved[0] == -0.5).all())
    assert set(moved[1].unique().tolist()) == {-0.5, 0.0}


def row(method, seed, settings, accuracy, device="cpu", seconds=10.0):
    given = {"method": method, "seed": seed, "settings": settings, "device": device, "accuracy": accuracy}
    return given | {"seconds": seconds, "machine": "m", "noise_multiplier": 4.0}


def written(folder, name, rows):
    (folder / f"{name}.json").write_text(json.dumps({"rows": rows}))


def test_liu_and_talwar_find_the_best_by_chance():
    rng, found = np.random.default_rng(0), [0.1, 0.5, 0.9]
    best = [max(rng.choice(found, runs)) for runs in rng.geometric(1 / 6, 20_000)]
    assert dc_tables.expected_best(found, "liu-talwar") == pytest.approx(np.mean(best), abs=0.008)
    assert dc_tables.expected_best(found, "composition") == 0.9


def test_only_whole_searches_are_shown(tmp_path):
    points = sweeps.paid("mnist_dc", "composition")
    rows = [row("abadi", 0, s, 0.9 + 0.001 * i) for i, (_, _, s) in enumerate(points)]
    written(tmp_path, "mnist_dc", rows[:-1])
    assert "all runs composed (RDP) | 4.00 | not run | 0 |" in dc_tables.paid_table(tmp_path)
    written(tmp_path, "mnist_dc", [*rows, row("dc-sgd-e", 0, {"epsilon": 1.0}, 0.95, seconds=20.0)])
    assert "all runs composed (RDP) | 4.00 | 90.90 | 1 | 10 |" in dc_tables.paid_table(tmp_path)
    assert "| DC-SGD-E, no search | 4.00 | 95.00 | 1 | |" in dc_tables.paid_table(tmp_path)
    assert "| 10 | 100 | 5.0× |" in dc_tables.time_table(tmp_path)
    claims = {c.text: (c.found, c.verdict) for c in report.searched_for(tmp_path)}
    text = "D tables II, III: DC-SGD-E above Abadi, C by all runs composed (RDP), on MNIST, CNN of 28,058 parameters"
    assert claims[f"{text}, ε = 1"] == ("+4.10 (n = 1)", report.OPEN)


def test_fixed_choices_are_in_order(tmp_path):
    settings = {"epsilon": 8.0}
    rows = [row("abadi", 0, settings, 0.5), row("abadi", 0, settings | {"clip_norm": 0.1}, 0.4)]
    written(tmp_path, "cifar10_dc", rows)
    lines = dc_tables.fixed_table(tmp_path).splitlines()[2:5]
    assert [line.split(" | ")[2:4] for line in lines] == [
        ["C = 0.1", "40.00"],
        ["C = 1", "50.00"],
        ["C = 10", "not run"],
    ]


def test_a_row_says_where_it_ran_and_a_seed_on_two_devices_is_no_pair(tmp_path):
    base, narrow = {"epsilon": 8.0}, {"epsilon": 8.0, "model": "lstm-narrow"}
    rows = [row("abadi", seed, base, 0.5, "cuda") for seed in (0, 1)] + [row("abadi", 0, base, 0.53)]
    written(tmp_path, "names_dc", [*rows, row("abadi", 0, narrow, 0.45)])
    lines = dc_tables.names_table(tmp_path).splitlines()
    assert "| nothing | Abadi | 50.00 ± 0.00 | 2 | GPU |  |" in lines
    assert "| 32 states a layer, not 128 | Abadi | 45.00 | 1 | CPU | -5.00, no pairs |" in lines
    assert "| C = 1 | 50.00 ± 0.00 | 2 | GPU |" in dc_tables.fixed_table(tmp_path)
    assert list(tables.devices_apart(["names_dc"], tmp_path).values()) == pytest.approx([3.0])
    assert "(n = 1), 3.0 points in the median, 3.0 at most (names_dc abadi" in causes.causes(tmp_path)
    written(tmp_path, "names_dc", rows[:2])
    assert "CPU and GPU" not in causes.causes(tmp_path)


def test_the_cause_of_names_is_the_choice_that_moves_most(tmp_path):
    base = {"epsilon": 8.0}
    printed = papers.D8[-1].printed["abadi"][0] / 100
    rows = [row("abadi", 0, base, printed + 0.05)]
    written(tmp_path, "names_dc", rows)
    assert "5.0 points above" in causes.causes(tmp_path)
    rows += [
        row("abadi", 0, base | {"model": "lstm-padding"}, printed - 0.03),
        row("abadi", 0, base | {"model": "lstm-narrow"}, printed + 0.04),
    ]
    written(tmp_path, "names_dc", rows)
    found = causes.causes(tmp_path)
    assert "take away: the state after the padding, not after the last letter." in found
    assert "-8.00" in dc_tables.names_table(tmp_path)


def test_the_small_lstm_says_what_the_padding_takes(tmp_path):
    kinds = (({}, 0.66), (sweeps.PADDED, 0.47), (sweeps.PADDED | {"data": "names_14"}, 0.55), ({"lr": 0.00032}, 0.54))
    rows = [row("abadi", 0, sweeps.NARROW | change, found) | {"balanced": 0.15} for change, found in kinds]
    there = row("abadi", 0, sweeps.NARROW, 0.1, device="cuda")
    base, read = {"epsilon": 8.0}, sweeps.EXAMPLE | {"model": "lstm-padding"}
    rows += [there, row("abadi", 0, base, 0.65), row("abadi", 0, base | read, 0.59)]
    written(tmp_path, "names_dc", rows)
    assert "| the state after the padding, 14 places | 55.00 | 1 | -11.00 | 15.00 |" in dc_tables.narrow_table(tmp_path)
    found = causes.causes(tmp_path)
    assert "against the printed numbers: at lr 0.001 Abadi -0.91 (n = 1). Adam's" in found
    assert "66.0 after the last letter, 55.0 after 14 places and 47.0 after 20" in found
    rows.append(row("abadi", 0, base | read | {"lr": 0.00256}, 0.68))
    assert "After the last letter, without padding, it has 54.0 at lr 0.00032." in found
    written(tmp_path, "names_dc", rows[4:])
    assert "at lr 0.001 Abadi -0.91 (n = 1); at lr 0.00256 Abadi +8.09 (n = 1). Adam's" in causes.causes(tmp_path)
    assert "the length of the padding" not in causes.causes(tmp_path)


def test_a_rate_of_the_papers_grid_stands_beside_the_default_one(tmp_path):
    cell, shift = papers.NAMES_RATE, {"abadi": 0.01, "dc-sgd-p": -0.01, "dc-sgd-e": 0.005, "auto-s": 0.03}
    rows = [row("abadi", 0, {"epsilon": 8.0}, 0.65), row("auto-s", 0, papers.NAMES_READ.settings, 0.50)]
    rows += [row("abadi", 0, papers.NAMES_READ.settings, 0.50)]
    rows += [row(m, 0, cell.settings, cell.printed[m][0] / 100 + by) for m, by in shift.items()]
    written(tmp_path, "names_dc", rows[:1])
    assert "public example" not in causes.causes(tmp_path)
    written(tmp_path, "names_dc", rows)
    found = causes.causes(tmp_path)
    assert (
        "at lr 0.00128 Abadi +1.00 (n = 1), DC-SGD-P -1.00 (n = 1), DC-SGD-E +0.50 (n = 1), AUTO-S +3.00 (n = 1)."
        in found
    )
    assert "at lr 0.001 Abadi -9.91 (n = 1), AUTO-S -6.34 (n = 1);" in found
    claims = {c.text: c.verdict for c in report.claims(tmp_path)}
    assert claims[f"{cell.label}, AUTO-S: within 2 points of the printed 56.34"] == "above, few seeds"


def test_knobs_that_the_paper_tunes_stand_beside_ours(tmp_path):
    base = {"epsilon": 8.0}
    rows = [row(m, 0, base, 0.5) | {"clip_norms": [c]} for m, c in (("dc-sgd-p", 60.0), ("dc-sgd-e", 1.5))]
    rows += [row(m, 0, base, 0.5) for m in ("abadi", "auto-s")]
    written(tmp_path, "cifar10_dc", rows)
    assert "40 times the noise" in causes.causes(tmp_path)
    assert "Against the printed numbers" not in causes.causes(tmp_path)
    written(tmp_path, "cifar10_dc", [*rows, row("dc-sgd-p", 0, base | {"percentile": 0.3}, 0.5318)])
    assert "tried on this test set: DC-SGD-P with p = 0.3 -1.00 (n = 1)." in causes.causes(tmp_path)
    claims = {c.text: (c.found, c.verdict) for c in report.claims(tmp_path)}
    text = "CIFAR-10, ResNet18, ε = 8, p = 0.3, DC-SGD-P: within 1.5 points of the printed 54.18"
    assert claims[text] == ("-1.00, n = 1", "holds, few seeds")


def test_imagenettes_gap_is_split(tmp_path):
    rows = [row("psac", 0, {}, 0.60), row("non-private", 0, {}, 0.81)]
    written(tmp_path, "imagenette", rows)
    found = causes.causes(tmp_path)
    assert "P prints 63.66 for Abadi and 63.44 for AUTO-S where A prints 60.29 and 60.71" in found
    assert "+9.9 points from A without privacy (n = 1), and from P PSAC -4.0 (n = 1): privacy" in found
    assert "privacy costs us 21.0 points" in found
    assert "At 32 pixels" not in causes.causes(tmp_path)
    for change, private, plain in ((sweeps.TINY, 0.59, 0.76), (sweeps.TINY | sweeps.QUARTERS, 0.62, 0.73)):
        rows += [row("psac", 0, change, private), row("non-private", 0, change, plain)]
    written(tmp_path, "imagenette", rows)
    found = causes.causes(tmp_path)
    assert (
        "ours against A: not private +1.9 (n = 1); against P: PSAC -2.0 (n = 1); privacy costs 11.0 with PSAC (n = 1)"
        in found
    )
    assert "by -5.0 without privacy and by -1.0 with PSAC (seed 0)" in found
    assert "What was tried" not in found
    lines = tables.imagenette_table(tmp_path).splitlines()
    assert "| 32 pixels | 59.00 |  | 76.00 | 17.00 |" in lines
    assert "| 32 pixels, quarters, lr 0.001 | not run |  | not run |  |" in lines
    faster = sweeps.IMAGENETTE_CHANGES["32 pixels, quarters, lr 0.001"]
    written(tmp_path, "imagenette", [*rows, row("psac", 0, faster, 0.61) | {"by_epoch": [0.5, 0.63, 0.61]}])
    found = causes.causes(tmp_path)
    assert "(seed 0, table `imagenette`): lr 0.001: -1.0." in found
    assert "lies 2.0 points above the last on average (at most 2.0; 1 private runs)" in found
    assert "| 61.00 | 63.00 | not run |  |" in tables.imagenette_table(tmp_path)
    normed, fast = (cell.settings for cell in papers.IMAGENETTE_READ)
    rows += [row("auto-s", 0, normed, 0.59), row("auto-s", 0, sweeps.TINY | sweeps.QUARTERS, 0.585)]
    written(tmp_path, "imagenette", [*rows, row("psac", 1, fast, 0.63)])
    assert "A norm after each sum of two" not in causes.causes(tmp_path)  # no pair of seeds
    written(tmp_path, "imagenette", [*rows, row("psac", 0, fast, 0.63)])
    found = causes.causes(tmp_path)
    assert "moves AUTO-S by +0.5 (n = 1), to -1.7 from A" in found
    assert "PSAC lies -1.0 from P, where it lay -2.0 (n = 1)" in found


def test_imagenette_stands_beside_both_papers():
    heads, *lines = tables.TABLES["P2"]().splitlines()
    assert heads.endswith("| printed in P | printed in A |")
    assert any(line.endswith("| 63.44 ± 0.24 | 60.71 ± 0.48 |") for line in lines)
    assert tables.TABLES["P3"]().splitlines()[0].endswith("| PSAC − method, pairs | printed |")


def test_the_sweep_of_imagenette_names_every_run_once():
    points = [(method, tuple(sorted(settings.items()))) for _, method, settings in sweeps.imagenette()]
    assert len(points) == len(set(points))
    for method in ("psac", "abadi", "auto-s", "non-private"):
        assert (method, ()) in points


def test_a_long_run_says_how_far_it_has_come(capsys):
    found = list(recipes._told(iter([1.0, 2.0, 3.0]), "psac seed 0", {"steps": 3}, every=0.0))
    assert found == [1.0, 2.0, 3.0]
    assert "psac seed 0: step 3 of 3, " in capsys.readouterr().err
    list(recipes._told(iter([1.0]), "", {"steps": 1}))
    assert capsys.readouterr().err == ""


def test_every_figure_is_on_the_page_with_what_it_shows():
    lines = report.pictures().splitlines()[2:]
    assert len(lines) == len(figures.DRAWN)
    for line in lines:
        _, link, shown, source, _ = (part.strip() for part in line.split(" | ".strip()))
        assert (report.REPORT.parent / link.split("(")[1].rstrip(")")).exists()
        assert shown.endswith(".")
        assert (report.RESULTS / source).exists()


def test_a_rate_that_does_not_suit_the_run_without_privacy_is_said(tmp_path):
    written(tmp_path, "mnist_best", [row("psac", 0, {}, 0.98), row("non-private", 0, {}, 0.99)])
    assert "trains at the private recipe's rate" not in tables.best_caveat(tmp_path)
    written(tmp_path, "mnist_best", [row("psac", 0, {}, 0.98), row("non-private", 0, {}, 0.4)])
    assert "Without privacy mnist_best trains" in tables.best_caveat(tmp_path)
    assert "ends at 40.0 (n = 1), below the private runs" in causes.causes(tmp_path)
