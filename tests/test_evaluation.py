from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import clipwise as cw
from clipwise import errors

X = torch.linspace(-1, 1, 200)[:, None].repeat(1, 2)


def make(path=None, **change):
    numbers = {"noise_multiplier": 2.0, "delta": 1e-5, "sampling_prob": 0.1, "steps": 4, "expected_batch_size": 20}
    plan = cw.Plan(**(numbers | {"evaluations": 3, "evaluation_noise": 5.0} | change))
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cw.privatize(model, optimizer, plan, lambda m, x: m(x)[:, 0] ** 2, ledger=path)


def positive_first(model, batch):
    return (batch[:, 0] > 0).float()


def test_a_noisy_mean_is_released_and_charged():
    training = make(evaluation_noise=0.5)
    found = [cw.private_score(training, X, positive_first, size=200) for _ in range(3)]
    assert all(abs(value - 0.5) < 6 * 0.5 / 200 for value in found)
    assert len(set(found)) == 3
    assert training.ledger.looks == 3
    assert training.ledger.charges == 0
    assert training.epsilon >= cw.epsilon(noise_multiplier=0.5 / math.sqrt(3), sampling_prob=1.0, steps=1, delta=1e-5)
    with pytest.raises(errors.BudgetExhausted, match=r"allows 3 evaluation"):
        cw.private_score(training, X, positive_first, size=200)


def test_noise_has_the_declared_scale():
    training = make(evaluations=400, evaluation_noise=7.0)
    found = torch.tensor([cw.private_score(training, X[:1], positive_first, size=1) for _ in range(400)])
    assert float(found.std()) == pytest.approx(7.0, rel=0.2)


def test_epsilon_pays_for_steps_and_looks_together():
    import dp_accounting

    with_looks, without = make().plan, make(evaluations=0).plan
    assert with_looks.epsilon > without.epsilon
    by_hand = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-4)
    by_hand.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0)), 4)
    by_hand.compose(dp_accounting.GaussianDpEvent(5.0), 3)
    assert with_looks.epsilon == pytest.approx(by_hand.get_epsilon(1e-5), rel=1e-3)
    assert with_looks.epsilon >= by_hand.get_epsilon(1e-5) * (1 - 1e-6)
    for accountant in ("pld", "rdp"):
        plan = make(accountant=accountant).plan
        assert plan.epsilon_after(4, 0) < plan.epsilon_after(4, 3) == plan.epsilon
        assert plan.epsilon_after(0, 3) < plan.epsilon


def test_calibration_leaves_room_for_the_looks():
    loose, tight = make(noise_multiplier=None, epsilon=2.0, evaluations=0), make(noise_multiplier=None, epsilon=2.0)
    assert tight.plan.epsilon <= 2
    assert tight.plan.noise_multiplier > loose.plan.noise_multiplier
    assert cw.Plan(
        noise_multiplier=2.0, delta=1e-5, sampling_prob=0.1, steps=4, expected_batch_size=20, adjacency="replace_one",
        evaluations=3, evaluation_noise=5.0,
    ).epsilon > make().plan.epsilon  # fmt: skip


def test_looks_survive_with_the_ledger(tmp_path):
    path = tmp_path / "run.ledger"
    training = make(path)
    cw.private_score(training, X, positive_first, size=200)
    spent = training.epsilon
    training.ledger.close()
    assert cw.read_ledger(path).looks == 1
    with open(path, "ab") as file:
        file.write(b'{"ha')  # a torn line may have been a step or a look: both are charged
    again = make(path)
    assert (again.ledger.looks, again.ledger.charges) == (2, 1)
    assert again.epsilon > spent
    again.ledger.close()
    assert (cw.read_ledger(path).looks, cw.read_ledger(path).charges) == (2, 1)


def test_one_record_moves_the_sum_by_at_most_one():
    training = make()
    training._noise.add_ = lambda values, **_: values

    def wild(model, batch):
        return torch.where(batch[:, 0] > 0.99, torch.tensor(1e30), torch.tensor(math.nan))

    assert cw.private_score(training, X, wild, size=1) == pytest.approx(1, abs=0.02)


def test_records_are_scored_alone_unless_the_user_vouches():
    training, seen = make(), []

    def score(model, batch):
        seen.append(len(batch))
        assert not model.training
        return torch.zeros(len(batch))

    training.model.train()
    cw.private_score(training, X, score, size=200)
    assert set(seen) == {1}
    assert training.model.training
    assert training.statement()["certified"]
    cw.private_score(training, X, score, size=200, batch_size=64)
    assert set(seen) == {1, 64, 8}
    assert not training.statement()["certified"]
    assert "independent" in training.statement()["notes"][0]


def test_a_failure_is_charged():
    training = make()

    def fails(model, batch):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cw.private_score(training, X, fails, size=200)
    assert training.ledger.looks == 1
    with pytest.raises(errors.LossShape, match="one number per record"):
        cw.private_score(training, X, lambda m, x: torch.tensor(0.5), size=200)
    assert training.ledger.looks == 2


@pytest.mark.parametrize(("change", "name"), [
    ({"evaluations": -1}, "evaluations"), ({"evaluations": True}, "evaluations"), ({"evaluations": 1.5}, "evaluations"),
    ({"evaluation_noise": 0}, "evaluation_noise"), ({"evaluation_noise": math.nan}, "evaluation_noise"),
])  # fmt: skip
def test_bad_numbers_are_refused(change, name):
    with pytest.raises((ValueError, TypeError), match=name):
        make(**change)


def test_training_and_looking_interleave():
    training = make()
    for batch in training.batches(X):
        training.step(batch)
        if training.ledger.charges in (2, 4):
            cw.private_score(training, X, positive_first, size=200)
    assert training.epsilon == training.plan.epsilon_after(4, 2) < training.plan.epsilon
    statement = training.statement()
    assert (statement["steps_charged"], statement["evaluations_charged"]) == (4, 2)
