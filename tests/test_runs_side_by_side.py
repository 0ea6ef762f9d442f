"""Several runs, threads and folders around one model: nothing is forgotten, and nothing is counted once for two."""

from __future__ import annotations

import gc
import sys
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise.errors import CrossExampleOp, LedgerError, ParameterMismatch, WrongOrder

DATA = (torch.randn(32, 6), torch.randint(0, 3, (32,)))


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plan(steps=3, noise_multiplier=1.0, **given):
    fixed = {"delta": 1e-5, "sampling_prob": 0.25, "expected_batch_size": 8.0}
    return cw.Plan(noise_multiplier=noise_multiplier, steps=steps, **fixed, **given)


def made(model, optimizer=None, made_plan=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return cw.privatize(model, optimizer, made_plan or plan(), losses, **options)


def test_a_run_does_not_go_on_beside_a_later_one():
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = made(model, optimizer)
    second = made(model, optimizer, plan(noise_multiplier=2.0))
    batch = next(first.batches(DATA))
    with pytest.raises(ParameterMismatch, match="called again for this model"):
        first.step(batch)
    second.step(next(second.batches(DATA)))
    assert (first.ledger.charges, second.ledger.charges) == (0, 1)


def test_a_run_with_the_ledger_of_the_one_before_may_be_made_again():
    model = nn.Linear(6, 3)
    first = made(model)
    first.step(next(first.batches(DATA)))
    second = made(model, ledger=first.ledger)
    second.step(next(second.batches(DATA)))
    assert second.ledger.charges == 2


def test_two_threads_never_add_to_one_release():
    """Each release is at most S long, without its noise: one record in each batch, the same one."""
    model = nn.Linear(6, 3)
    run = made(model, made_plan=plan(steps=4000), sampling="asserted", preflight=False)
    found, real = [], run._noise.add_

    def watched(sums, **given):
        if given["stream"] == "gradient":
            total = sum(float(v.double().square().sum()) for v in sums.values()) ** 0.5
            found.append(total / given["sensitivity"])
        return real(sums, **given)

    run._noise.add_ = watched
    record, refused = (torch.full((1, 6), 100.0), torch.tensor([0])), []

    def work():
        for _ in range(150):
            try:
                run.step(record)
            except WrongOrder as error:
                refused.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert found
    assert max(found) <= 1
    assert all("thread" in str(error) or "not released" in str(error) for error in refused)
    assert len(found) == run.ledger.charges


def test_a_run_may_go_on_in_another_thread():
    run = made(nn.Linear(6, 3))
    batches = run.batches(DATA)
    run.step(next(batches))
    thread = threading.Thread(target=lambda: run.step(next(batches)))
    thread.start()
    thread.join()
    assert run.ledger.charges == 2


def test_a_run_that_is_gone_leaves_its_ledger_free(tmp_path):
    run = made(nn.Linear(6, 3), ledger=tmp_path / "run.ledger")
    run.step(next(run.batches(DATA)))
    with pytest.raises(LedgerError, match="in this process"):
        made(nn.Linear(6, 3), ledger=tmp_path / "run.ledger")
    del run
    gc.collect()
    again = made(nn.Linear(6, 3), ledger=tmp_path / "run.ledger")
    assert again.ledger.charges == 1
    again.ledger.close()
    made(nn.Linear(6, 3), ledger=tmp_path / "run.ledger").ledger.close()


def test_a_relative_path_is_not_another_ledger_in_another_folder(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    model = nn.Linear(6, 3)
    monkeypatch.chdir(tmp_path / "a")
    run = made(model, ledger="run.ledger")
    run.step(next(run.batches(DATA)))
    run.ledger.close()
    monkeypatch.chdir(tmp_path / "b")
    with pytest.raises(ParameterMismatch, match="already trained by a run that spent"):
        made(model, ledger="run.ledger")
    assert not (tmp_path / "b" / "run.ledger").exists()


def test_looks_are_not_forgotten_either():
    model = nn.Linear(6, 3)
    run = made(model, made_plan=plan(evaluations=1, evaluation_noise=2.0))
    cw.private_score(run, DATA, lambda m, b: (m(b[0]).argmax(1) == b[1]).float(), size=32)
    with pytest.raises(ParameterMismatch, match="already trained by a run that spent"):
        made(model)


def test_the_mode_of_batches_of_ones_own_is_kept():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x):
            return self.linear(x - x.mean(0) if self.training else x)

    model = Centred().eval()
    run = made(model, sampling="asserted")
    run.step(DATA)
    model.train()
    with pytest.raises(ParameterMismatch, match=r"model.train\(\) or model.eval\(\) was called"):
        run.step(DATA)


class Late(nn.Module):
    """Writes the largest value it has seen into a buffer, once it has been called often enough."""

    def __init__(self, after, in_place=True):
        super().__init__()
        self.linear, self.after, self.in_place, self.calls = nn.Linear(6, 3), after, in_place, 0
        self.register_buffer("top", torch.ones(()))

    def forward(self, x):
        self.calls += 1
        if self.calls > self.after:
            top = torch.maximum(self.top, x.detach().abs().max())
            if self.in_place:
                self.top.copy_(top)
            else:
                self.top = top
        return self.linear(x)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_buffer_that_is_written_to_later_stops_the_run_and_is_charged(in_place):
    model = Late(10**9, in_place)
    run = made(model, made_plan=plan(steps=30))
    batches = run.batches((100 * DATA[0], DATA[1]))
    run.step(next(batches))
    model.after = 0
    batch = next(batches)
    while batch.data is None:  # of no record
        run.step(batch)
        batch = next(batches)
    with pytest.raises(CrossExampleOp, match="wrote into the model, which no probe of the preflight made it do: top"):
        run.step(batch)
    assert run.ledger.charges >= 2
    assert "failed on private data" in run.ledger.notes[0]


def test_what_is_written_whatever_the_data_may_go_on():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.mask = nn.Linear(6, 3), None
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            self.steps += 1
            if self.mask is None:
                self.mask = torch.ones(6)
            return self.linear(x * self.mask)

    model = Counts()
    run = made(model)
    for batch in run.batches(DATA):
        run.step(batch)
    assert run.ledger.charges == 3
    assert model.steps > 0


def test_a_rule_of_ones_own_is_on_the_users_word():
    class Mine(cw.Abadi):
        pass

    run = made(nn.Linear(6, 3), made_plan=plan(rule=Mine()))
    found = run.statement()
    assert found["asserted_by_user"] == {"rule": "Mine, of the user's own (check_rule tests it)"}
    assert not found["certified"]
    assert made(nn.Linear(6, 3), made_plan=plan(rule=cw.PerLayer(cw.Abadi()))).statement()["certified"]


def test_numbers_of_half_precision_do_not_round_what_noise_is_made_of():
    given = cw.QuantileThreshold(0.5, count_noise=np.float16(0.55), initial=np.float32(0.5))
    assert type(given.count_noise) is type(given.initial) is float
    wide = cw.QuantileThreshold(0.5, count_noise=float(np.float16(0.55)), initial=0.5)
    sigmas = [plan(rule=cw.Abadi(), threshold=t).gradient_noise_multiplier for t in (given, wide)]
    assert sigmas[0] == sigmas[1]
