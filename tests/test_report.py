"""The page of a run: what it says, what it leaves out, and that it stands alone."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

import clipwise as cw
from clipwise.cli import app
from clipwise.recipes.digits import train_digits
from clipwise.report import epsilon_over_steps, page, write_report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    plan = cw.Plan(
        epsilon=3.0,
        delta=1e-4,
        sampling_prob=0.2,
        steps=12,
        expected_batch_size=300,
        rule=cw.Abadi(),
        threshold=cw.QuantileThreshold(0.5, initial=1.0),
    )
    result = train_digits(plan, out=out, ledger=out / "ledger")
    assert result.report == str(out / "report.html")
    return out


def test_a_run_writes_a_page_that_stands_alone(folder):
    text = (folder / "report.html").read_text()
    statement = json.loads((folder / "report.json").read_text())["privacy_statement"]
    assert statement["guarantee"] in text
    assert "The guarantee stands on what clipwise did itself." in text
    assert f"{statement['noise_multiplier']:.6g}" in text
    assert all(line in text.replace("&#x27;", "'") for line in statement["not_certified"])
    assert text.count("<svg") == 2  # ε, and C which moves
    assert not re.search(r"https?://|<script|@import|url\(", text)


def test_epsilon_over_steps_ends_at_what_was_spent(folder):
    content = json.loads((folder / "report.json").read_text())
    points = content["curves"]["epsilon"]
    assert points[0] == [0, 0.0]
    assert points[-1] == [12, content["privacy_statement"]["spent_epsilon"]]
    assert [e for _, e in points] == sorted(e for _, e in points)
    assert len(epsilon_over_steps(cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.1, steps=3,
                                          expected_batch_size=4), 0)) == 1  # fmt: skip


def test_what_is_not_private_is_shown_on_request_only(folder):
    content = json.loads((folder / "report.json").read_text())
    content["non_private"] = {"gradient norms": [1.0, 2.0, float("nan"), 7.0]}
    assert "NOT PRIVATE" not in page(content)
    assert "gradient norms" not in page(content)
    assert "NOT PRIVATE: do not share this section" in page(content, non_private=True)


def test_text_of_users_cannot_write_html(folder):
    content = json.loads((folder / "report.json").read_text())
    content["title"] = "<script>alert(1)</script>"
    content["privacy_statement"]["notes"] = ["<b>trust me</b>"]
    text = page(content)
    assert "<script>" not in text
    assert "<b>trust me</b>" not in text


@pytest.mark.parametrize(
    ("guarantee", "certified", "told"),
    [
        ("NOT PRIVATE: the noise was seeded", False, "No guarantee can be given"),
        ("(3, 1e-5)-DP, provided that what the user asserted is true", False, "stands on what the user asserted"),
    ],
)
def test_the_verdict(folder, guarantee, certified, told):
    content = json.loads((folder / "report.json").read_text())
    content["privacy_statement"] |= {"guarantee": guarantee, "certified": certified}
    assert told in page(content)


def test_epsilon_is_never_rounded_down(folder):
    content = json.loads((folder / "report.json").read_text())
    content["privacy_statement"]["spent_epsilon"] = 2.123456789
    text = page(content)
    assert text.count("2.1235") == 2
    assert "2.12346" not in text


def test_nothing_looks_better_than_it_is(folder):
    content = json.loads((folder / "report.json").read_text())
    content["privacy_statement"] |= {"noise_multiplier": 1.23456789, "delta": 1.2345644e-5}
    text = page(content)
    assert "1.23456<" in text
    assert "1.2345644e-05" in text
    content["curves"] = {"epsilon": [[0, 0.0], [5, float("inf")]], "clip_norm": [float("inf"), float("nan")]}
    assert "<svg" not in page(content)
    plan = cw.Plan(
        noise_multiplier=2.0, delta=1e-5, sampling_prob=0.1, steps=9, expected_batch_size=4, evaluations=3,
        evaluation_noise=20.0,
    )  # fmt: skip
    assert epsilon_over_steps(plan, 9, looks=3)[-1][1] == plan.epsilon_at(1e-5, 9, 3) > plan.epsilon_at(1e-5, 9, 0)


def test_the_command(folder, tmp_path):
    (folder / "report.html").unlink()
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0
    assert (folder / "report.html").exists()
    for bad in (tmp_path / "nothing", folder / "ledger"):
        assert CliRunner().invoke(app, ["report", str(bad)]).exit_code == 2
    (tmp_path / "report.json").write_text("[]")
    with pytest.raises(ValueError, match="privacy_statement"):
        write_report(tmp_path)
