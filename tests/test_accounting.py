from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clipwise as cw
from clipwise.accounting.accountants import epsilon_of
from clipwise.accounting.events import StepEvent
from clipwise.errors import CannotCertify


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "pld", "rdp"),
    [(0.04, 1.5, 2250, 6.769, 7.329), (256 / 60000, 1.0, 14040, 2.820, 3.076)],
)
def test_reference_values(q, sigma, steps, pld, rdp):
    common = {"noise_multiplier": sigma, "sampling_prob": q, "steps": steps, "delta": 1e-5}
    assert cw.epsilon(**common) == pytest.approx(pld, abs=1e-3)
    assert cw.epsilon(**common, accountant="rdp") == pytest.approx(rdp, rel=2e-3)


@pytest.mark.parametrize(("q", "expected"), [(1.0, 6.1292), (0.04, 0.31511)])
def test_replace_one_golden_values(q, expected):
    found = cw.epsilon(noise_multiplier=1.5, sampling_prob=q, steps=1, delta=1e-5, adjacency="replace_one")
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("q", "sigma", "steps", "gdp"), [(0.04, 1.5, 2250, 6.60)])
def test_gdp_is_an_estimate_below_the_truth_that_cannot_certify(q, sigma, steps, gdp):
    common = {"noise_multiplier": sigma, "sampling_prob": q, "steps": steps, "delta": 1e-5}
    assert cw.epsilon(**common, accountant="gdp") == pytest.approx(gdp, abs=5e-3)
    assert cw.epsilon(**common, accountant="gdp") < cw.epsilon(**common)
    with pytest.raises(CannotCertify, match="estimate"):
        cw.calibrate(epsilon=3, delta=1e-5, sampling_prob=q, steps=steps, accountant="gdp")


@pytest.mark.parametrize(("batch", "steps", "low", "high"), [(512, 4687, 1.0680, 1.0686), (2048, 1171, 1.8076, 1.8083)])
def test_calibration_of_the_papers(batch, steps, low, high):
    plan = cw.Plan(epsilon=3, delta=1e-5, sampling_prob=batch / 60000, steps=steps, expected_batch_size=batch)
    assert low <= plan.noise_multiplier <= high
    assert 3 - 1e-3 <= plan.epsilon <= 3


@settings(max_examples=8)
@given(
    target=st.floats(0.1, 12),
    q=st.sampled_from([0.001, 0.01, 0.2, 1.0]),
    steps=st.sampled_from([1, 30, 1000]),
    delta=st.sampled_from([1e-4, 1e-6]),
    accountant=st.sampled_from(["pld", "rdp"]),
)
def test_calibration_never_exceeds_the_target_and_wastes_little(target, q, steps, delta, accountant):
    common = {"sampling_prob": q, "steps": steps, "delta": delta, "accountant": accountant}
    sigma = cw.calibrate(epsilon=target, **common)
    achieved = cw.epsilon(noise_multiplier=sigma, **common)
    assert achieved <= target
    assert target - achieved <= 1e-3 + 1e-6


def test_pld_against_dp_accounting_itself_and_never_below_a_finer_grid():
    import dp_accounting

    for q, sigma, steps in ((0.01, 0.8, 500), (0.1, 2.0, 100), (0.5, 4.0, 20)):
        fine = dp_accounting.pld.PLDAccountant(value_discretization_interval=2e-5)
        fine.compose(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps)
        truth = fine.get_epsilon(1e-5)
        found = cw.epsilon(noise_multiplier=sigma, sampling_prob=q, steps=steps, delta=1e-5)
        assert truth <= found <= truth * 1.001 + 1e-3


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_monotone_in_every_number(accountant):
    base = {"noise_multiplier": 1.0, "sampling_prob": 0.02, "steps": 200, "delta": 1e-5}

    def spent(**change):
        return cw.epsilon(**(base | change), accountant=accountant)

    for name, values, grows in (
        ("noise_multiplier", (0.05, 0.2, 0.5, 1.0, 2.0, 50.0), False),
        ("steps", (1, 10, 200, 5000), True),
        ("sampling_prob", (1e-5, 0.02, 0.3, 1.0), True),
        ("delta", (1e-18, 1e-9, 1e-5, 0.1), False),
    ):
        found = [spent(**{name: v}) for v in values]
        assert all(math.isfinite(x) and x >= 0 for x in found), (name, found)
        assert found == sorted(found, reverse=not grows), (name, found)


def test_coarser_grids_are_never_smaller():
    event = StepEvent(noise_multiplier=1.0, sampling_prob=0.02, steps=500)
    assert epsilon_of(event, 1e-5, "pld", 1e-3) >= epsilon_of(event, 1e-5, "pld", 1e-4)


def test_without_sampling_composition_is_exact():
    """T Gaussians are one with σ/√T; its δ(ε) has a closed form (Balle & Wang 2018)."""
    from scipy.stats import norm

    eps = cw.epsilon(noise_multiplier=5.0, sampling_prob=1.0, steps=25, delta=1e-5)
    delta = norm.cdf(-eps + 0.5) - math.exp(eps) * norm.cdf(-eps - 0.5)
    assert delta <= 1e-5
    assert delta == pytest.approx(1e-5, rel=5e-3)


BAD = {
    "noise_multiplier": [0, -1, math.nan, math.inf, True, "1", None],
    "sampling_prob": [0, -0.1, 1.5, math.nan, True, "0.1"],
    "steps": [0, -1, 1.5, math.nan, True, "10"],
    "delta": [0, 1, 2, -1e-5, math.nan, True, "1e-5"],
    "accountant": ["moments", None, 3],
    "adjacency": ["add", None],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_bad_numbers_are_refused_by_name(name, value):
    good = {"noise_multiplier": 1.0, "sampling_prob": 0.1, "steps": 10, "delta": 1e-5}
    with pytest.raises((ValueError, TypeError), match=name):
        cw.epsilon(**(good | {name: value}))


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "3"])
def test_bad_targets_are_refused(value):
    with pytest.raises((ValueError, TypeError), match="epsilon"):
        cw.calibrate(epsilon=value, delta=1e-5, sampling_prob=0.1, steps=10)


def test_dp_accounting_is_imported_only_when_needed():
    code = "import sys; import clipwise; print('dp_accounting' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_replace_one_can_be_calibrated():
    common = {"delta": 1e-5, "sampling_prob": 0.01, "steps": 200, "adjacency": "replace_one"}
    sigma = cw.calibrate(epsilon=3, **common)
    assert 3 - 1e-3 <= cw.epsilon(noise_multiplier=sigma, **common) <= 3


def test_sampling_less_never_costs_more():
    common = {"noise_multiplier": 100.0, "steps": 10_000, "delta": 1e-15}
    assert cw.epsilon(sampling_prob=1 - 1e-9, **common) <= cw.epsilon(sampling_prob=1.0, **common)


@pytest.mark.parametrize("sigma", [1e-300, 1e300, 10**400])
def test_extreme_noise_is_refused_in_words(sigma):
    with pytest.raises(ValueError, match="noise_multiplier"):
        cw.epsilon(noise_multiplier=sigma, sampling_prob=0.1, steps=1, delta=1e-5)
