"""What the preflight tries beyond five like records: other sizes, signs, lengths, batches, and what stays behind."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset, default_collate

import clipwise as cw
from clipwise.errors import CrossExampleOp, UnsupportedOp

TABLE = TensorDataset(torch.randn(32, 6), torch.randint(0, 3, (32,)))


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def begun(model, data=TABLE, loss_fn=losses, collate_fn=None):
    """A run whose preflight has passed."""
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.25, steps=2, expected_batch_size=8)
    run = cw.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss_fn)
    return run, run.batches(data, collate_fn=collate_fn)


class Model(nn.Module):
    """A linear model behind a function of the batch."""

    def __init__(self, change, sides=(6, 3)):
        super().__init__()
        self.change, self.linear = change, nn.Linear(*sides)

    def forward(self, x):
        return self.linear(self.change(x))


def rolled(x):
    return 0.7 * x + 0.3 * torch.cat([x[1:], x[:1]])


WHOLE_BATCH = {
    "a division where one value is large": lambda x: x / 255 if x.max() > 1 else x,
    "a shift where one value is negative": lambda x: x if x.min() < 0 else 2 * x - 1,
    "limits of two standard deviations": lambda x: x.clamp(-2 * x.std(), 2 * x.std()),
    "batches of even size": lambda x: x - x.mean(0) if len(x) % 2 == 0 else x,
    "batches of more than six": lambda x: x - x.mean(0) if len(x) > 6 else x,
    "one draw in a hundred": lambda x: rolled(x) if torch.rand(()) < 0.01 else x,
    "all but one draw in a hundred": lambda x: x if torch.rand(()) < 0.99 else rolled(x),
}


@pytest.mark.parametrize("kind", WHOLE_BATCH)
def test_a_choice_for_the_whole_batch_is_refused(kind):
    with pytest.raises(CrossExampleOp, match=r"than alone|same random numbers"):
        begun(Model(WHOLE_BATCH[kind]))


def test_a_hook_that_clips_a_gradient_of_the_batch_is_refused():
    class Hooked(Model):
        def forward(self, x):
            h = self.linear(x) * 1.0
            if h.requires_grad:
                h.register_hook(lambda g: g * min(1.0, 5.0 / float(g.norm())))
            return h

    with pytest.raises(CrossExampleOp):
        begun(Hooked(None), loss_fn=lambda m, b: m(b[0]).square().sum(1))


@pytest.mark.parametrize("one", [lambda x: x.abs(), lambda x: x / x.std(1, keepdim=True), lambda x: torch.exp(x)])
def test_models_of_single_records_pass_at_any_size(one):
    run, batches = begun(Model(one))
    run.step(next(batches))
    assert run.ledger.charges == 1


# -- lengths -------------------------------------------------------------------------------------------


class Records(Dataset):
    def __init__(self, shapes):
        self.x = [torch.randn(shape) for shape in shapes]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], i % 3


def padded(records):
    """Zeros behind every record, up to the largest of the batch along each axis."""
    x, y = zip(*records, strict=True)
    full = [max(sides) for sides in zip(*(one.shape for one in x), strict=True)]
    pads = [[n for side, most in zip(one.shape[::-1], full[::-1], strict=True) for n in (0, most - side)] for one in x]
    return torch.stack([F.pad(one, pad) for one, pad in zip(x, pads, strict=True)]), torch.tensor(y)


def over_time(first, width=8):
    return nn.Sequential(nn.Conv1d(first, 4, width), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 3))


def over_places():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


PADDED = {
    "sound, time last": (over_time(1), [(1, 20 + 3 * i) for i in range(12)]),
    "sound, the first record too short to cut": (over_time(1, 18), [(1, 20 + 3 * i) for i in range(12)]),
    "images as large as others": (over_places(), [(3, 12 + i, 12 + i) for i in range(12)]),
    "images as wide as others": (over_places(), [(3, 12, 13 + i) for i in range(12)]),
}


@pytest.mark.parametrize("kind", PADDED)
def test_padding_that_is_seen_is_refused_along_every_axis(kind):
    model, shapes = PADDED[kind]
    with pytest.raises(CrossExampleOp):
        begun(model, Records(shapes), collate_fn=padded)


def test_padding_that_is_not_seen_passes():
    lengths = [(1, 20 + i) for i in range(12)]
    begun(nn.Sequential(nn.Flatten(), nn.Linear(40, 3)), Records([(2, 20)] * 12), collate_fn=padded)
    summed = Model(lambda x: x.sum(2), (1, 3))
    begun(summed, Records(lengths), collate_fn=padded)


# -- what stays behind ---------------------------------------------------------------------------------


class Remembering(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind, self.kept, self.memory = nn.Linear(6, 3), kind, None, {}
        self.register_buffer("top", torch.ones(6))

    def forward(self, x):
        if self.kind == "tuple" and self.kept is None:
            self.kept = (x.mean(0).detach(), 1.0)
        if self.kind == "number":
            self.memory["top"] = max(self.memory.get("top", 0.0), float(x.abs().sum(1).max()))
            x = x / self.memory["top"]
        if self.kind == "list":
            self.memory.setdefault("bank", []).append(x.mean(0).detach())
        if self.kind == "array":
            self.memory["mean"] = x.detach().mean(0).numpy()
        if self.kind == "centred buffer":
            with torch.no_grad():
                self.top.lerp_(x.std(0, correction=0).to(self.top), 0.1)
        if self.kind == "buffer with gradients on" and torch.is_grad_enabled():
            with torch.no_grad():
                self.top.lerp_(x.mean(0).to(self.top), 0.1)
        if self.kind == "calls":
            self.memory["calls"] = self.memory.get("calls", 0) + 1
        if self.kind == "a number that is not used":
            self.memory["mean"] = float(x.mean())
        if self.kind == "chance":
            self.memory["chance"] = random.random()
        return self.linear(x)


@pytest.mark.parametrize("kind", ["tuple", "number", "list", "array", "centred buffer", "buffer with gradients on"])
def test_what_a_model_remembers_of_a_batch_is_refused(kind):
    with pytest.raises(CrossExampleOp, match="writes into the model, by what the data is"):
        begun(Remembering(kind))


@pytest.mark.parametrize("kind", ["calls", "chance", "a number that is not used"])
def test_what_does_not_come_from_the_data_or_of_which_nothing_comes_may_stay(kind):
    run, batches = begun(Remembering(kind))
    run.step(next(batches))


class Centre:
    """A loss that takes its centre from the first batch."""

    centre = None

    def __call__(self, model, batch):
        z = model(batch[0])
        if self.centre is None:
            self.centre = z.detach().mean(0)
        return (z - self.centre.to(z)).square().sum(1)


def test_what_a_loss_remembers_of_a_batch_is_refused():
    with pytest.raises(CrossExampleOp, match="Centre"):
        begun(nn.Linear(6, 3, bias=False), loss_fn=Centre())


# -- models that do not run in float64 -----------------------------------------------------------------


class Single(nn.Module):
    """Float32 is written into the code."""

    def __init__(self, change):
        super().__init__()
        self.cell, self.out, self.change = nn.GRUCell(6, 8), nn.Linear(8, 3), change

    def forward(self, x):
        return self.out(self.cell(self.change(x), torch.zeros(len(x), 8)))


@pytest.mark.parametrize("low", [True, False])
def test_both_ends_of_a_draw_are_looked_at_in_float32_too(low):
    with pytest.raises(CrossExampleOp):
        begun(Single(lambda x: rolled(x) if (torch.rand(()) < 0.5) == low else x))
    begun(Single(lambda x: x * 2))


def test_a_gate_that_starts_at_zero_is_opened_in_float32_too():
    class Gated(Single):
        def __init__(self):
            super().__init__(lambda x: x)
            self.gate = nn.Parameter(torch.zeros(6))

        def forward(self, x):
            self.change = lambda x: x + self.gate * (x - x.mean(0))
            return super().forward(x)

    with pytest.raises(CrossExampleOp):
        begun(Gated())


# -- chance that is not held still ---------------------------------------------------------------------


def test_mixing_by_a_generator_that_is_not_held_is_found_by_trying_again():
    def mixup(records):
        x, y = default_collate(records)
        return (rolled(x) if np.random.rand() < 0.5 and len(x) > 1 else x), y

    before = np.random.get_state()
    for seed in range(3):
        np.random.seed(seed)
        with pytest.raises(CrossExampleOp):
            begun(nn.Linear(6, 3), collate_fn=mixup)
    np.random.set_state(before)


def test_the_generators_of_python_and_numpy_stand_where_they_stood():
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)

    def shuffled(records):
        random.random()
        np.random.rand()
        return default_collate(records)

    begun(nn.Linear(6, 3), collate_fn=shuffled)
    assert (random.random(), np.random.rand()) == expected


# -- the tape ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mix",
    [
        lambda x, p: torch.where(x > 0, x[p], x),
        lambda x, p: x.clone().index_copy(1, torch.arange(2), x[p][:, :2]),
        lambda x, p: torch.cat([x, x], 1).masked_scatter(torch.ones(len(x), 12, dtype=torch.bool), x[p].repeat(1, 2)),
    ],
    ids=["where", "index_copy", "masked_scatter"],
)
def test_rows_in_another_order_stay_so_wherever_they_are_put(mix):
    model = nn.LazyLinear(3)
    model(mix(torch.randn(8, 6), torch.arange(8)))
    with pytest.raises(UnsupportedOp, match="in an unknown order, for which"):
        cw.clipped_sum(model, lambda m, x: m(mix(x, torch.randperm(len(x)))).sum(1), torch.randn(8, 6))


def test_cutmix_as_it_is_usually_written_is_refused_by_the_tape():
    def cutmix(m, x):
        x = x.clone()
        x[:, 1:4] = x[torch.randperm(len(x)), 1:4]
        return m(x).sum(1)

    with pytest.raises(UnsupportedOp, match="in an unknown order, for which"):
        cw.clipped_sum(nn.Linear(6, 3), cutmix, torch.randn(8, 6))


def test_putting_rows_by_an_unordered_index_of_constants_is_no_mixing():
    def masked(m, x):
        x = x.clone()
        x[:, 0][(x[:, 0] > 0).nonzero()[:, 0]] = 0.0
        return m(x).sum(1)

    x = torch.randn(8, 6)
    plain = cw.clipped_sum(nn.Linear(6, 3), lambda m, x: m(x).sum(1), torch.cat([x[:, :1].clamp(max=0), x[:, 1:]], 1))
    assert torch.allclose(cw.clipped_sum(nn.Linear(6, 3), masked, x).norms, plain.norms)


def test_a_hook_on_a_parameter_is_refused():
    model = nn.Linear(6, 3)
    model.weight.register_hook(lambda g: g * 0)
    with pytest.raises(UnsupportedOp, match="weight has a hook"):
        cw.clipped_sum(model, lambda m, x: m(x).sum(1), torch.randn(4, 6))
