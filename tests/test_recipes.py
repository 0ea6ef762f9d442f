"""Recipes, data sets and result files, on made data in the layouts of the real ones."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments import (
    analysis,
    datasets,
    encoder,
    images,
    models,
    papers,
    recipes,
    report,
    runs,
    scattering,
    sentences,
    sweeps,
    tables,
)


def test_every_layout_is_read(made):
    shapes = {name: [tuple(x.shape) for x in datasets.load(name).train] for name in datasets.LOADERS}
    assert shapes["mnist"] == shapes["fashion_mnist"] == [(240, 1, 28, 28), (240,)]
    assert shapes["cifar10"] == [(20, 3, 32, 32), (20,)]
    assert shapes["names"] == [(96, 20), (96,)]
    assert shapes["adult"][0][0] == 9
    assert shapes["imagenette"] == [(16, 3, 96, 96), (16,)]
    assert shapes["celeba_smiling"] == [(4, 3, 64, 64), (4,)]
    assert datasets.load("celeba_smiling").train[1].tolist() == [1, 0, 1, 0]
    assert datasets.load("celeba_male").test[1].tolist() == [0] * 4
    assert datasets.load("celeba_all").train[1].tolist() == [[1.0, 0.0], [0.0, 0.0]] * 2
    assert torch.allclose(datasets.load("imagenette").test[0][-1, 0], torch.tensor(1.0), atol=0.05)  # red
    assert shapes["sst2"] == [(40, sentences.LENGTH), (40,)]
    assert datasets.load("sst2").test[0][:2, :3].tolist() == [[3, 4, 0], [2, 4, 0]]
    assert datasets.load("adult").test[1].tolist() == [0, 1, 1] * 3
    name = datasets.load("names").train[0][0]
    assert datasets.LETTERS[int(name[int((name != 0).sum()) - 1]) - 1] == "o"  # ó without its accent


def test_missing_and_broken_data_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "folders", lambda: [tmp_path])
    with pytest.raises(datasets.DataMissing, match="make data"):
        datasets.load("mnist")
    (tmp_path / "cut").write_bytes(b"\0\0\x08\1" + struct.pack(">i", 10) + b"12")
    with pytest.raises(ValueError, match="cut off"):
        datasets.idx(tmp_path / "cut")


@pytest.mark.parametrize("name", ["mnist", "mnist_dc", "names_dc", "adult", "sst2", "fashion_mnist_best"])
def test_recipes_train_and_repeat_themselves_to_the_last_digit(made, name):
    small = recipes.RECIPES[name].changed({"epochs": 2, "batch_size": 4, "epsilon": 8, "delta": 1e-3})
    rows = [recipes.run_one(small, "psac", seed=3) for _ in range(2)]
    for row in rows:
        row.pop("seconds")
    assert rows[0] == rows[1]
    assert rows[0]["epsilon"] <= 8


def test_image_recipes_train(made, monkeypatch):
    monkeypatch.setattr(images, "CELEBA_SIDE", 16)
    small = recipes.RECIPES["celeba_smiling"].changed({"epochs": 1, "batch_size": 2, "delta": 1e-3})
    assert recipes.run_one(small, "psac", 0)["steps"] == 2


def test_half_precision_is_that_of_the_loss_alone(made):
    small = {"epochs": 1, "batch_size": 60, "delta": 1e-3, "epsilon": 8}
    seen = []
    for precision in ("highest", "bfloat16"):
        recipe = recipes.RECIPES["mnist"].changed(small | {"precision": precision})
        data = recipes.prepared(recipe, "cpu")
        torch.manual_seed(0)
        model = recipes.MODELS["cnn"](recipe, data)
        found = recipes.losses_of(recipe)(model, tuple(v[:8] for v in data.train))
        seen.append(found)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert recipes.run_one(recipe, "psac", 0)["steps"] == 4
    assert found.dtype == torch.float32  # cross entropies are sums
    assert 0 < (seen[0] - seen[1]).abs().max() < 0.05


@pytest.mark.filterwarnings("ignore:.*histogram is mostly noise")
@pytest.mark.parametrize("method", [*recipes.METHODS, recipes.NON_PRIVATE])
def test_every_method_trains(made, method):
    row = recipes.run_one(recipes.RECIPES["fashion_mnist"].changed({"epochs": 1, "batch_size": 60}), method, 0)
    assert 0 <= row["accuracy"] <= 1
    assert ("epsilon" in row) == (method != recipes.NON_PRIVATE)
    assert ("clip_norms" in row) == (method in ("quantile", "dc-sgd-p", "dc-sgd-e"))


def test_augmented_views_and_averaged_weights(made):
    small = recipes.RECIPES["mnist"].changed({"epochs": 1, "batch_size": 60, "copies": 2, "ema": 0.5, "flip": "no"})
    row = recipes.run_one(small, "psac", 0)
    assert {"accuracy", "accuracy_last"} <= row.keys()


def test_views_are_moved_images():
    x = torch.zeros(1, 1, 8, 8)
    x[0, 0, 4, 4] = 1
    views = models.flipped_and_shifted(x, 200)
    assert views.shape == (200, 1, 8, 8)
    assert set(views.sum((1, 2, 3)).tolist()) <= {0.0, 1.0}
    assert torch.equal(models.flipped_and_shifted(x, 3, shift=0, flip=False), x.expand(3, -1, -1, -1))
    assert len({tuple(v.flatten().tolist()) for v in views}) > 20


def test_result_files_fill_what_is_missing(made, tmp_path, capsys):
    settings = {"epochs": "1", "batch_size": "60"}
    for seeds in (1, 2, 2):
        runs.run(runs.jobs_of("mnist", ["psac", "abadi"], seeds, "cpu", settings, False), 1, tmp_path)
    assert capsys.readouterr().out.count("seed") == 4
    rows = runs.rows_of("mnist", tmp_path)
    assert [(r["method"], r["seed"]) for r in rows] == [("psac", 0), ("abadi", 0), ("psac", 1), ("abadi", 1)]
    assert all(r["settings"] == {"epochs": 1, "batch_size": 60} and r["command"] for r in rows)
    assert "| PSAC | not run | 0 |" in tables.papers_table(papers.P2[:1], tmp_path)  # other settings than the table's
    with pytest.raises(SystemExit, match="No method best"):
        runs.jobs_of("mnist", ["best"], 1, "cpu", {}, False)
    with pytest.raises(SystemExit, match="No setting speed"):
        runs.jobs_of("mnist", ["psac"], 1, "cpu", {"speed": "9"}, False)


def test_tables_compare_seed_by_seed(tmp_path):
    rows = [
        {"method": m, "seed": s, "settings": {}, "device": "cpu", "accuracy": 0.9 + 0.01 * s + more}
        for s in range(3)
        for m, more in (("psac", 0.004), ("abadi", 0.0))
    ]
    (tmp_path / "mnist.json").write_text(json.dumps({"rows": rows}))
    table = tables.papers_table(papers.P2[:1], tmp_path)
    assert "| PSAC | 91.40 ± 1.00 | 3 |  | 98.24 ± 0.07 |" in table
    assert "| Abadi | 91.00 ± 1.00 | 3 | +0.40 ± 0.00 | 98.12 ± 0.07 |" in table


def test_tables_keep_levels_and_devices_apart(tmp_path):
    base = {"method": "abadi", "seed": 0, "settings": {"epsilon": 3.0}, "device": "cuda", "accuracy": 0.8}
    rows = [
        base,
        base | {"seed": 1, "accuracy": 0.9},
        base | {"device": "cpu", "accuracy": 0.1},  # fewer runs than on the other device
        base | {"settings": {"epsilon": 8.0}, "accuracy": 0.95},
        base | {"method": "non-private", "settings": {}, "accuracy": 0.99},
    ]
    (tmp_path / "sst2.json").write_text(json.dumps({"rows": rows}))
    table = tables.papers_table(papers.P3, tmp_path).splitlines()
    assert any("ε = 3 | Abadi | 85.00 ± 7.07 | 2 |" in line for line in table)
    assert any("ε = 8 | Abadi | 95.00 | 1 |" in line for line in table)
    assert sum("| not private | 99.00 | 1 |" in line for line in table) == 2


def test_heatmap_numbers(tmp_path):
    rows = [
        {
            "method": "abadi",
            "seed": 0,
            "settings": {"lr": rate, "clip_norm": value},
            "device": "cpu",
            "accuracy": 0.8 - 0.1 * i,
        }
        for rate in sweeps.RATES
        for i, value in enumerate(sweeps.KNOBS["abadi"][1])
    ]
    (tmp_path / "fashion_mnist.json").write_text(json.dumps({"rows": rows}))
    table = tables.heatmap_table(tmp_path)
    assert "| 80.0 (lr 0.5, clip_norm 0.001) | 30.0 | 50.0 | 50.0 | 50.0 | 6 of 36 |" in table
    assert "| PSAC | r | not run |" in table


@pytest.mark.parametrize("build", [models.resnet9, models.resnet18, models.resnet34])
def test_models_take_their_images(build):
    assert build()(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert models.resnet18(standardised=True)(torch.randn(1, 3, 32, 32)).shape == (1, 10)


def test_scaled_sums_have_the_scale_of_their_parts():
    torch.manual_seed(0)
    plain, scaled = (models._Pair(64, 32, scaled)(10 * torch.randn(2, 64, 8, 8)) for scaled in (False, True))
    assert plain.std().item() > 5
    assert scaled.std().item() == pytest.approx(1, abs=0.01)


def test_sweeps_are_made_of_known_runs():
    jobs = [job for name in sweeps.SWEEPS for job in sweeps.sweep(name, 2, "cpu", False)]
    assert len(sweeps.sweep("P4", 1, "cpu", False)) == 3 * 6 * 6
    assert {job.name for job in sweeps.sweep("D8", 1, "cpu", False, ["names_dc"])} == {"names_dc"}
    for job in jobs:
        changed = recipes.RECIPES[job.name].changed(job.settings)
        assert job.method == recipes.NON_PRIVATE or recipes.METHODS[job.method](changed)


def test_runs_in_several_processes_give_the_same_rows_and_one_that_fails_stops_none(made, tmp_path, capsys):
    settings = {"epochs": 1, "batch_size": 4, "delta": 1e-3}
    jobs = runs.jobs_of("adult", ["psac", "abadi"], 2, "cpu", settings, False)
    bad = runs.jobs_of("adult", ["psac"], 1, "cpu", settings | {"model": "none"}, False)
    runs.run(jobs, 1, tmp_path / "1")
    runs.run([*bad, *jobs], 2, tmp_path / "2")
    found = [
        sorted((r["method"], r["seed"], r["accuracy"]) for r in runs.rows_of("adult", tmp_path / str(n)))
        for n in (1, 2)
    ]
    assert len(found[0]) == 4
    assert found[0] == found[1]
    assert "failed: KeyError('none')" in capsys.readouterr().out


def test_rows_made_elsewhere_are_added_once(tmp_path):
    row = {"method": "psac", "seed": 0, "settings": {}, "device": "cpu", "accuracy": 0.5}
    for folder, rows in (("here", [row]), ("there", [row, row | {"seed": 1}])):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mnist.json").write_text(json.dumps({"rows": rows}))
    for _ in range(2):
        runs.merge(tmp_path / "there", tmp_path / "here")
        assert [r["seed"] for r in runs.rows_of("mnist", tmp_path / "here")] == [0, 1]


def test_encoder_is_bert(made):
    from transformers import BertModel

    tokens = torch.tensor([[2, 3, 4, 0, 0], [4, 0, 0, 0, 0]])
    theirs = BertModel.from_pretrained(made / "minilm").eval().half().float()
    expected = theirs(tokens, attention_mask=(tokens != 0).long()).last_hidden_state
    found = encoder.classifier(2).eval().states(tokens)
    real = tokens != 0
    assert torch.allclose(found[real], expected[real], atol=2e-3)


def test_scattering_has_its_orders():
    constant = scattering.scattering(torch.ones(1, 1, 32, 32))
    assert constant.shape == (1, 81, 8, 8)
    assert torch.allclose(constant[0, 0], torch.ones(8, 8), atol=1e-3)  # the blur keeps means
    assert constant[0, 1:].abs().max() < 1e-5  # wavelets have mean 0
    stripes = torch.cos(0.75 * torch.pi * torch.arange(32.0)).expand(1, 1, 32, 32)
    turned = scattering.scattering(stripes.transpose(2, 3))[0, 1:9].mean((1, 2))
    along = scattering.scattering(stripes)[0, 1:9].mean((1, 2))
    assert int(turned.argmax()) == 3  # angle 0
    assert int(along.argmax()) == 7  # and a right angle from it
    x = torch.rand(3, 2, 28, 28)
    alone = torch.cat([scattering.features(x[i : i + 1], 27) for i in range(3)])
    assert torch.allclose(scattering.features(x, 27), alone, atol=1e-4)  # a record's features are its own


def test_committed_page_is_what_the_result_files_say():
    assert report.REPORT.read_text() == report.text()


def test_claims_follow_from_numbers(tmp_path):
    def row(seed, accuracy, method="psac", settings=None):
        given = {"method": method, "seed": seed, "settings": settings or {}, "device": "cpu", "accuracy": accuracy}
        return given | {"command": "c", "commit": "abc", "machine": "m", "torch": "2"}

    def found(rows):
        (tmp_path / "mnist.json").write_text(json.dumps({"rows": rows}))
        return {c.text: c.verdict for c in report.claims(tmp_path)}

    bar, pair = (
        "MNIST, PSAC at the paper's settings: ≥ 98.1",
        "P table 2: PSAC above Abadi on MNIST, 4-layer CNN, (3, 1e-5)",
    )
    assert found([])[bar] == "not run"
    assert found([row(0, 0.99)])[bar] == report.OPEN
    high = [row(s, 0.985 + 0.001 * s) for s in range(3)]
    assert found(high)[bar] == report.HOLDS
    assert found([row(s, 0.97) for s in range(3)])[bar] == report.FAILS
    low = [row(s, 0.96 + 0.0011 * s, "abadi") for s in range(3)]
    assert found(high + low)[pair] == report.HOLDS
    assert (
        found(high + [row(r["seed"], 2 * 0.985 - r["accuracy"], "abadi") for r in high])[pair] == "no difference seen"
    )
    curves = [{"seed": s, "step": 0} | dict.fromkeys(analysis.TURNING, 0.5) | {"PSAC, r = 0.1": 0.6} for s in range(2)]
    (tmp_path / "bias.json").write_text(json.dumps({"curves": curves}))
    verdicts = found(high)
    assert verdicts["P fig. 3: PSAC (r = 0.1, C = 0.1) turns the gradient less than AUTO-V, MNIST"] == report.HOLDS
    assert "| mnist.json | `c` | abc | m, torch 2 | 3 |" in report.sources(tmp_path)
    assert "- MNIST, 4-layer CNN, (3, 1e-5): no run." not in report.missing(tmp_path)
    assert "- Fashion-MNIST, 4-layer CNN, (3, 1e-5): no run." in report.missing(tmp_path)


def test_rules_turn_and_stop_gradients_as_the_papers_say():
    lazy = analysis.lazy(2_000)
    assert max(abs(v) for v in lazy["curves"]["AUTO-V"]) < 1e-9  # signs alone, half of each: it never moves
    assert lazy["curves"]["PSAC, r = 0.01"][-1] > lazy["curves"]["AUTO-S, γ = 0.01"][-1] > 0
    weights = analysis.weights()["weights"]
    assert weights["AUTO-S, γ = 0.01"][0] > 90 > 2 > weights["PSAC, r = 0.1"][0]
    same = torch.ones(4, 3)
    assert all(value == 1 for value in analysis.turned(same).values())


def test_brute_force_gradients_are_autograds():
    torch.manual_seed(0)
    model, batch = models.paper_cnn(), (torch.randn(3, 1, 28, 28), torch.tensor([1, 2, 3]))
    losses = recipes.losses_of(recipes.RECIPES["mnist"])
    found = analysis.per_example(model, losses, batch).sum(0)
    losses(model, batch).sum().backward()
    assert torch.allclose(found, torch.cat([p.grad.flatten() for p in model.parameters()]), atol=1e-5)


def test_the_papers_bound_falls_with_the_root_of_r():
    found = analysis.bound(points=3, low=1e-8, high=1e-6)
    for curve in found["curves"]:
        first, _, last = curve["term"]
        assert first / last == pytest.approx(10, rel=0.02)  # r^(-1/2) over two decades
