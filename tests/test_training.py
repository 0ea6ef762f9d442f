from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from forked import refused_in_a_fork
from torch import nn

import clipwise as cw
from clipwise import errors

X, Y = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def make_plan(**change):
    numbers = {"noise_multiplier": 1.0, "delta": 1e-5, "sampling_prob": 0.25, "steps": 6, "expected_batch_size": 10}
    return cw.Plan(**(numbers | change))


def make(plan=None, loss_fn=losses, make_optimizer=None, model=None, **options):
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, lr=0.1))
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    return cw.privatize(model, optimizer, plan or make_plan(), loss_fn, **options)


def weights(training):
    return torch.cat([p.detach().flatten().clone() for p in training.model.parameters()])


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


def released(training, batch):
    """The noised gradient of one step, through the optimizer, with learning rate 1 and no noise to speak of."""
    before = weights(training)
    training.step(batch)
    return (before - weights(training)) * training.plan.expected_batch_size


def quiet(**options):
    """A run whose noise is negligible against the clipped sum, to look at the sum itself."""
    plan = make_plan(noise_multiplier=1e-9, delta=0.5, accountant="rdp", expected_batch_size=10)
    loud = {"sampling": "asserted", "noise": "fast"}  # certified noise would refuse to be so small
    return make(plan, make_optimizer=lambda p: torch.optim.SGD(p, lr=1.0), **(loud | options))


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


# -- what must be refused ----------------------------------------------------------------------------


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


# -- copies ------------------------------------------------------------------------------------------


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


# -- what may be seen --------------------------------------------------------------------------------


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
