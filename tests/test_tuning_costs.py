"""What a search costs, and the secret number of its runs."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import clipwise as cw
from clipwise.accounting.tuning import METHODS
from clipwise.sampling import Coins

RUN = {"sampling_prob": 0.01, "steps": 1000, "delta": 1e-5}


def rdp(*events, delta=1e-5):
    accountant = dp_accounting.rdp.RdpAccountant()
    for event, times in events:
        accountant.compose(event, times)
    return accountant.get_epsilon(delta)


def training_event(sigma=2.0):
    release = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(sigma))
    return dp_accounting.SelfComposedDpEvent(release, 1000)


# -- what a search costs ----------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [10, 45, 90])
def test_costs_agree_with_dp_accounting(runs):
    def found(**how):
        return cw.tuning_epsilon(cw.Search(runs=runs, **how), noise_multiplier=2.0, **RUN)

    def repeated(shape):
        return rdp((dp_accounting.dp_event.RepeatAndSelectDpEvent(training_event(), runs, shape), 1))

    assert found(method="composition") == pytest.approx(rdp((training_event(), runs)), rel=1e-9)
    assert found(method="composition", accountant="pld") == pytest.approx(
        cw.epsilon(noise_multiplier=2.0, sampling_prob=0.01, steps=1000 * runs, delta=1e-5), rel=1e-9
    )
    for shape in (0.0, 0.5, 1.0):
        assert found(method="negative-binomial", shape=shape) == pytest.approx(repeated(shape), rel=1e-9)
    assert found(method="poisson") == pytest.approx(repeated(math.inf), rel=1e-9)


@pytest.mark.parametrize("runs", [10, 45, 90])
def test_liu_talwar_is_the_formula(runs):
    total = cw.tuning_epsilon(cw.Search(runs=runs, method="liu-talwar"), noise_multiplier=2.0, **RUN)
    longest = 2 * runs * math.log(1e20)
    delta_1 = ((1e-5 - 1e-20) / (3 * longest)) ** 2 / 2
    assert 3 * math.sqrt(2 * delta_1) * longest + 1e-20 == pytest.approx(1e-5)
    expected = 3 * rdp((training_event(), 1), delta=delta_1) + 3 * math.sqrt(2 * delta_1)
    assert total == pytest.approx(expected, rel=1e-9)


def test_a_noisy_score_is_paid_for():
    search = cw.Search(runs=10)
    free = cw.tuning_epsilon(search, noise_multiplier=2.0, **RUN)
    paid = cw.tuning_epsilon(search, noise_multiplier=2.0, score_noise=4.0, **RUN)
    both = dp_accounting.ComposedDpEvent([training_event(), dp_accounting.GaussianDpEvent(4.0)])
    assert paid == pytest.approx(rdp((dp_accounting.dp_event.RepeatAndSelectDpEvent(both, 10, 1.0), 1)), rel=1e-9)
    assert paid > free


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("score_noise", [None, 20.0])
def test_calibration_never_exceeds_the_target(method, score_noise):
    search = cw.Search(runs=10, method=method)
    sigma = cw.calibrate_search(search, epsilon=3.0, score_noise=score_noise, **RUN)
    spent = cw.tuning_epsilon(search, noise_multiplier=sigma, score_noise=score_noise, **RUN)
    assert 3.0 - 1e-3 <= spent <= 3.0
    assert sigma > cw.calibrate(epsilon=3.0, **RUN)  # tuning is never free


def test_an_impossible_search_says_so():
    with pytest.raises(ValueError, match="The search alone costs"):
        cw.calibrate_search(cw.Search(runs=10), epsilon=0.5, score_noise=1.0, **RUN)


@pytest.mark.parametrize(
    "bad",
    [
        {"method": "best"},
        {"runs": 0},
        {"runs": 0.5},
        {"runs": math.nan},
        {"runs": True},
        {"method": "composition", "runs": 2.5},
        {"shape": -1},
        {"shape": math.inf},
        {"shape": 1e-9},
        {"accountant": "gdp"},
        {"accountant": "pld"},
    ],
    ids=str,
)
def test_searches_that_do_not_exist_are_refused(bad):
    with pytest.raises((ValueError, TypeError)):
        cw.Search(**bad)


# -- the secret number of runs ----------------------------------------------------------------------


def probabilities(search, most=3000):
    """P[K = k] by definition 1 of Papernot & Steinke, written out, for k = 0, 1, …"""
    if search.method == "poisson":
        return [math.exp(-search.runs + k * math.log(search.runs) - math.lgamma(k + 1)) for k in range(most)]
    if search.method == "liu-talwar":
        gamma, longest = 1 / (2 * search.runs), math.floor(2 * search.runs * math.log(1e20))
        head = [0.0] + [gamma * (1 - gamma) ** (k - 1) for k in range(1, min(longest, most))]
        return [*head, 1 - sum(head)]
    low, high = 1e-12, 1.0
    for _ in range(200):
        gamma = (low + high) / 2
        weights = pmf(search.shape, gamma, most)
        low, high = (gamma, high) if np.dot(weights, np.arange(most)) > search.runs else (low, gamma)
    return list(weights)


def pmf(shape, gamma, most):
    k = np.arange(1, most)
    if shape == 0:
        log = k * math.log1p(-gamma) - np.log(k) - math.log(math.log(1 / gamma))
    else:
        falling = np.cumsum(np.log((np.arange(most - 1) + shape) / (np.arange(most - 1) + 1)))
        log = k * math.log1p(-gamma) - math.log(gamma**-shape - 1) + falling
    return np.concatenate([[0.0], np.exp(log)])


@pytest.mark.parametrize(
    "search",
    [cw.Search(runs=4), cw.Search(runs=6, shape=0), cw.Search(runs=5, shape=0.5), cw.Search(runs=3, method="poisson"),
     cw.Search(runs=4, method="liu-talwar")],
    ids=str,
)  # fmt: skip
def test_the_number_of_runs_has_its_distribution(search):
    coins = (np.arange(40_000) + 0.5) / 40_000
    drawn = np.bincount([search.number_of_runs(float(c)) for c in coins], minlength=40) / len(coins)
    expected = np.array(probabilities(search))[: len(drawn)]
    assert np.abs(drawn[: len(expected)] - expected).max() <= 1e-3


@given(coin=st.floats(0, 1, exclude_max=True), runs=st.integers(1, 200), method=st.sampled_from(METHODS))
def test_any_coin_gives_a_number_of_runs(coin, runs, method):
    found = cw.Search(runs=runs, method=method).number_of_runs(coin)
    assert found >= (0 if method == "poisson" else 1)
    if method == "composition":
        assert found == runs


@pytest.mark.parametrize("shape", [0, 1e-6, 1e-3, 1, 50])
def test_extreme_coins_give_reasonable_numbers(shape):
    search = cw.Search(runs=3, shape=shape)
    assert search.number_of_runs(1 - 2**-53) < 10_000
    assert search.number_of_runs(0.0) == 1


def test_coins_differ_between_searches():
    assert len({Coins().uniform() for _ in range(50)}) == 50
