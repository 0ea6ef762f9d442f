"""A private run, as it should go."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from training_runs import X, Y, losses, make, make_plan, quiet, released, weights

import clipwise as cw
from clipwise import errors


def test_the_contract():
    training = make()
    assert training.epsilon == 0
    for number, batch in enumerate(training.batches((X, Y)), start=1):
        before = weights(training)
        assert training.step(batch) is None
        assert not torch.equal(before, weights(training))
        assert training.epsilon == training.plan.epsilon_after(number)
    assert number == training.plan.steps
    assert training.epsilon == training.plan.epsilon
    assert all(p.grad is None for p in training.model.parameters())
    with pytest.warns(UserWarning, match="no steps left"):
        assert list(training.batches((X, Y))) == []


def test_a_step_is_clipped_sum_over_the_declared_divisor():
    training = quiet()
    out = cw.clipped_sum(training.model, losses, (X, Y))
    expected = torch.cat([g.flatten() for g in out.grads.values()])
    torch.testing.assert_close(released(training, (X, Y)), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("microbatch", [1, 7, 16, 40, 100])
def test_microbatches_change_nothing_but_speed(microbatch):
    whole, split = quiet(), quiet(microbatch=microbatch)
    torch.testing.assert_close(released(whole, (X, Y)), released(split, (X, Y)), rtol=1e-4, atol=1e-4)
    assert split.ledger.charges == 1


def test_padding_never_shows_even_when_the_repeated_row_is_nan():
    bad = X.clone()
    bad[-1] = math.nan
    whole, split = quiet(), quiet(microbatch=16)
    torch.testing.assert_close(released(whole, (bad, Y)), released(split, (bad, Y)), rtol=1e-4, atol=1e-4)


def test_the_divisor_and_the_noise_do_not_depend_on_the_data():
    small, large = make(), make()
    assert small.sensitivity == large.sensitivity
    next(iter(small.batches((X[:20], Y[:20]))))
    next(iter(large.batches((X, Y))))
    assert small.plan == large.plan


@pytest.mark.parametrize("rule", [cw.PSAC(), cw.Reparam(), cw.PerLayer(cw.Reparam())], ids=repr)
def test_noise_has_the_planned_scale(rule):
    model = nn.Sequential(nn.Linear(500, 200, bias=False), nn.Linear(200, 3, bias=False))
    plan = make_plan(noise_multiplier=2.0, rule=rule, threshold=cw.FixedThreshold(0.7), sampling_prob=1e-12)
    training = make(plan, model=model, make_optimizer=lambda p: torch.optim.SGD(p, lr=1.0), preflight=False)
    batch = next(iter(training.batches((torch.randn(40, 500), Y))))
    before = weights(training)
    training.step(batch)
    noise = (before - weights(training)).double() * plan.expected_batch_size
    sensitivity = {"PSAC": 0.7, "Reparam": 1.0, "PerLayer": math.sqrt(2)}[type(rule).__name__]
    assert training.sensitivity == pytest.approx(sensitivity, rel=1e-4)
    assert training.sensitivity >= sensitivity
    assert float(noise.std()) == pytest.approx(2.0 * sensitivity, rel=1.5e-2)


def test_own_loop_equals_step():
    training = quiet(microbatch=16)
    same = quiet(microbatch=16)
    before = weights(training)
    for part in training.microbatches((X, Y)):
        with training.record(part) as data:
            found = losses(training.model, data)
        training.backward(found)
        assert all(p.grad is None for p in training.model.parameters())
    training.release()
    moved = (before - weights(training)) * 10
    torch.testing.assert_close(moved, released(same, (X, Y)), rtol=1e-4, atol=1e-4)
    assert training.ledger.charges == 1


OPTIMIZERS = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adam(p, lr=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1),
    lambda p: torch.optim.NAdam(p, lr=0.1),
    lambda p: torch.optim.RAdam(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.Adadelta(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.1),
]


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_any_optimizer_and_scheduler(make_optimizer):
    training = make(make_optimizer=make_optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 2)
    for batch in training.batches((X, Y)):
        training.step(batch)
        scheduler.step()
    assert torch.isfinite(weights(training)).all()


def test_vmap_engine_steps():
    training = make(engine="vmap")
    for batch in training.batches((X, Y)):
        training.step(batch)
    with pytest.raises(errors.WrongOrder, match="bookkeeping"), training.record(None):
        pass


def test_only_one_use_poisson_batches_step():
    training, other = make(), make()
    batch = next(iter(training.batches((X, Y))))
    with pytest.raises(errors.WrongBatch, match=r"batches\(dataset\)"):
        training.step((X, Y))
    with pytest.raises(errors.WrongBatch):
        other.step(batch)
    training.step(batch)
    with pytest.raises(errors.WrongBatch, match="each once"):
        training.step(batch)
    with pytest.raises(errors.WrongBatch):
        training.step(cw.PoissonBatch((X, Y), 40))
    assert training.ledger.charges == 1


def test_resume_counts_what_was_spent(tmp_path):
    path = tmp_path / "run.ledger"
    first = make(ledger=path)
    for batch, _ in zip(first.batches((X, Y)), range(4), strict=False):
        first.step(batch)
    first.ledger.close()
    second = make(ledger=path)
    assert second.epsilon == first.epsilon
    assert sum(1 for batch in second.batches((X, Y)) if second.step(batch) is None) == 2
    assert second.epsilon == second.plan.epsilon


def test_each_microbatch_is_recorded_once():
    training = make(sampling="asserted", microbatch=20, preflight=False)
    first, _ = training.microbatches((X, Y))
    with training.record(first) as data:
        found = losses(training.model, data)
    training.backward(found)
    with pytest.raises(errors.WrongOrder, match="record each part once"), training.record(first):
        pass
    foreign = type(first)((X, Y), torch.ones(40, dtype=torch.bool))
    with pytest.raises(errors.WrongOrder, match="record each part once"), training.record(foreign):
        pass


def test_gradients_lie_in_memory_of_their_own():
    """A compiled step may write its next sums, without noise, where the last ones lay; an optimizer may keep p.grad."""
    training, sums, kept = make(sampling="asserted", preflight=False), set(), []
    add_ = training._noise.add_
    training._noise.add_ = lambda values, **n: sums.update(v.data_ptr() for v in values.values()) or add_(values, **n)
    training.optimizer.register_step_pre_hook(
        lambda optimizer, *_: kept.extend(p.grad for group in optimizer.param_groups for p in group["params"])
    )
    training.step((X, Y))
    assert len(sums) == len(kept) > 0
    assert not sums & {g.data_ptr() for g in kept}


def test_a_bad_record_shows_nowhere(capfd, recwarn):
    bad = X.clone()
    bad[3], bad[4], bad[5] = math.nan, 1e30, math.inf
    training = make(make_plan(sampling_prob=1.0))
    for batch in training.batches((bad, Y)):
        training.step(batch)
    assert torch.isfinite(weights(training)).all()
    assert training.epsilon == training.plan.epsilon
    assert capfd.readouterr() == ("", "")
    assert not recwarn.list


def test_dict_batches_and_a_custom_dataset():
    class Records(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return {"x": X[i], "y": int(Y[i])}

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    training = make(loss_fn=loss_fn, microbatch=4)
    for batch in training.batches(Records(), num_workers=1):
        training.step(batch)
    assert training.ledger.charges == 6


def test_training_learns():
    torch.manual_seed(0)
    x = torch.randn(400, 6)
    y = (x[:, 0] > 0).long()
    plan = make_plan(sampling_prob=0.5, steps=60, expected_batch_size=200)
    training = make(plan, make_optimizer=lambda p: torch.optim.SGD(p, lr=0.5))
    for batch in training.batches((x, y)):
        training.step(batch)
    assert float((training.model(x).argmax(1) == y).float().mean()) > 0.9
