from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clipwise as cw
from clipwise.accounting.accountants import epsilon_of
from clipwise.accounting.events import ScheduledEvent, StepEvent, decayed
from clipwise.thresholds import LARGEST, SMALLEST, Facts, State

BATCH, BINS = 256, 20
FACTS = Facts(step=1, steps=100, expected_batch_size=BATCH, gradient_noise_multiplier=1.0, dimension=100_000)
EVERYONE = torch.ones(BATCH, dtype=torch.bool)
THRESHOLDS = [
    cw.FixedThreshold(0.7),
    cw.DecayThreshold(2.0, 0.1),
    cw.QuantileThreshold(0.3),
    cw.PercentileThreshold(0.7),
    cw.PercentileThreshold(0.5, initial_range=1.0, bins=7),
    cw.MinErrorThreshold(),
    cw.MinErrorThreshold(initial=1e-3, bins=5, histogram_noise=2),
]
HISTOGRAMS = [cw.PercentileThreshold(), cw.MinErrorThreshold()]


def drawn(rng):
    return rng.normal(100, 20, BATCH)


def released(threshold, state, norms, noise, rng):
    counts = threshold.observe(state, torch.tensor(norms), EVERYONE)
    return counts + torch.tensor(rng.normal(0, noise, len(counts)))


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=repr)
def test_thresholds_keep_their_promises(threshold):
    cw.check_threshold(threshold)


def test_check_threshold_finds_a_padded_row_and_a_runaway():
    class Padded(cw.MinErrorThreshold):
        def observe(self, state, norms, mask):
            return super().observe(state, torch.where(mask, norms, 0.0), torch.ones_like(mask))

    class Runaway(cw.QuantileThreshold):
        def update(self, state, released, facts):
            return State(state.clip_norm * math.exp(float(released[0])) if abs(float(released[0])) < 700 else math.inf)

    class TwoBins(cw.PercentileThreshold):
        def observe(self, state, norms, mask):
            return 2 * super().observe(state, norms, mask)

    class Jumping(cw.QuantileThreshold):
        def observe(self, state, norms, mask):
            return torch.where(mask, torch.where(norms <= state.clip_norm, 0.5, -0.5), 0.0).double().sum()[None]

    cases = ((Padded(), "padding"), (TwoBins(), "changes the release"), (Jumping(), "jumps at norm"))
    for broken, message in cases:
        with pytest.raises(AssertionError, match=message):
            cw.check_threshold(broken)
    with pytest.raises((AssertionError, ValueError)):
        cw.check_threshold(Runaway())


@pytest.mark.parametrize("threshold", [t for t in THRESHOLDS if t.release(200, 1.0)], ids=repr)
def test_rounding_of_all_norms_stays_within_the_declared_sensitivity(threshold):
    """One more example changes how the others' norms round, all at once; a jump there would move everybody."""
    state = threshold.init(FACTS)
    release = threshold.release(BATCH, 1.0)
    everyone = torch.ones(BATCH + 1, dtype=torch.bool)
    for place in torch.linspace(0.01, 2, 200, dtype=torch.float64):
        norm = place * max(state.clip_norm, state.range)
        without = threshold.observe(state, torch.full((BATCH,), float(norm), dtype=torch.float64), everyone[1:])
        moved = torch.full((BATCH + 1,), float(norm) * (1 + 4 * 2**-24), dtype=torch.float64)
        change = float((threshold.observe(state, moved, everyone) - without).norm())
        assert change <= release.sensitivity


@given(
    norms=st.lists(st.floats(min_value=0) | st.just(math.nan), max_size=30),
    reach=st.floats(1e-12, 1e12),
)
def test_histogram_is_the_loop_over_single_examples(norms, reach):
    """Linear binning: one count per example, shared between the two nearest middles."""
    threshold = cw.PercentileThreshold(bins=BINS)
    expected = [0.0] * BINS
    for n in norms:
        place = n * (BINS / reach) - 0.5
        place = min(max(place, 0.0), BINS - 1.0) if math.isfinite(place) else BINS - 1.0
        left = min(math.floor(place), BINS - 2)
        expected[left] += 1 - (place - left)
        expected[left + 1] += place - left
    mask = torch.ones(len(norms), dtype=torch.bool)
    found = threshold.observe(State(1.0, reach), torch.tensor(norms, dtype=torch.float64), mask)
    assert found.tolist() == pytest.approx(expected, abs=1e-9)
    assert float(found.sum()) == pytest.approx(len(norms))


