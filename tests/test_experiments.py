from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from experiments import digits, figures, synthetic, tables  # noqa: E402
from experiments.results_io import load, save  # noqa: E402


def test_synthetic_results_and_their_figures(tmp_path):
    save("percentiles", synthetic.percentiles(trials=20), tmp_path)
    save("errors", synthetic.errors(trials=20), tmp_path)
    for name in ("D2", "D3"):
        for path in figures.draw(name, tmp_path, tmp_path):
            assert path.stat().st_size > 5000
    curve = next(c for c in load("percentiles", tmp_path)["curves"] if (c["bins"], c["noise"]) == (20, 1.0))
    assert all(row["within_1"] >= 0.9 for row in curve["rows"])


@pytest.mark.parametrize("name", figures.DRAWN)
def test_committed_figures_are_drawn_from_committed_results(name, tmp_path):
    """The same bytes, since an SVG holds no date."""
    drawn = next(path for path in figures.draw(name, out=tmp_path) if path.suffix == ".svg")
    assert drawn.read_text() == (figures.FIGURES / drawn.name).read_text()


def test_a_missing_result_says_how_to_make_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m experiments run errors"):
        figures.draw("D3", tmp_path, tmp_path)
    with pytest.raises(ValueError, match="Unknown figure"):
        figures.draw("D99")


def test_the_split_keeps_choosing_and_reporting_apart():
    parts = digits.split()
    assert [len(images) for images, _ in parts] == [1200, 197, 400]


def test_the_tuning_table_is_the_one_in_the_docs():
    table = tables.tuning_table()
    assert table in (ROOT / "docs" / "tuning.md").read_text()


def test_the_command_line():
    done = subprocess.run([sys.executable, "-m", "experiments", "table", "tuning"], capture_output=True, cwd=ROOT)
    assert done.returncode == 0
    assert "PSAC" in done.stdout.decode()
