"""What a run refuses, charges all the same, or puts on record."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from forked import refused_in_a_fork
from torch import nn
from training_runs import X, Y, losses, make, make_plan, weights

import clipwise as cw
from clipwise import errors


def test_an_empty_batch_is_noise_charged_and_never_calls_the_loss():
    def never(model, batch):
        raise AssertionError("called")

    training = make(make_plan(sampling_prob=1e-12), loss_fn=never, preflight=False)
    for batch in training.batches((X, Y)):
        assert batch.data is None
        before = weights(training)
        training.step(batch)
        assert not torch.equal(before, weights(training))
    assert training.ledger.charges == 6


def test_asserted_sampling_is_on_record():
    training = make(sampling="asserted", preflight=False)
    training.step((X, Y))
    training.step(None)
    assert training.ledger.charges == 2
    assert training.statement()["asserted_by_user"] == {"sampling": "asserted to be Poisson", "preflight": "skipped"}
    assert not training.statement()["certified"]


def test_seed_and_fast_noise_are_on_record():
    assert "NOT PRIVATE" in str(make(seed=1).statement()["asserted_by_user"])
    assert "NOT CERTIFIED" in str(make(noise="fast").statement()["asserted_by_user"])
    assert make().statement()["certified"]
    runs = [make(seed=1), make(seed=1)]
    for training in runs:
        for batch in training.batches((X, Y)):
            training.step(batch)
    assert torch.equal(*map(weights, runs))


def test_a_spent_budget_leaves_the_model_as_it_was(tmp_path):
    path = tmp_path / "run.ledger"
    training = make(ledger=path)
    for batch in training.batches((X, Y)):
        training.step(batch)
    before = weights(training)
    extra = cw.PoissonBatch((X, Y), 40)
    training._issued.add(extra)
    with pytest.raises(errors.BudgetExhausted):
        training.step(extra)
    assert torch.equal(before, weights(training))


def test_an_exception_in_the_loss_releases_nothing_and_is_charged():
    """Whoever sees that a step failed has learnt something of the data: it costs, and it is on record."""
    calls = []

    def sometimes(model, batch):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return losses(model, batch)

    training = make(loss_fn=sometimes, sampling="asserted", microbatch=20, preflight=False)
    before = weights(training)
    with pytest.raises(RuntimeError, match="out of memory"):
        training.step((X, Y))
    assert torch.equal(before, weights(training))
    assert training.ledger.charges == 1
    assert "failed on private data" in training.statement()["notes"][0]
    training.step((X, Y))
    assert training.ledger.charges == 2


def test_skipping_a_batch_is_refused():
    training = make()
    drawn = iter(training.batches((X, Y)))
    next(drawn)
    with pytest.raises(errors.WrongBatch, match="was not stepped"):
        next(drawn)


def test_a_failure_in_an_own_loop_abandons_and_charges_the_batch():
    training = make(sampling="asserted", preflight=False)
    (part,) = training.microbatches((X, Y))
    with pytest.raises(KeyError), training.record(part):
        raise KeyError("x")
    assert training.ledger.charges == 1
    training.step((X, Y))
    assert training.ledger.charges == 2


def test_frozen_parameters_with_a_waiting_gradient_are_refused():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    losses(model, (X, Y)).sum().backward()
    model[0].requires_grad_(False)
    model[1].zero_grad(set_to_none=True)
    with pytest.raises(errors.ParameterMismatch, match=r"0\.weight, 0\.bias already hold"):
        cw.privatize(model, torch.optim.SGD(model.parameters(), lr=1.0), make_plan(), losses)


def test_a_gradient_that_the_loss_writes_to_a_frozen_parameter_never_arrives():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)

    def leaking(m, batch):
        m[0].weight.grad = batch[0][:4, :6].clone()
        return losses(m, batch)

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    training = cw.privatize(model, optimizer, make_plan(), leaking, sampling="asserted", preflight=False)
    before = model[0].weight.clone()
    with pytest.raises(errors.ClipwiseError):
        training.step((X, Y))
    assert torch.equal(before, model[0].weight)


def test_a_batch_far_beyond_the_declared_size_is_refused():
    training = make(make_plan(expected_batch_size=1), sampling="asserted", preflight=False)
    with pytest.raises(errors.WrongBatch, match="far larger"):
        training.step((torch.randn(500, 6), torch.zeros(500, dtype=torch.int64)))
    assert training.ledger.charges == 1  # that it failed is seen


def test_a_second_run_cannot_forget_the_first():
    first = make(sampling="asserted", preflight=False)
    first.step((X, Y))
    again = (first.model, first.optimizer, make_plan(), losses)
    with pytest.raises(errors.ParameterMismatch, match="already trained"):
        cw.privatize(*again)
    second = cw.privatize(*again, ledger=first.ledger, sampling="asserted", preflight=False)
    assert second.ledger.charges == 1
    with pytest.raises(AttributeError):
        second.optimizer = torch.optim.SGD(first.model.parameters(), lr=1)


def test_optimizers_that_cannot_be_private_are_refused():
    for kind in (torch.optim.LBFGS, torch.optim.SparseAdam):
        with pytest.raises(errors.ParameterMismatch, match=kind.__name__):
            make(make_optimizer=kind)


def test_a_refused_privatize_leaves_no_lock_behind(tmp_path):
    with pytest.raises(ValueError, match="seed"):
        make(ledger=tmp_path / "x.ledger", seed=-1)
    with pytest.raises(ValueError, match="seed"):
        make(ledger=tmp_path / "x.ledger", seed=2**128)
    first = make(ledger=tmp_path / "x.ledger")
    with pytest.raises(errors.LedgerError, match="earlier run in this process"):
        make(ledger=tmp_path / "x.ledger")
    first.ledger.close()


def test_preflight_that_did_not_happen_is_on_record():
    assert make(loss_fn=None).statement()["asserted_by_user"]["preflight"].startswith("none")
    assert not make(preflight=False).statement()["certified"]
    mixing = lambda m, b: losses(m, (b[0] - b[0].mean(0), b[1]))  # noqa: E731
    with pytest.raises(errors.CrossExampleOp):
        make(loss_fn=mixing, sampling="asserted").step((X, Y))
    training = make()
    next(iter(training.batches((X, Y))))
    with pytest.raises(errors.CrossExampleOp):
        training.batches(
            (X, Y), collate_fn=lambda r: (torch.stack([x for x, _ in r]).roll(1, 0), torch.tensor([0] * len(r)))
        )


def test_seeded_runs_never_claim_privacy():
    assert "NOT PRIVATE" in make(seed=1).statement()["guarantee"]
    assert "NOT CERTIFIED" in make(noise="fast").statement()["guarantee"]


def test_batches_cannot_be_redrawn_until_one_pleases():
    training = make()
    next(iter(training.batches((X, Y))))
    with pytest.raises(errors.WrongBatch, match="was not stepped"):
        next(iter(training.batches((X, Y))))


def test_the_mode_that_was_checked_is_the_mode_that_runs():
    training = make()
    drawn = iter(training.batches((X, Y)))
    batch = next(drawn)
    training.model.eval()
    with pytest.raises(errors.ParameterMismatch, match=r"model\.train\(\) or model\.eval\(\)"):
        training.step(batch)
    training.model.train()
    training.step(batch)


def test_a_new_optimizer_does_not_forget_what_the_model_cost():
    first = make(sampling="asserted", preflight=False)
    first.step((X, Y))
    with pytest.raises(errors.ParameterMismatch, match="already trained"):
        cw.privatize(first.model, torch.optim.SGD(first.model.parameters(), lr=1), make_plan(), losses)


def test_wrong_order_is_refused():
    training = make(sampling="asserted")
    with pytest.raises(errors.WrongOrder, match=r"release\(\) without"):
        training.release()
    with pytest.raises(errors.WrongOrder, match=r"backward\(\) without record"):
        training.backward(torch.zeros(3))
    (part,) = training.microbatches((X, Y))
    with pytest.raises(errors.WrongOrder, match="not recorded"):
        training.release()
    with pytest.raises(errors.WrongOrder, match="not released"):
        training.microbatches((X, Y))
    with training.record(part) as data:
        found = losses(training.model, data)
    with pytest.raises(errors.WrongOrder):
        training.release()
    training.backward(found)
    with pytest.raises(errors.WrongOrder):
        training.backward(found)
    with pytest.raises(errors.WrongOrder, match="Begin with"), training.record(part):
        pass
    training.release()
    with pytest.raises(errors.WrongOrder):
        training.release()
    assert training.ledger.charges == 1


def test_un_noised_gradients_never_reach_the_optimizer():
    training = make(sampling="asserted")
    losses(training.model, (X, Y)).mean().backward()
    before = weights(training)
    with pytest.raises(errors.WrongOrder, match="neither clipped nor noised"):
        training.optimizer.step()
    with pytest.raises(errors.ParameterMismatch, match=r"already hold a \.grad"):
        training.step((X, Y))
    assert torch.equal(before, weights(training))
    assert training.ledger.charges == 0


def test_parameters_and_optimizer_must_agree():
    model = nn.Linear(6, 3)
    stray = nn.Parameter(torch.ones(2))
    with pytest.raises(errors.ParameterMismatch, match="not of the model"):
        cw.privatize(model, torch.optim.SGD([*model.parameters(), stray], lr=1), make_plan(), losses)
    with pytest.raises(errors.ParameterMismatch, match="bias are trainable but not in the optimizer"):
        cw.privatize(model, torch.optim.SGD([model.weight], lr=1), make_plan(), losses)
    frozen = nn.Linear(6, 3).requires_grad_(False)
    with pytest.raises(errors.ParameterMismatch, match="no trainable parameter"):
        cw.privatize(frozen, torch.optim.SGD(frozen.parameters(), lr=1), make_plan(), losses)


def test_late_freezing_and_unfreezing_are_refused():
    training = make(sampling="asserted")
    training.model[0].weight.requires_grad_(False)
    with pytest.raises(errors.ParameterMismatch, match=r"0\.weight"):
        training.step((X, Y))
    training.model[0].weight.requires_grad_(True)
    training.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(errors.ParameterMismatch, match="not of the model"):
        training.step((X, Y))


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own imports
def test_wrapped_models_are_refused():
    for wrapped in (nn.DataParallel(nn.Linear(6, 3)), torch.compile(nn.Linear(6, 3))):
        with pytest.raises(errors.UnsupportedOp, match="plain module"):
            cw.privatize(wrapped, torch.optim.SGD(wrapped.parameters(), lr=1), make_plan(), losses)


def test_bad_options_are_refused():
    for options in ({"microbatch": 0}, {"engine": "hooks"}, {"sampling": "shuffle"}, {"noise": "none"}):
        with pytest.raises((ValueError, TypeError), match=next(iter(options))):
            make(**options)


def test_a_deepcopy_has_its_own_noise_and_the_same_ledger():
    training = make(sampling="asserted")
    training.step((X, Y))
    twin = copy.deepcopy(training)
    assert torch.equal(weights(training), weights(twin))
    training.step((X, Y))
    twin.step((X, Y))
    assert not torch.equal(weights(training), weights(twin))
    assert training.ledger is twin.ledger
    assert training.ledger.charges == 3
    with pytest.raises(errors.WrongOrder):
        twin.optimizer.step()


def test_pickle_and_torch_save_are_refused(tmp_path):
    training = make()
    with pytest.raises(errors.ClipwiseError):
        pickle.dumps(training)
    with pytest.raises(errors.ClipwiseError):
        torch.save(training, tmp_path / "x.pt")


def test_a_fork_with_the_ledger_of_its_parent_cannot_step():
    training = make(sampling="asserted", preflight=False)
    assert refused_in_a_fork(training.ledger.reserve)


def test_a_failure_while_drawing_is_charged():
    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            raise OSError("unreadable")

    training = make(make_plan(sampling_prob=1.0), preflight=False)
    with pytest.raises(OSError, match="unreadable"):
        next(iter(training.batches(Broken())))
    assert training.ledger.charges == 1
    assert "failed on private data" in training.statement()["notes"][0]
