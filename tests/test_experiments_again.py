"""Runs that are trained a second time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments import again, recipes, runs
from experiments.__main__ import main


def test_a_run_on_the_cpu_is_the_same_to_the_last_digit_and_a_changed_file_is_found_out(made, tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPWISE_COMMIT", "abc")
    settings = {"epochs": 1, "batch_size": 4, "delta": 1e-3}
    runs.run(runs.jobs_of("adult", ["psac", "abadi"], 2, "cpu", settings, False), 1, tmp_path)
    assert again.again_table(tmp_path) == "Not run."
    found = again.again("adult", results=tmp_path)
    assert [r["examples_apart"] for r in found] == [0, 0]
    assert len(again.again("adult", results=tmp_path)) == 2  # compared already
    content = json.loads((tmp_path / "adult.json").read_text())
    for row in content["rows"]:
        row["accuracy"] += 2 / 9
    (tmp_path / "adult.json").write_text(json.dumps(content))
    assert [r["examples_apart"] for r in again.again("adult", seed=1, results=tmp_path, rows=1)] == [0, 0, 2]
    assert "| adult, PSAC | cpu | 2 | 2 of 9 | 1 of 2 | abc and abc |" in again.again_table(tmp_path)
    assert "| adult, Abadi | cpu | 1 | 0 of 9 | 1 of 1 | abc and abc |" in again.again_table(tmp_path)
    assert len({line.count("|") for line in again.again_table(tmp_path).splitlines()}) == 1


def test_seeds_before_the_first_are_left_out(made, tmp_path, monkeypatch):
    monkeypatch.setitem(
        recipes.RECIPES, "adult", recipes.RECIPES["adult"].changed({"epochs": 1, "batch_size": 4, "epsilon": 50.0})
    )
    given = ["run", "adult", "--rule", "non-private", "--seeds", "3", "--first", "2", "--results", str(tmp_path / "r")]
    monkeypatch.setattr(sys, "argv", ["experiments", *given])
    main()
    assert [row["seed"] for row in runs.rows_of("adult", tmp_path / "r")] == [2]


def test_merging_leaves_files_that_are_no_recipes_alone(tmp_path):
    row = {"method": "psac", "seed": 0, "settings": {}, "device": "cpu"}
    for folder, names in (("elsewhere", ("adult", "bound")), ("here", ("bound",))):
        (tmp_path / folder).mkdir()
        for name in names:
            content = {"rows": [row]} if name == "adult" else {"curves": [folder]}
            (tmp_path / folder / f"{name}.json").write_text(json.dumps(content))
    for _ in range(2):
        runs.merge(tmp_path / "elsewhere", tmp_path / "here")
    assert runs.rows_of("adult", tmp_path / "here") == [row]
    assert json.loads((tmp_path / "here" / "bound.json").read_text()) == {"curves": ["here"]}
