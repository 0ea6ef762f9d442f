"""Rows where features meet: what a batch decides for all, what stays in a model, two runs or threads on one model."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import clipwise as cw
from clipwise.errors import CrossExampleOp, ParameterMismatch, UnsupportedOp, WrongOrder

DATA = (torch.randn(32, 6), torch.randint(0, 3, (32,)))


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def made(model, optimizer=None, noise_multiplier=1.0, **options):
    plan = cw.Plan(noise_multiplier=noise_multiplier, delta=1e-5, sampling_prob=0.25, steps=30, expected_batch_size=8)
    return cw.privatize(model, optimizer or torch.optim.SGD(model.parameters(), lr=0.1), plan, losses, **options)


class Model(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change, self.linear = change, nn.Linear(6, 3)
        self.register_buffer("top", torch.ones(()))

    def forward(self, x):
        return self.linear(self.change(self, x))


def test_11_a_choice_by_the_values_of_a_whole_batch_is_refused():
    with pytest.raises(CrossExampleOp):
        made(Model(lambda m, x: x / 255 if x.max() > 1 else x)).batches(DATA)


def test_11_cutmix_as_it_is_usually_written_is_refused():
    def cutmix(m, x):
        x = x.clone()
        x[:, 1:4] = x[torch.randperm(len(x)), 1:4]
        return m(x).sum(1)

    with pytest.raises(UnsupportedOp, match="in an unknown order"):
        cw.clipped_sum(nn.Linear(6, 3), cutmix, torch.randn(8, 6))


def test_12_what_a_step_writes_into_the_model_is_seen_though_no_probe_made_it():
    def late(m, x):
        if x.abs().max() > 1e6:
            m.top.copy_(x.detach().abs().max())
        return x

    run = made(Model(late), sampling="asserted")
    run.step(DATA)
    with pytest.raises(CrossExampleOp, match="top"):
        run.step((1e9 * DATA[0], DATA[1]))
    assert run.ledger.charges == 2


def test_22_a_data_set_with_an_indexing_of_its_own_is_not_read_past_it():
    class Agreed(TensorDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return tuple(x[i + 5] for x in self.tensors)

    seen = set()

    def watched(model, batch):
        seen.update(batch[1].tolist())
        return model(batch[0]).sum(1)

    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=1.0, steps=1, expected_batch_size=3)
    model = nn.Linear(6, 3)
    run = cw.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, watched)
    data = Agreed(torch.randn(10, 6), torch.arange(10) + 100)
    for batch in run.batches(data):
        run.step(batch)
    assert {105, 106, 107} <= seen
    assert not seen & {100, 101, 102, 103, 104, 108, 109}


def test_12_what_the_probes_write_over_with_its_own_value_must_keep_it():
    """Made-up records are small: only the real ones are beyond the maximum that the buffer holds."""

    def grow(m, x):
        m.top.copy_(torch.maximum(m.top, x.detach().abs().amax()))
        return x

    model = Model(grow)
    model.top.fill_(1e6)
    run = made(model)
    batches = run.batches((DATA[0] * 1e9, DATA[1]))
    with pytest.raises(CrossExampleOp, match="no probe of the preflight made it do: top"):
        list(map(run.step, batches))


@pytest.mark.parametrize("times", [2, 3, 4])
def test_12_a_tensor_in_the_place_of_one_that_is_gone_is_seen(times):
    """The second may have the address of the first, which is what Python's id is."""

    def keep(m, x):
        if x.abs().max() > 1e6:
            for i in range(times):
                m.cache = torch.relu(x.detach() - i)
        return x

    for _ in range(10):
        model = Model(keep)
        model.cache = torch.zeros(1)
        run = made(model, sampling="asserted")
        run.step(DATA)
        with pytest.raises(CrossExampleOp, match="wrote into the model"):
            run.step((DATA[0] * 1e9, DATA[1]))


