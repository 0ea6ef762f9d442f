"""Thresholds in a run: microbatches, empty batches, checkpoints, schedules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_thresholds import THRESHOLDS
from test_training import X, Y, losses, make, make_plan, weights
from torch import nn

import clipwise as cw
from clipwise.thresholds import LARGEST, SMALLEST, State

# -- training ---------------------------------------------------------------------------------------


def threshold_plan(threshold, **change):
    rule = cw.PSAC() if isinstance(threshold, (cw.FixedThreshold, cw.DecayThreshold)) else cw.Abadi()
    return make_plan(rule=rule, threshold=threshold, expected_batch_size=200, **change)


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=repr)
@pytest.mark.parametrize("optimizer", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.Adam(p)])
@pytest.mark.parametrize("microbatch", [None, 3])
def test_training_with_every_threshold(threshold, optimizer, microbatch):
    training = make(threshold_plan(threshold), make_optimizer=optimizer, microbatch=microbatch)
    norms = []
    for batch in training.batches((X, Y)):
        norms.append(training.clip_norm)
        training.step(batch)
    assert all(SMALLEST <= c <= LARGEST for c in norms)
    assert norms[0] == pytest.approx(getattr(threshold, "initial", None) or threshold.clip_norm)
    assert training.epsilon == training.plan.epsilon
    if not isinstance(threshold, cw.FixedThreshold):
        drowned = training.plan.release is not None and training.plan.release.size > 1  # a histogram that may not move
        assert drowned or len(set(norms)) > 1


def observed(training, batch):
    """What the threshold sees of one step, before noise."""
    seen = []
    add_ = training._noise.add_

    def watched(values, **numbers):
        if numbers["stream"] == "threshold":
            seen.append(values["observed"].clone())
        return add_(values, **numbers)

    training._noise.add_ = watched
    training.step(batch)
    return seen[0]


@pytest.mark.parametrize("threshold", [t for t in THRESHOLDS if t.release(200, 1.0)], ids=repr)
@pytest.mark.parametrize("microbatch", [None, 7, 64])
def test_microbatches_and_padding_observe_the_same(threshold, microbatch):
    training = make(threshold_plan(threshold), sampling="asserted", microbatch=microbatch)
    norms = cw.clipped_sum(training.model, losses, (X, Y), cw.Abadi()).norms
    everyone = torch.ones(len(X), dtype=torch.bool)
    expected = threshold.observe(training.threshold_state, norms, everyone)
    torch.testing.assert_close(observed(training, (X, Y)), expected, rtol=0, atol=1e-4)


def test_observation_and_gradient_have_streams_of_their_own(monkeypatch):
    training = make(threshold_plan(cw.MinErrorThreshold()))
    seen = []
    add_ = training._noise.add_

    def watched(values, **numbers):
        seen.append((numbers["stream"], numbers["sequence"], numbers["noise_multiplier"], numbers["sensitivity"]))
        return add_(values, **numbers)

    monkeypatch.setattr(training._noise, "add_", watched)
    for batch in training.batches((X, Y)):
        training.step(batch)
    plan = training.plan
    gradient = [(n, s) for stream, n, s, _ in seen if stream == "gradient"]
    assert gradient == [(n, plan.gradient_noise_multiplier) for n in range(1, plan.steps + 1)]
    other = [(n, s, bound) for stream, n, s, bound in seen if stream == "threshold"]
    assert other == [(n, 5.0, plan.release.sensitivity) for n in range(1, plan.steps + 1)]
    assert 1 < plan.release.sensitivity < 1.01


def test_the_noise_of_each_step_follows_the_schedule(monkeypatch):
    training = make(make_plan(noise_decay=0.25, steps=4))
    used = []
    add_ = training._noise.add_
    monkeypatch.setattr(training._noise, "add_", lambda v, **n: used.append(n["noise_multiplier"]) or add_(v, **n))
    for batch in training.batches((X, Y)):
        training.step(batch)
    assert used == pytest.approx([0.25 ** (t / 4) for t in range(4)])


@pytest.mark.parametrize("threshold", THRESHOLDS, ids=repr)
def test_an_empty_batch_is_noise_for_the_threshold_too(threshold):
    training = make(threshold_plan(threshold), sampling="asserted")
    training.step(None)
    assert training.ledger.charges == 1
    assert SMALLEST <= training.clip_norm <= LARGEST


def test_a_nan_record_is_one_count_in_the_last_bin():
    x = X.clone()
    x[0] = math.nan
    training = make(threshold_plan(cw.MinErrorThreshold()), sampling="asserted")
    rest = observed(make(threshold_plan(cw.MinErrorThreshold()), sampling="asserted"), (X[1:], Y[1:]))
    rest[-1] += 1
    torch.testing.assert_close(observed(training, (x, Y)), rest, rtol=0, atol=1e-4)
    assert torch.isfinite(weights(training)).all()


def test_checkpoints_carry_the_threshold(tmp_path):
    plan = threshold_plan(cw.MinErrorThreshold(), steps=12)
    training = make(plan, ledger=tmp_path / "run.ledger", seed=1)  # or noise might leave the threshold where it was
    for number, batch in enumerate(training.batches((X, Y)), start=1):
        training.step(batch)
        if number == 5:
            break
    cw.save_checkpoint(training, tmp_path / "c.pt")
    kept = training.threshold_state
    training.ledger.close()
    again = make(plan, ledger=tmp_path / "run.ledger", seed=1)
    assert again.threshold_state != kept
    cw.load_checkpoint(again, tmp_path / "c.pt")
    assert again.threshold_state == kept


def test_a_resumed_decay_goes_on_where_it_was(tmp_path):
    plan = make_plan(threshold=cw.DecayThreshold(1.0, 0.5), steps=4)
    training = make(plan, ledger=tmp_path / "run.ledger")
    batches = training.batches((X, Y))
    training.step(next(batches))
    training.ledger.close()
    again = make(plan, ledger=tmp_path / "run.ledger")
    assert again.clip_norm == pytest.approx(0.5**0.25)


def test_loading_does_not_turn_a_decay_back(tmp_path):
    plan = make_plan(threshold=cw.DecayThreshold(1.0, 1e-3), steps=10)
    training = make(plan, ledger=tmp_path / "run.ledger")
    for number, batch in enumerate(training.batches((X, Y)), start=1):
        training.step(batch)
        if number == 1:
            cw.save_checkpoint(training, tmp_path / "c.pt")
        if number == 7:
            break
    training.ledger.close()
    again = make(plan, ledger=tmp_path / "run.ledger")
    cw.load_checkpoint(again, tmp_path / "c.pt")
    assert again.clip_norm == pytest.approx(1e-3**0.7)


def test_the_schedule_counts_charges_after_failures_resumes_and_copies(tmp_path, monkeypatch):
    import copy

    plan = make_plan(noise_multiplier=2.0, noise_decay=0.25, steps=6, sampling_prob=1.0, expected_batch_size=40)
    used = []

    def watched(training):
        add_ = training._noise.add_
        training._noise.add_ = lambda v, **n: used.append((n["sequence"], n["noise_multiplier"])) or add_(v, **n)
        return training

    def sometimes(model, batch, failing=[True]):  # noqa: B006
        if failing:
            failing.pop()
            raise RuntimeError("once")
        return losses(model, batch)

    training = watched(make(plan, sometimes, ledger=tmp_path / "run.ledger", preflight=False))
    batches = training.batches((X, Y))
    with pytest.raises(RuntimeError, match="once"):
        training.step(next(batches))
    training.step(next(training.batches((X, Y))))
    twin = watched(copy.deepcopy(training))
    twin.step(next(twin.batches((X, Y))))
    training.ledger.close()
    again = watched(make(plan, ledger=tmp_path / "run.ledger", preflight=False))
    again.step(next(again.batches((X, Y))))
    assert used == [(n, plan.gradient_noise_multiplier_at(n - 1)) for n in (2, 3, 4)]


def test_states_of_another_threshold_are_refused():
    training = make(threshold_plan(cw.MinErrorThreshold()))
    for bad in (lambda: State(1.0), lambda: State(math.nan, 1.0), lambda: State(1.0, math.inf)):
        with pytest.raises(ValueError, match=r"must lie|does not belong|must be"):
            training._restore_threshold(bad())
    with pytest.raises(AttributeError):
        training.threshold_state = State(2.0, 4.0)


def test_a_copy_keeps_the_threshold():
    import copy

    training = make(threshold_plan(cw.MinErrorThreshold()))
    training.step(next(training.batches((X, Y))))
    assert copy.deepcopy(training).threshold_state == training.threshold_state


def test_quantile_holds_its_share_on_a_real_run():
    """The unclipped share stays within ±.04 of the target after burn-in, on digits."""
    from clipwise.recipes.digits import cross_entropy, digits_model, load_digits

    torch.manual_seed(0)
    train, _ = load_digits()
    model = digits_model()
    plan = cw.Plan(
        noise_multiplier=1.0, delta=1e-4, sampling_prob=0.4, steps=150, expected_batch_size=600, accountant="rdp",
        rule=cw.Abadi(), threshold=cw.QuantileThreshold(0.5, initial=10.0),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = cw.privatize(model, optimizer, plan, cross_entropy)
    shares = []
    for number, batch in enumerate(training.batches(train)):
        if number >= 50:
            norms = cw.clipped_sum(model, cross_entropy, train).norms
            shares.append(float((norms <= training.clip_norm).double().mean()))
        training.step(batch)
    assert abs(np.mean(shares) - 0.5) <= 0.04


def test_the_released_sum_is_scaled_by_the_c_of_its_own_step():
    """With C_t falling, each step's noise and clipping use the same C."""
    plan = make_plan(
        threshold=cw.DecayThreshold(1.0, 1e-2), noise_multiplier=1e-9, delta=0.5, accountant="rdp", steps=3
    )
    model = nn.Linear(6, 3, bias=False)
    training = make(plan, losses, lambda p: torch.optim.SGD(p, lr=1.0), model, sampling="asserted", noise="fast")
    for _ in range(3):
        bound, before = training.clip_norm, weights(training)
        sums = cw.clipped_sum(model, losses, (X, Y), cw.PSAC(), bound).grads["weight"].flatten()
        training.step((X, Y))
        torch.testing.assert_close((before - weights(training)) * 10, sums, rtol=1e-3, atol=1e-4 * bound)
