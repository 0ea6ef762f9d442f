from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import clipwise as cw
from clipwise.accounting.accountants import gaussian_epsilon
from clipwise.audit import (
    audit_draws,
    audit_run,
    clopper_pearson_epsilon,
    gaussian_shift,
    one_run_epsilon,
    upper_rate,
)


@pytest.mark.parametrize(("errors", "trials"), [(0, 100), (3, 50), (50, 100), (100, 100)])
def test_rates_are_those_of_clopper_and_pearson(errors, trials):
    found = upper_rate(errors, trials, 0.1)
    if errors == trials:
        assert found == 1
    else:
        assert found == pytest.approx(stats.binomtest(errors, trials).proportion_ci(0.9, "exact").high)


def test_rates_cover():
    rng = np.random.default_rng(0)
    missed = sum(upper_rate(int(rng.binomial(200, 0.1)), 200, 0.1) < 0.1 for _ in range(2000))
    assert missed / 2000 <= 0.05 + 0.015


def test_counted_errors():
    assert clopper_pearson_epsilon(50, 50, 100, 1e-5) == 0
    few, many = (clopper_pearson_epsilon(0, 0, n, 1e-5) for n in (100, 10_000))
    assert 0 < few < many < math.log(10_000)
    low = clopper_pearson_epsilon(10, 900, 1000, 0.0, 0.05)
    fpr, fnr = upper_rate(10, 1000, 0.05), upper_rate(900, 1000, 0.05)
    assert low == pytest.approx(max(math.log((1 - fnr) / fpr), math.log((1 - fpr) / fnr)))


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_gaussian_epsilon_is_the_accountants(mu):
    exact = cw.epsilon(noise_multiplier=1 / mu, sampling_prob=1.0, steps=1, delta=1e-5)
    assert gaussian_epsilon(mu, 1e-5) == pytest.approx(exact, rel=1e-3)
    assert gaussian_epsilon(0.0, 1e-5) == 0


def test_the_shift_is_a_lower_bound():
    rng = np.random.default_rng(1)
    found = [gaussian_shift(rng.normal(0, 1, 20_000), rng.normal(1, 1, 20_000), 0.5, 0.05) for _ in range(100)]
    assert np.mean(np.array(found) > 1) <= 0.08
    assert np.mean(found) > 0.9
    same = audit_draws(rng.normal(0, 1, 1000), rng.normal(0, 1, 1000), 0.0, claimed=1.0, delta=1e-5)
    assert same.lower == 0


def by_hand(r, v, m, delta, alpha):
    """The formula of Steinke et al. as it is written, on a grid of ε."""
    best = 0.0
    for eps in np.linspace(0, 8, 801):
        q = math.exp(eps) / (1 + math.exp(eps))
        f = [stats.binom.sf(k - 1, r, q) for k in range(v + 1)]
        p = f[v] + 2 * m * delta * max((f[v - i] - f[v]) / i for i in range(1, v + 1))
        if p < alpha:
            best = eps
    return best


@pytest.mark.parametrize(("r", "v", "m", "delta"), [(100, 90, 1000, 1e-5), (50, 50, 500, 1e-4), (200, 130, 2000, 1e-5)])
def test_one_run_is_the_formula(r, v, m, delta):
    assert one_run_epsilon(r, v, m, delta, 0.05) == pytest.approx(by_hand(r, v, m, delta, 0.05), abs=0.011)


def test_one_run_knows_nothing_from_guessing():
    assert one_run_epsilon(100, 50, 1000, 1e-5) == 0
    assert one_run_epsilon(0, 0, 1000, 1e-5) == 0
    rng = np.random.default_rng(2)
    found = [
        audit_run(rng.normal(size=1000), rng.random(1000) < 0.5, claimed=1.0, delta=1e-5).lower for _ in range(200)
    ]
    assert np.mean(np.array(found) > 0) <= 0.08


def test_scores_and_coins_must_match():
    with pytest.raises(ValueError, match="one score and one coin"):
        audit_run([1.0, 2.0], [True], claimed=1.0, delta=1e-5)


def test_a_run_of_several_sampled_steps():
    found = cw.audit_canaries(epsilon=6.0, canaries=500, steps=5, sampling_prob=0.5)
    assert 0 <= found.lower < found.claimed <= 6
    assert found.as_dict()["details"]["guesses"] == 24
    assert not found.refuted


def test_a_seeded_leak_is_seen():
    """Weights that were never noised give every coin away."""
    coins = np.random.default_rng(3).random(2000) < 0.5
    found = audit_run(coins.astype(float), coins, claimed=1.0, delta=1e-6)
    assert found.refuted
    assert found.ratio > 3


def test_frozen_parameters_and_the_users_model_stay_untouched():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    before = {name: p.clone() for name, p in model.state_dict().items()}
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=1.0, steps=1, expected_batch_size=4)
    x = torch.randn(5, 3)
    found = cw.audit_step(model, lambda m, b: m(b)[:, 0] * 100, plan, x[:4], x[4:], draws=20_000)
    assert 0.5 < found.ratio < 1
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