def test_12_a_tensor_of_inference_mode_keeps_nothing_of_a_batch():
    def keep(m, x):
        if x.abs().max() > 1e6:
            with torch.inference_mode():
                m.table.copy_(x[0])
        return x

    model = Model(keep)
    with torch.inference_mode():
        model.table = torch.ones(6)
    run = made(model, sampling="asserted")
    run.step(DATA)
    with pytest.raises(CrossExampleOp, match="wrote into the model"):
        run.step((DATA[0] * 1e9, DATA[1]))
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.5, steps=3, expected_batch_size=8, evaluations=1)
    model = Model(keep)
    run = cw.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, losses)
    with torch.inference_mode():
        model.table = torch.ones(6)
    with pytest.raises(CrossExampleOp, match="keeps something"):
        cw.private_score(run, (DATA[0] * 1e9, DATA[1]), lambda m, b: m(b[0])[:, 0], size=32)
    assert run.ledger.looks == 1
    assert bool((model.table == 1).all())


def test_12_what_becomes_nan_has_not_kept_its_value():
    def spoil(m, x):
        m.top.copy_(torch.where(x.detach().abs().max() > 1e6, torch.nan, m.top))
        return x

    model = Model(spoil)
    model.top.fill_(0.0)
    run = made(model, sampling="asserted")
    run.step(DATA)
    with pytest.raises(CrossExampleOp, match="no probe of the preflight made it do: top"):
        run.step((DATA[0] * 1e9, DATA[1]))


def test_38_a_run_does_not_go_on_beside_a_later_one():
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = made(model, optimizer), made(model, optimizer, 2.0)
    with pytest.raises(ParameterMismatch, match="called again for this model"):
        first.step(next(first.batches(DATA)))
    second.step(next(second.batches(DATA)))


def test_38_two_threads_are_never_in_one_step():
    run = made(nn.Linear(6, 3), sampling="asserted", preflight=False)
    inside, refused, real = threading.Event(), [], run._ledger.reserve

    def slow():
        inside.set()
        other.join(5)
        return real()

    def second():
        inside.wait(5)
        run._ledger.reserve = real
        try:
            run.microbatches(run._accepted(DATA))
        except WrongOrder as error:
            refused.append(error)

    run._ledger.reserve, other = slow, threading.Thread(target=second)
    other.start()
    run.step(DATA)
    assert "Another thread" in str(refused[0])
    assert run.ledger.charges == 1


def test_22_a_batch_is_never_stepped_by_two_threads():
    """One that looks at it is late: the other has stepped it by then."""
    run = made(nn.Linear(6, 3))
    batch, real = next(run.batches(DATA)), run._accepted
    inside, goes_on, refused = threading.Event(), threading.Event(), []

    def slow(given):
        found = real(given)
        inside.set()
        goes_on.wait(5)
        return found

    def second():
        inside.wait(5)
        run._accepted = real
        try:
            run.step(batch)
        except WrongOrder as error:
            refused.append(error)
        goes_on.set()

    run._accepted, other = slow, threading.Thread(target=second)
    other.start()
    run.step(batch)
    other.join(5)
    assert "Another thread" in str(refused[0])
    assert run.ledger.charges == 1


def test_38_a_release_that_fails_does_not_end_the_run():
    run = made(nn.Linear(6, 3))
    batches, real = run.batches(DATA), run._noise.add_

    def fails(*_, **__):
        raise MemoryError

    run._noise.add_ = fails
    with pytest.raises(MemoryError):
        run.step(next(batches))
    run._noise.add_ = real
    assert run.ledger.charges == 1
    thread = threading.Thread(target=lambda: run.step(next(batches)))
    thread.start()
    thread.join()
    assert run.ledger.charges == 2


def test_31_a_batch_that_is_stopped_before_it_begins_costs_nothing_and_the_next_one_steps():
    run = made(nn.Linear(6, 3))
    batches, real = run.batches(DATA), run._bound

    def stopped(parameters):
        raise KeyboardInterrupt

    batch = next(batches)
    run._bound = stopped
    with pytest.raises(KeyboardInterrupt):
        run.step(batch)
    run._bound = real
    run.step(batch)
    run.step(next(batches))
    assert run.ledger.charges == 2
