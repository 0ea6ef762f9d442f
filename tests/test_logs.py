"""Logs hold released values only, and go on where they stopped."""

from __future__ import annotations

import csv
import sys

import pytest
import torch

import clipwise as cw
from clipwise.errors import MissingExtra
from clipwise.integrations.logs import CsvLog, TensorBoardLog


def run(steps: int = 4):
    model = torch.nn.Linear(3, 1)
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.5, steps=steps, expected_batch_size=4)
    loss = lambda m, x: m(x)[:, 0] ** 2  # noqa: E731
    return cw.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss)


def test_csv(tmp_path):
    training, path = run(), tmp_path / "deep" / "run.csv"
    for number, batch in enumerate(training.batches(torch.randn(8, 3))):
        log = CsvLog(path, every=2) if number in (0, 2) else log  # noqa: F821  opened again in the middle
        training.step(batch)
        log.write(training)
    rows = list(csv.DictReader(path.read_text().splitlines()))
    assert [float(row["step"]) for row in rows] == [2, 4]
    assert float(rows[-1]["epsilon"]) == training.epsilon
    assert float(rows[0]["learning_rate"]) == 0.1
    assert set(rows[0]) == {"step", "epsilon", "clip_norm", "learning_rate"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    training = run()
    with TensorBoardLog(tmp_path) as log:
        for batch in training.batches(torch.randn(8, 3)):
            training.step(batch)
            log.write(training)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert set(found.Tags()["scalars"]) == {"released/epsilon", "released/clip_norm", "released/learning_rate"}
    assert [event.step for event in found.Scalars("released/epsilon")] == [1, 2, 3, 4]
    assert found.Scalars("released/epsilon")[-1].value == pytest.approx(training.epsilon)


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtra, match=r"clipwise\[tensorboard\]"):
        TensorBoardLog(tmp_path)
