"""Rows 46 and 47: the tests can fail, and the claims stand against attack."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import clipwise as cw
from clipwise.cli import RULES, THRESHOLDS, _threshold
from clipwise.cli_audit import audit_pair, audit_table

sys.path.insert(0, str(Path(__file__).parents[1] / "mutants"))

from mutants import MUTANTS, mutated


def test_46_at_least_forty_mutants_that_apply():
    assert len(MUTANTS) >= 40
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        source, changed = mutated(mutant)
        assert source != changed, mutant.name
        if mutant.file.endswith(".py"):
            compile(changed, mutant.file, "exec")


@pytest.mark.parametrize("name", RULES)
def test_47_audited_never_exceeds_claimed(name):
    for threshold in THRESHOLDS:
        found = audit_pair(RULES[name](), _threshold(threshold, 1.0), 1.0, 1e-5, 200_000, 1e-6)
        if found is not None:
            assert not found.refuted
            assert found.ratio > 0.9


def test_47_what_a_threshold_releases_is_part_of_the_claim():
    """Most of this budget is the histogram's: were it noised too little, the audit would see it."""
    threshold = cw.PercentileThreshold(histogram_noise=1.2)
    found = audit_pair(cw.Abadi(), threshold, 1.0, 1e-5, 200_000, 1e-6)
    assert found is not None
    assert 0.9 < found.ratio <= 1


def test_47_a_million_draws_come_within_three_percent():
    found = audit_pair(cw.PSAC(), cw.FixedThreshold(1.0), 1.0, 1e-5, 1_000_000, 1e-6)
    assert found is not None
    assert 0.97 <= found.ratio <= 1


def test_47_one_run_shows_almost_half_of_the_claim():
    ratios = [cw.audit_canaries(epsilon=4.0, delta=1e-5, canaries=10_000).ratio for _ in range(3)]
    assert max(ratios) < 1
    assert sorted(ratios)[1] >= 0.38  # 0.5 on average


def test_47_too_little_noise_is_refuted(monkeypatch):
    """The audit itself can fail: with noise for σ = 0.8 under a claim for σ = 1."""
    real = cw.noise.NoiseSource.add_

    def less(self, values, *, noise_multiplier, **others):
        return real(self, values, noise_multiplier=0.8 * noise_multiplier, **others)

    monkeypatch.setattr(cw.noise.NoiseSource, "add_", less)
    rows = audit_table(
        {"psac": cw.PSAC}, {"fixed": cw.FixedThreshold}, sigma=1.0, delta=1e-5, draws=200_000, alpha=1e-6, canaries=0
    )
    assert all(row["refuted"] for row in rows)


def test_47_a_users_own_model():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    plan = cw.Plan(noise_multiplier=1.5, delta=1e-5, sampling_prob=1.0, steps=1, expected_batch_size=5)
    x = torch.randn(6, 6)
    found = cw.audit_step(model, lambda m, b: m(b).square().sum(1), plan, x[:5], x[5:], draws=50_000)
    assert 0.2 < found.ratio < 1
    assert all(p.grad is None for p in model.parameters())
