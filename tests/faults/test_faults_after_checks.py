"""Rows where something changes after it was checked, or is read where it was not: batches, hooks, ledgers, scores."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from small_runs import X, Y, losses, network, run
from torch import nn

import clipwise as cw
from clipwise import errors
from clipwise.accounting.arithmetic import ROOM
from clipwise.noise import NoiseSource
from clipwise.statement import arithmetic_delta

# -- batches and models ---------------------------------------------------------------------------------


@dataclass
class Row:
    x: torch.Tensor
    y: torch.Tensor


def in_place(data):
    data["x"].sub_(data["x"].mean(0))


def replaced(data):
    data["x"] = data["x"] - data["x"].mean(0)


def replaced_in_a_list(data):
    data["list"][0] = data["list"][0] * 2


def an_array(data):
    data["array"] *= 2.0


def deeper(data):
    data["row"].x.zero_()


def into_an_empty_list(data):
    data["flags"].append(1)


def other_keys(data):
    x, y = data.pop("x"), data.pop("y")
    data.update({"y": y, "x": x})


@pytest.mark.parametrize(
    "change", [in_place, replaced, replaced_in_a_list, an_array, deeper, into_an_empty_list, other_keys]
)
def test_22_a_batch_is_stepped_as_it_was_drawn(change):
    def collate(records):
        x, y = (torch.stack(column) for column in zip(*records, strict=True))
        return {
            "x": x,
            "y": y,
            "list": [x.clone(), 3.0, "a"],
            "array": x.numpy().copy(),
            "row": Row(x.clone(), y),
            "flags": [],
        }

    training = run(loss_fn=lambda m, b: losses(m, (b["x"], b["y"])), steps=4)
    seen = 0
    for batch in training.batches(list(zip(X, Y, strict=True)), collate_fn=collate):
        if batch.data is None:
            continue
        if seen:
            change(batch.data)
            with pytest.raises(errors.WrongBatch, match="was changed since"):
                training.step(batch)
            return
        training.step(batch)
        seen += 1
    raise AssertionError("no batch had records")


def test_22_the_loss_function_may_work_in_place():
    def in_place(model, batch):
        batch[0].mul_(0.5)
        return losses(model, batch)

    training = run(loss_fn=in_place, steps=3, sampling_prob=1.0, expected_batch_size=48.0)
    for batch in training.batches((X.clone(), Y)):
        training.step(batch)
    assert training.ledger.charges == 3


class Swapped(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def hooked(model):
    model[0].register_forward_pre_hook(lambda module, given: (given[0] - given[0].mean(0),))


def hooked_behind(model):
    model[0].register_forward_hook(lambda module, given, found: found - found.mean(0))


def another_forward(model):
    model[0].forward = lambda x: nn.functional.linear(x - x.mean(0), model[0].weight, model[0].bias)


def another_module(model):
    model[1] = Swapped()


def one_hook_more_and_one_less(model):
    model._forward_pre_hooks.clear()
    model.register_forward_pre_hook(lambda module, given: (given[0] - given[0].mean(0),))


def everywhere(model):
    torch.nn.modules.module.register_module_forward_pre_hook(lambda module, given: (given[0] - given[0].mean(0),))


@pytest.mark.parametrize(
    "change", [hooked, hooked_behind, another_forward, another_module, one_hook_more_and_one_less, everywhere]
)
@pytest.mark.parametrize("asserted", [False, True])
def test_11_what_changed_is_checked_again(change, asserted):
    model = network()
    model.register_forward_pre_hook(lambda module, given: None)
    options = {"sampling": "asserted"} if asserted else {}
    training = run(model=model, sampling_prob=1.0, expected_batch_size=48.0, **options)
    batches = iter([(X, Y)] * 3) if asserted else training.batches((X, Y))
    training.step(next(batches))
    batch = next(batches)
    try:
        change(model)
        with pytest.raises(errors.CrossExampleOp):
            training.step(batch)
    finally:
        torch.nn.modules.module._global_forward_pre_hooks.clear()
    assert training.ledger.charges == 1


class Lazy(nn.Module):
    """Registers a hook and makes a module at its first pass, as some libraries do."""

    def __init__(self):
        super().__init__()
        self.linear, self.ready = nn.Linear(6, 3), False

    def forward(self, x):
        if not self.ready:
            self.ready = True
            self.linear.register_forward_hook(lambda module, given, found: None)
        self.end = nn.Identity()
        return self.end(self.linear(x))


@pytest.mark.parametrize("compiled", [False, True])
def test_11_what_does_no_harm_may_change(compiled):
    training = run(model=Lazy(), steps=4, sampling_prob=1.0, expected_batch_size=48.0, compile=compiled)
    for number, batch in enumerate(training.batches((X, Y))):
        if number == 1:
            training.model.linear.register_forward_hook(lambda module, given, found: None)
        if number == 2:
            own = training.model.linear.forward
            training.model.linear.forward = lambda x, own=own: own(x)
            training.model.linear.forward = own
        training.step(batch)
    assert training.ledger.charges == 4
    assert training.statement()["certified"]


def test_31_what_fails_after_records_were_seen_is_charged():
    def seen(model, batch):
        if (batch[0] == 77.0).any():
            model.train(not model.training)
        return losses(model, batch)

    outcomes = []
    for last in (0.0, 77.0):
        x = torch.cat([X, torch.full((1, 6), last)])
        y = torch.cat([Y, torch.tensor([0])])
        training = run(loss_fn=seen, sampling_prob=1.0, expected_batch_size=48.0)
        batch = next(training.batches((x, y)))
        if last:
            with pytest.raises(errors.ParameterMismatch):
                training.step(batch)
            assert "a step failed" in training.ledger.notes[-1]
        else:
            training.step(batch)
        outcomes.append(training.ledger.charges)
    assert outcomes == [1, 1]


# -- runs on one model ----------------------------------------------------------------------------------


def test_38_a_part_of_a_trained_model_has_not_forgotten(tmp_path):
    first = run(ledger=tmp_path / "a")
    first.step(next(first.batches((X, Y))))
    wrapper = nn.Sequential(first.model)
    with pytest.raises(errors.ParameterMismatch, match="or a part of it, was already trained"):
        run(model=wrapper, ledger=tmp_path / "b")
    frozen = nn.Sequential(first.model.requires_grad_(False), nn.Linear(3, 3))
    with pytest.raises(errors.ParameterMismatch, match="or a part of it, was already trained"):
        run(model=frozen)


def test_38_a_run_does_not_go_on_beside_one_on_a_part_of_its_model():
    model = network()
    first = run(model=model)
    batch = next(first.batches((X, Y)))
    run(model=nn.Sequential(model))
    with pytest.raises(errors.ParameterMismatch, match="called again"):
        first.step(batch)


def test_38_a_ledger_that_vanished_is_not_begun_anew(tmp_path):
    first = run(ledger=tmp_path / "run")
    first.step(next(first.batches((X, Y))))
    first.ledger.close()
    kept = (tmp_path / "run").read_bytes()
    os.remove(tmp_path / "run")
    with pytest.raises(errors.ParameterMismatch, match="is gone"):
        run(model=first.model, ledger=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    empty = cw.Ledger(first.plan, tmp_path / "run")
    with pytest.raises(errors.ParameterMismatch, match="is gone"):
        run(model=first.model, ledger=empty)
    (tmp_path / "run").write_bytes(kept)
    again = run(model=first.model, ledger=tmp_path / "run")
    assert again.ledger.charges == 1


def test_35_a_run_that_is_gone_holds_no_lock(tmp_path):
    gc.disable()
    try:
        first = run(ledger=tmp_path / "run")
        for batch in first.batches((X, Y)):
            first.step(batch)
            break
        del first, batch
        run(ledger=tmp_path / "run").ledger.close()
    finally:
        gc.enable()


def test_40_a_run_that_was_replaced_scores_no_more():
    model = network()
    first = run(model=model, evaluations=2, evaluation_noise=3.0)
    second = run(model=model)
    second.step(next(second.batches((X, Y))))
    with pytest.raises(errors.ParameterMismatch, match="called again"):
        cw.private_score(first, (X, Y), lambda m, b: (m(b[0]).argmax(1) == b[1]).float(), size=48)
    assert first.ledger.looks == 0


# -- searches -------------------------------------------------------------------------------------------


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x):
        if not self.training:
            self.last = x.mean(0)
        return self.linear(x)


def searched(train, score, **options):
    plan = cw.TuningPlan(
        epsilon=3.0,
        delta=1e-4,
        sampling_prob=0.25,
        steps=2,
        expected_batch_size=12,
        search=cw.Search(runs=2),
        **options,
    )
    with ThreadPoolExecutor(1) as pool:
        public = not options
        return cw.tune(train, {"lr": [0.1, 0.2]}, plan, score, score_is_public=public, executor=pool)


def trained(trial):
    model = Keeps().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = cw.privatize(model, optimizer, trial.plan(), losses)
    for batch in training.batches((X, Y)):
        training.step(batch)
    return training


def test_41_what_a_score_leaves_in_a_model_is_not_released():
    def score(model):
        return (model.eval()(X).argmax(1) == Y).float()

    winner = searched(trained, score, score_noise=20.0, score_size=48)
    assert winner.weights["last"].tolist() == [0.0] * 6
    assert winner.statement["asserted_by_user"] == {"score": "values asserted to be of one record each"}
    assert not winner.statement["certified"]


def test_41_a_run_cannot_change_the_numbers_that_it_is_held_to():
    def louder(trial):
        trial.numbers["noise_multiplier"] = 0.3
        return trained(trial)

    with pytest.raises(errors.TuningFailed, match="noise_multiplier"):
        searched(louder, lambda model: 1.0)


# -- accounting -----------------------------------------------------------------------------------------


def test_45_tails_under_replace_one_are_those_of_twice_the_shift():
    model = nn.Linear(1, 1, bias=False)
    source = NoiseSource()
    numbers = {"delta": 1e-5, "sampling_prob": 1.0, "steps": 1, "expected_batch_size": 4}
    quiet, half = (cw.Plan(noise_multiplier=s, **numbers) for s in (0.5, 0.25))
    replaced = cw.Plan(noise_multiplier=0.5, adjacency="replace_one", **numbers)
    assert arithmetic_delta(replaced, source, model) == arithmetic_delta(half, source, model)
    assert arithmetic_delta(replaced, source, model) > arithmetic_delta(quiet, source, model)
    loud = cw.Plan(noise_multiplier=0.25, adjacency="replace_one", **numbers)
    impossible = 0.5 * float(torch.special.erfc(torch.tensor((source.reach - 2 / 0.25) / 2**0.5, dtype=torch.float64)))
    assert arithmetic_delta(loud, source, model) > impossible > 10 * loud.delta
    assert arithmetic_delta(loud, source, model) > ROOM * loud.delta
    with pytest.raises(errors.CannotCertify):
        cw.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), loud, lambda m, x: m(x)[:, 0] ** 2)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("steps", [1, 10**6])
def test_43_what_rounds_to_nothing_is_not_nothing(accountant, steps):
    """Unsampled, T releases of σ = 1e8 are one whose worlds lie μ = √T/σ apart; sampled half, at least half of that."""
    least = 0.4 * (steps / 1e16) ** 0.5 / (2 * np.pi) ** 0.5  # δ at ε = 0
    given = {"noise_multiplier": 1e8, "sampling_prob": 0.5, "steps": steps, "delta": least / 2}
    assert cw.epsilon(accountant=accountant, **given) > 0


# -- the ledger -----------------------------------------------------------------------------------------


def test_31_a_failed_step_and_its_note_are_one_line(tmp_path):
    def failing(model, batch):
        if len(batch[0]) > 20:
            raise RuntimeError("a record did this")
        return losses(model, batch)

    training = run(
        loss_fn=failing, sampling_prob=1.0, expected_batch_size=48.0, ledger=tmp_path / "run", preflight=False
    )
    with pytest.raises(RuntimeError):
        training.step(next(training.batches((X, Y))))
    notes = list(training.ledger.notes)
    assert "a step failed" in notes[-1]
    training.ledger.close()
    lines = (tmp_path / "run").read_text().splitlines()
    assert len(lines) == 2
    again = run(loss_fn=failing, sampling_prob=1.0, expected_batch_size=48.0, ledger=tmp_path / "run", preflight=False)
    assert (again.ledger.charges, again.ledger.notes) == (1, notes)
    assert not again.statement()["certified"]


def test_34_a_torn_line_may_have_been_a_note(tmp_path):
    training = run(ledger=tmp_path / "run")
    training.ledger.note("something that must not be lost")
    training.ledger.close()
    whole = (tmp_path / "run").read_bytes()
    (tmp_path / "run").write_bytes(whole[:-1])
    for _ in range(2):  # torn, then repaired
        again = run(ledger=tmp_path / "run")
        assert "a crash tore a line" in again.ledger.notes[-1]
        assert not again.statement()["certified"]
        assert again.ledger.charges == 1
        again.ledger.close()


def test_23_coins_too_coarse_for_a_probability_are_refused():
    with pytest.raises(ValueError, match="too coarse"):
        run(sampling_prob=1e-15)