def share_within(percentile, noise, bins, trials=200):
    rng = np.random.default_rng(int(1000 * percentile + noise))
    threshold, state, hits = cw.PercentileThreshold(percentile), State(75.0, 150.0), 0
    for _ in range(trials):
        norms = drawn(rng)
        found = threshold.update(state, released(threshold, state, norms, noise, rng), FACTS).clip_norm
        hits += abs(found - np.quantile(norms, percentile)) <= bins * 150 / BINS
    return hits / trials


@pytest.mark.parametrize("percentile", [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
def test_percentile_is_found(percentile):
    if 0.3 <= percentile <= 0.7:
        assert share_within(percentile, 5.0, 1) >= 0.95
    assert share_within(percentile, 5.0, 3) >= 0.95
    assert share_within(percentile, 1.0, 1) >= 0.95


@pytest.mark.parametrize("initial", [1e-3, 1e4])
def test_percentile_is_reached_from_afar(initial):
    rng = np.random.default_rng(0)
    for _ in range(20):
        threshold = cw.PercentileThreshold(0.5, initial=initial)
        state, steps = threshold.init(FACTS), 0
        while abs(state.clip_norm - 100) > 20:
            state, steps = threshold.update(state, released(threshold, state, drawn(rng), 5.0, rng), FACTS), steps + 1
        assert steps <= 30


def exact_minimiser(norms):
    """Of σ_T²C²d/B² + mean max(n − C, 0)², whose derivative is monotone."""
    low, high = 0.0, float(norms.max())
    for _ in range(100):
        middle = (low + high) / 2
        slope = FACTS.dimension / BATCH**2 * middle - np.maximum(norms - middle, 0).mean()
        low, high = (low, middle) if slope > 0 else (middle, high)
    return low


@pytest.mark.parametrize("initial", [1e-3, 1e-1, 1.0, 10.0, 1e2, 1e4])
def test_least_error_is_found_from_afar(initial):
    rng = np.random.default_rng(0)
    near = []
    for _ in range(20):
        threshold = cw.MinErrorThreshold(initial=initial)
        state = threshold.init(FACTS)
        for step in range(20):
            norms = drawn(rng)
            state = threshold.update(state, released(threshold, state, norms, 5.0, rng), FACTS)
            if step >= 9:
                near.append(abs(state.clip_norm / exact_minimiser(norms) - 1) <= 0.15)
    assert np.mean(near) >= 0.95


@given(
    histogram=st.lists(st.floats(-1e9, 1e9), min_size=BINS, max_size=BINS),
    clip=st.floats(SMALLEST, LARGEST),
    reach=st.floats(SMALLEST, LARGEST),
    dimension=st.sampled_from([1, 100, 10**12]),
)
def test_updates_end_and_stay_in_their_bounds_whatever_noise_does(histogram, clip, reach, dimension):
    facts = Facts(step=3, steps=9, expected_batch_size=10.0, gradient_noise_multiplier=1.5, dimension=dimension)
    for threshold in HISTOGRAMS:
        after = threshold.update(State(clip, reach), torch.tensor(histogram, dtype=torch.float64), facts)
        assert SMALLEST <= after.clip_norm <= LARGEST
        assert SMALLEST <= after.range <= 2 * LARGEST


@pytest.mark.parametrize("threshold", HISTOGRAMS, ids=repr)
def test_a_drowned_histogram_changes_nothing(threshold):
    state = State(2.0, 4.0)
    assert threshold.update(state, torch.full((BINS,), -1.0, dtype=torch.float64), FACTS) == state
    assert threshold.update(state, torch.zeros(BINS, dtype=torch.float64), FACTS) == state


# -- the plan pays for what a threshold releases -----------------------------------------------------


def split_plan(**change):
    numbers = {"noise_multiplier": (1 + 0.1**2) ** -0.5, "delta": 1e-5, "sampling_prob": 0.01, "steps": 1000}
    more = {"expected_batch_size": 600, "rule": cw.Abadi(), "threshold": cw.MinErrorThreshold(histogram_noise=10.0)}
    return cw.Plan(**(numbers | more | change))


def test_the_joint_release_is_accounted_once_at_the_total():
    plan = split_plan()
    assert plan.gradient_noise_multiplier == pytest.approx(1.0, rel=1e-12)
    assert plan.epsilon == pytest.approx(1.8474, abs=5e-5)
    assert split_plan(accountant="rdp").epsilon == pytest.approx(2.1253, abs=5e-5)
    plain = split_plan(threshold=cw.FixedThreshold(1.0))
    assert abs(plan.epsilon - plain.epsilon) <= 1e-9
    wrong = cw.epsilon(noise_multiplier=plan.gradient_noise_multiplier, sampling_prob=0.01, steps=1000, delta=1e-5)
    assert wrong < plan.epsilon - 0.01  # accounting σ_T understates


@given(total=st.floats(0.3, 4.5), other=st.floats(5.0, 100.0))
def test_sigma_is_split_so_that_it_adds_up(total, other):
    plan = split_plan(
        noise_multiplier=total,
        steps=1,
        sampling_prob=0.5,
        accountant="rdp",
        threshold=cw.PercentileThreshold(histogram_noise=other),
        expected_batch_size=1e6,
    )
    assert plan.gradient_noise_multiplier**-2 + other**-2 == pytest.approx(total**-2, rel=1e-9)
    assert plan.gradient_noise_multiplier > total


def test_the_quantile_counts_with_sensitivity_one_half():
    plan = split_plan(threshold=cw.QuantileThreshold(count_noise=5.0))
    assert plan.gradient_noise_multiplier == pytest.approx((plan.noise_multiplier**-2 - 10.0**-2) ** -0.5)
    assert split_plan(threshold=cw.QuantileThreshold()).release.noise_multiplier == 2 * 600 / 20


@pytest.mark.parametrize(("sigma", "noise"), [(1.0, 5), (2.0, 8), (3.0, 8), (3.1, 12)])
def test_histogram_noise_follows_the_paper(sigma, noise):
    plan = split_plan(noise_multiplier=sigma, steps=5, threshold=cw.MinErrorThreshold())
    assert plan.release.noise_multiplier == noise


def test_a_threshold_that_takes_the_whole_budget_is_refused():
    for threshold in (cw.MinErrorThreshold(histogram_noise=0.9), cw.QuantileThreshold(count_noise=0.45)):
        with pytest.raises(ValueError, match="whole budget"):
            split_plan(threshold=threshold)


@pytest.mark.parametrize("rule", [cw.PSAC(), cw.AutoS(), cw.AutoV(), cw.PerLayer(cw.Abadi())], ids=repr)
def test_rules_for_which_c_is_no_threshold_are_refused(rule):
    for threshold in (cw.MinErrorThreshold(), cw.PercentileThreshold(), cw.QuantileThreshold()):
        with pytest.raises(ValueError, match="does not go with the rule"):
            split_plan(rule=rule, threshold=threshold)


@pytest.mark.parametrize("rule", [cw.Reparam(), cw.Global()], ids=repr)
def test_histograms_go_with_abadi_only(rule):
    split_plan(rule=rule, threshold=cw.QuantileThreshold())
    for threshold in HISTOGRAMS:
        with pytest.raises(ValueError, match=r"Abadi\(\)"):
            split_plan(rule=rule, threshold=threshold)


def test_a_small_batch_is_warned_of():
    with pytest.warns(UserWarning, match="mostly noise"):
        split_plan(expected_batch_size=20)


@pytest.mark.parametrize(
    "make_bad",
    [
        lambda: cw.DecayThreshold(0.0),
        lambda: cw.DecayThreshold(1.0, rho=1.5),
        lambda: cw.QuantileThreshold(1.0),
        lambda: cw.QuantileThreshold(learning_rate=-1),
        lambda: cw.QuantileThreshold(count_noise=math.nan),
        lambda: cw.PercentileThreshold(0.0),
        lambda: cw.PercentileThreshold(bins=1),
        lambda: cw.MinErrorThreshold(bins=3),
        lambda: cw.PercentileThreshold(initial_range=math.inf),
        lambda: cw.MinErrorThreshold(initial=math.nan),
        lambda: cw.MinErrorThreshold(histogram_noise=0),
        lambda: split_plan(threshold=cw.MinErrorThreshold),
        lambda: split_plan(noise_decay=0),
        lambda: split_plan(noise_decay=1.01),
    ],
)
def test_bad_numbers_are_refused(make_bad):
    with pytest.raises((ValueError, TypeError)):
        make_bad()


# -- noise that changes over the run ----------------------------------------------------------------


def test_decaying_noise_is_composed_step_by_step():
    import dp_accounting

    plan = cw.Plan(
        noise_multiplier=2.0, noise_decay=0.25, delta=1e-5, sampling_prob=0.1, steps=12, expected_batch_size=10,
        threshold=cw.DecayThreshold(3.0, 0.5), accountant="rdp",
    )  # fmt: skip
    sigmas = [2.0 * 0.25 ** (t / 12) for t in range(12)]
    assert [plan.noise_multiplier_at(t) for t in range(12)] == pytest.approx(sigmas)
    by_hand = dp_accounting.rdp.RdpAccountant()
    for sigma in sigmas:
        by_hand.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(sigma)))
    assert plan.epsilon == pytest.approx(by_hand.get_epsilon(1e-5 * (1 - 1e-4)), rel=1e-9)
    shown = str(plan)
    assert "2 → 1 → " in shown
    assert "clip norm 3 → 2.121" in shown
    spent = [plan.epsilon_after(k) for k in range(13)]
    assert spent == sorted(spent)


