"""What a forward pass may write into a model: the same whatever the data, and nothing of a batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import clipwise as cw
from clipwise.engine import state
from clipwise.errors import CrossExampleOp, UnsupportedOp

X, Y = torch.randn(32, 6), torch.randint(0, 3, (32,))


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Written(nn.Linear):
    """A linear layer that does something with the data, or with what it holds, first."""

    def __init__(self, write, **held):
        super().__init__(6, 3)
        self.write = write
        for name, value in held.items():
            self.register_buffer(name, value)

    def forward(self, x):
        self.write(self, x)
        return super().forward(x)


def run(model, steps=3, **options):
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.5, expected_batch_size=16.0, steps=steps)
    return cw.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, losses, **options)


def trained(model):
    training = run(model)
    for batch in training.batches((X, Y)):
        training.step(batch)
    return training.ledger.charges


def mask(model, x):
    model.mask = torch.ones(6, 6).tril()


@pytest.mark.parametrize("used", [False, True], ids=["new", "used before"])
def test_a_constant_that_is_made_anew_at_every_pass(used):
    model = Written(mask)
    if used:
        model(X)
    assert trained(model) == 3


def test_the_same_one_when_a_run_goes_on():
    model = Written(mask)
    training = run(model, steps=6)
    for _ in range(2):
        for _, batch in zip(range(3), training.batches((X, Y)), strict=False):
            training.step(batch)
    assert training.ledger.charges == 6


def test_a_buffer_that_is_written_over_with_what_it_held():
    assert trained(Written(lambda m, x: m.scale.clamp_(0, 1), scale=torch.ones(2))) == 3


def test_a_parametrization_that_keeps_a_vector():
    model = nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 1)), nn.Linear(1, 3))
    assert trained(model) == 3


def test_a_buffer_that_no_mode_counts_the_writes_of():
    with torch.inference_mode():
        scale = torch.ones(2)
    assert trained(Written(lambda m, x: None, scale=scale)) == 3


def test_all_modules_are_looked_at_however_much_the_first_ones_hold(monkeypatch):
    monkeypatch.setattr(state, "_MOST", 5)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[0].many = list(range(100))
    found = state.left_behind(model)
    assert {"1.running_mean", "1.num_batches_tracked", "1.training"} <= found.keys()
    assert len([name for name in found if name.startswith("0.many")]) < 10


class Sines(nn.Module):
    """Written for float32, and steep: its last digits grow to all of its output for large inputs."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.last = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x):
        for layer in (self.first, self.second):
            x = torch.sin(30 * layer(x.float()))
        return self.last(x)


@pytest.mark.parametrize("seed", range(3))
def test_large_records_show_nothing_where_their_last_digits_are_seen(seed):
    from clipwise.engine import preflight

    model, checked = Sines(seed), []
    records = [preflight.made_record((X[0], Y[0]), n, unlike=True) for n in range(5)]
    checked.append(preflight._checked(model, losses, records, "unlike"))
    assert checked[0].worst_loss_error < 1e-3  # in batches of one size
    assert checked[0].worst_norm_error == float("inf")  # not looked at


def test_large_records_show_it_where_a_whole_batch_is_asked():
    class Asks(Sines):
        def forward(self, x):
            x = x.float()
            return self.last(self.second(self.first(x / 300 if x.max() > 300 else x)))

    with pytest.raises(CrossExampleOp):
        trained(Asks(0))


def test_records_beside_others_show_it_where_single_ones_show_nothing():
    class Centred(Sines):
        def forward(self, x):
            x = x.float()
            return super().forward(x - x.mean(0) if x.abs().max() > 300 else x)

    with pytest.raises(CrossExampleOp):
        trained(Centred(0))


def test_a_constant_that_is_made_anew_may_be_scored():
    model = Written(mask)
    model(X)
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.5, steps=3, expected_batch_size=16, evaluations=1)
    training = cw.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, losses)
    score = cw.private_score(training, (X, Y), lambda m, b: (m(b[0]).argmax(1) == b[1]).double(), size=32)
    assert torch.tensor(score).isfinite()


def compiled(model):
    training = run(model, steps=4, compile=True, microbatch=32)
    for _ in range(2):
        for _, batch in zip(range(2), training.batches((X, Y)), strict=False):
            training.step(batch)
    return training.ledger.charges


def test_a_compiled_step_leaves_the_constant_that_was_there():
    model = Written(mask)
    model(X)
    before = model.mask
    assert compiled(model) == 4
    assert model.mask is before


def test_a_compiled_step_takes_it_with_batches_of_ones_own_too():
    model = Written(mask)
    model(X)
    training = run(model, compile=True, microbatch=32, sampling="asserted")
    training.step((X, Y))
    assert training.ledger.charges == 1


def test_a_compiled_step_leaves_what_is_made_at_the_first_pass_unmade():
    def lazy(model, x):
        if model.cache is None:
            model.cache = torch.ones(6, 6).tril()

    model = Written(lazy)
    model.cache = None
    assert compiled(model) == 4
    assert model.cache is None


def test_a_counter_that_a_compiled_step_would_freeze_is_refused():
    def count(model, x):
        model.passes = model.passes + 1

    with pytest.raises(UnsupportedOp, match="in the place of passes"):
        compiled(Written(count, passes=torch.zeros(())))


def test_weights_are_put_back_after_a_score_that_wrote_into_them():
    def overwrite(model, x):
        with torch.no_grad():
            model.weight[0] = x[0]

    model = nn.Linear(6, 3)
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.5, steps=3, expected_batch_size=16, evaluations=2)
    training = cw.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, losses)
    before = model.weight.detach().clone()

    def score(m, b):
        overwrite(m, b[0])
        return m(b[0])[:, 0]

    with pytest.raises(CrossExampleOp, match="keeps something"):
        cw.private_score(training, (X, Y), score, size=32)
    assert torch.equal(model.weight, before)
    assert training.ledger.looks == 1


def test_weights_that_are_masked_at_every_pass_train():
    def masked(model, x):
        model.weight.data.mul_(torch.ones(3, 6).tril())

    assert trained(Written(masked)) == 3