def test_one_level_is_the_ordinary_event_and_pld_lies_below_rdp():
    flat = ScheduledEvent(levels=((1.1, 40), (1.1, 60)), sampling_prob=0.05)
    ordinary = StepEvent(noise_multiplier=1.1, sampling_prob=0.05, steps=100)
    assert epsilon_of(flat, 1e-5, "rdp") == pytest.approx(epsilon_of(ordinary, 1e-5, "rdp"), rel=1e-9)
    assert 0 <= epsilon_of(flat, 1e-5) - epsilon_of(ordinary, 1e-5) <= 2e-3
    mixed = ScheduledEvent(levels=((1.1, 40), (0.9, 60)), sampling_prob=0.05)
    least = StepEvent(noise_multiplier=0.9, sampling_prob=0.05, steps=100)
    assert epsilon_of(ordinary, 1e-5) < epsilon_of(mixed, 1e-5) < epsilon_of(least, 1e-5)


def test_calibration_with_decaying_noise_stays_below_the_target():
    plan = cw.Plan(
        epsilon=2.0, noise_decay=0.5, delta=1e-5, sampling_prob=0.1, steps=8, expected_batch_size=10, accountant="rdp"
    )
    assert 2.0 - 1e-3 <= plan.epsilon <= 2.0
    assert decayed(plan.noise_multiplier, 0.5, 7, 8) < plan.noise_multiplier


def test_least_error_never_falls_to_its_bound():
    """Bins that noise made negative would leave the error without a minimum."""
    rng = np.random.default_rng(0)
    threshold = cw.MinErrorThreshold(histogram_noise=12.0)
    state = threshold.init(FACTS)
    for _ in range(500):
        state = threshold.update(state, released(threshold, state, np.abs(rng.normal(1, 0.3, BATCH)), 12.0, rng), FACTS)
        assert state.clip_norm > 1e-3


def test_replace_one_pays_for_the_threshold_too():
    plain = split_plan(adjacency="replace_one", steps=3, threshold=cw.FixedThreshold())
    moving = split_plan(adjacency="replace_one", steps=3)
    assert moving.epsilon == plain.epsilon
    assert moving.gradient_noise_multiplier > plain.gradient_noise_multiplier
