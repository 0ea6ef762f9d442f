"""compile=True: the same sums as the eager engine, whatever the batch holds, and no second compilation in a run."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from fuzz import Attention, TiedHead
from torch import nn

import clipwise as cw
from clipwise import errors
from clipwise.clipping import clip, engine_gradients, trainable
from clipwise.engine import prepared
from clipwise.engine.compiled import Compiled, _traced
from clipwise.engine.static import static

X, Y = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def losses(model, batch):
    return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")


def make(model, loss_fn=losses, lr=0.1, **options):
    numbers = {"noise_multiplier": 1.0, "delta": 1e-5, "sampling_prob": 0.2, "steps": 8, "expected_batch_size": 12}
    chosen = {k: options.pop(k) for k in list(options) if k in cw.Plan.__dataclass_fields__}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    return cw.privatize(model, optimizer, cw.Plan(**(numbers | chosen)), loss_fn, **options)


def both(training, data, mask, scale):
    compiled = training._compiled(data, mask, scale)
    return compiled, training._clipped(data, mask, scale)


def assert_same(found, expected, tolerance=1e-5):
    (sums, norms), (truth, true_norms) = found, expected
    torch.testing.assert_close(norms, true_norms, rtol=tolerance, atol=1e-9)
    assert sums.keys() == truth.keys()
    for name, value in truth.items():
        torch.testing.assert_close(sums[name], value, rtol=tolerance, atol=tolerance)


def test_sums_norms_masks_thresholds_and_updates():
    """One small model through everything that changes from step to step: nothing is frozen into the graph."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    model.register_buffer("unused", torch.ones(2))
    training = make(model, compile=True, rule=cw.Abadi())
    training.batches((X, Y))
    assert training.warm_up > 0
    rows = 26  # 12 + 4·√12, rounded up
    for seed in range(4):
        data = X[seed : seed + rows] * (seed + 1), Y[seed : seed + rows]
        assert_same(*both(training, data, torch.arange(rows) < rows - 3 * seed, 0.3 * (seed + 1)))
        with torch.no_grad():
            for p in model.parameters():  # frozen ones too
                p.mul_(1.1)
    bad = X[:rows].clone()
    bad[3], bad[4] = math.nan, 1e30
    found, expected = both(training, (bad, Y[:rows]), torch.ones(rows, dtype=torch.bool), 0.5)
    kept = [i for i in range(rows) if i not in (3, 4)]
    assert all(torch.isfinite(v).all() for v in found[0].values())
    for name, value in found[0].items():
        torch.testing.assert_close(value, expected[0][name], rtol=1e-5, atol=1e-5)
    assert not torch.isfinite(found[1][3]).all()
    assert torch.isfinite(found[1][kept]).all()
    assert len(training._compiled.warm_up) == 1
    for batch in training.batches((X, Y)):  # random sizes
        training.step(batch)
    assert len(training._compiled.warm_up) == 1
    assert training.ledger.charges == 8
    assert all(p.grad is None for p in model.parameters())


def test_tied_weights_attention_and_in_place_residuals():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.norm, self.up = Attention(8, 2), nn.RMSNorm(8), nn.Linear(8, 8)

        def forward(self, x):
            h = self.attention(x)
            h += x
            return self.up(self.norm(h)).relu_() + h

    torch.manual_seed(0)
    model, ids = TiedHead(30, 8, Block()), torch.randint(0, 30, (6, 5))

    def loss(m, b):
        return m(b).logsumexp(2).mean(1)

    training = make(model, loss, compile=True, microbatch=6)
    assert_same(*both(training, ids, torch.arange(6) < 5, 0.5))


def test_convolutions_and_a_recurrent_layer():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv1d(3, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4)
            self.cell, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 2)

        def forward(self, x):
            h = F.gelu(self.norm(self.conv(x)))
            return self.head(self.cell(h.mT)[0][:, -1])

    torch.manual_seed(0)
    training = make(Mixed(), lambda m, b: m(b).square().sum(1), compile=True, microbatch=5)
    assert_same(*both(training, torch.randn(5, 3, 8), torch.ones(5, dtype=torch.bool), 0.2))


def test_dropout_is_drawn_anew_and_per_example():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.5), nn.Linear(50, 3))
    training = make(model, compile=True, microbatch=8)
    same = X[:1].expand(8, -1).contiguous(), Y[:1].expand(8).contiguous()
    mask = torch.ones(8, dtype=torch.bool)
    first, second = (training._compiled(same, mask, 1.0)[1].flatten().tolist() for _ in range(2))
    assert len(set(first)) == 8
    assert not set(first) & set(second)


def test_moving_thresholds_and_small_microbatches_train():
    torch.manual_seed(0)
    training = make(
        nn.Linear(6, 3), compile=True, microbatch=7, rule=cw.Abadi(), threshold=cw.QuantileThreshold(), lr=0.5
    )
    norms = set()
    for batch in training.batches((X, Y)):
        norms.add(training.clip_norm)
        training.step(batch)
    assert len(norms) == 8
    assert len(training._compiled.warm_up) == 1


def test_branches_on_values_are_refused():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x) if x.sum() > 0 else self.layer(2 * x)

    training = make(Branch(), compile=True, microbatch=4, preflight=False)
    with pytest.raises(errors.UnsupportedOp, match="decides by values"):
        training._compiled((X[:4], Y[:4]), torch.ones(4, dtype=torch.bool), 1.0)


def test_branches_on_pythons_random_numbers_are_found():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x) if random.random() < 0.5 else self.layer(2 * x)

    training = make(Branch(), compile=True, microbatch=4, preflight=False)

    def flat(x, y, mask):
        with static(), torch.enable_grad():
            sums, norms = training._clipped((x, y), mask, 1.0)
        return list(sums.values()), norms

    def refused():
        try:
            _traced(flat, (X[:4], Y[:4], torch.ones(4, dtype=torch.bool)))
        except errors.UnsupportedOp as error:
            return "two passes" in str(error)
        return False

    assert any(refused() for _ in range(40))


def test_what_compile_needs():
    with pytest.raises(errors.UnsupportedOp, match="needs a loss_fn"):
        make(nn.Linear(6, 3), None, compile=True)
    with pytest.raises(errors.UnsupportedOp, match="needs a loss_fn"):
        make(nn.Linear(6, 3), compile=True, engine="vmap")


def test_refusals_of_the_engine_come_through():
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    with pytest.raises(errors.CrossExampleOp, match="batch_norm"):
        make(model, compile=True).batches((X, Y))


def test_half_precision_norms_are_those_of_the_numbers_that_are_summed():
    """A fused kernel that kept more digits than it writes would measure other numbers than it sums."""

    class Squashed(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(512, 64).bfloat16()
            nn.init.constant_(self.l.weight, 1e-4)
            nn.init.constant_(self.l.bias, 0.3)

        def forward(self, x):
            return torch.tanh(self.l(torch.tanh(x)))

    model, rule, paths = Squashed(), cw.AutoV(), {}
    groups = rule.groups(["l.weight", "l.bias"])

    def step(data, mask, scale):
        found = engine_gradients(model, lambda m, b: (m(b[0]) * b[1]).float().sum(1), data, len(mask), paths=paths)
        return clip(found, rule, scale, groups, mask)

    compiled = Compiled(model, step)
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        x, y = (torch.full((1, k), float(2 * torch.rand((), generator=g))).bfloat16() for k in (512, 64))
        sums, _ = compiled((x, y), torch.ones(1, dtype=torch.bool), 1.0)
        assert torch.cat([v.double().flatten() for v in sums.values()]).norm() <= 1 + 4 * 2**-24


def test_equal_gradients_of_two_parameters_lie_apart():
    """Noise is added in place: memory that two sums share would be noised twice, with one noise for both."""
    lstm = nn.LSTM(4, 3, batch_first=True)  # b_ih and b_hh have the same gradient
    rule = cw.PSAC()
    groups = rule.groups([n for n, _ in lstm.named_parameters()])

    def step(data, mask, scale):
        found = engine_gradients(lstm, lambda m, b: m(b[0])[0].square().sum((1, 2)), data, len(mask))
        return clip(found, rule, scale, groups, mask)

    sums, _ = Compiled(lstm, step)((torch.randn(3, 2, 4),), torch.ones(3, dtype=torch.bool), 1.0)
    torch.testing.assert_close(sums["bias_ih_l0"], sums["bias_hh_l0"])
    assert len({v.data_ptr() for v in sums.values()}) == len(sums)


@pytest.mark.parametrize("order", ["kept", "turned"])
def test_constant_indices_are_looked_at_once_where_they_have_values(order):
    """mask[arange, :] of attention masks; a tracer does not know such numbers, and a permutation mixes examples."""

    class Indexed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            rows = torch.arange(len(x), device=x.device)
            return self.layer(x[rows if order == "kept" else rows.flip(0)])

    training = make(Indexed(), compile=True, microbatch=8, preflight=False)
    given = (X[:8], Y[:8]), torch.ones(8, dtype=torch.bool), 0.5
    if order == "turned":
        with pytest.raises(errors.UnsupportedOp):
            training._compiled(*given)
    else:
        assert_same(training._compiled(*given), training._clipped(*given))


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_an_output_that_is_made_longer_than_it_is(tied, cuts, monkeypatch):
    """What a GPU does for vocabularies that are no multiple of eight, here on a CPU: the same sums, nothing to see."""
    monkeypatch.setattr(prepared, "_allowed", lambda: cuts)
    monkeypatch.setattr("clipwise.engine.prepared._WHERE", frozenset({"cpu"}))
    monkeypatch.setattr("clipwise.engine.prepared._WIDE", 16)
    seen = []

    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(21, 12), nn.Linear(12, 21)
            if tied:
                self.head.weight = self.table.weight

        def forward(self, x):
            out = self.head(self.table(x))
            seen.append((tuple(out.shape), out.is_contiguous()))
            return out.view(-1).view(len(x), -1, 21)

    def losses(m, batch):
        out = m(batch)
        return F.cross_entropy(out.flatten(0, 1), batch.flatten(), reduction="none").view(len(batch), -1).sum(1)

    model, rule, made = Words(), cw.PSAC(), []
    groups = rule.groups(list(trainable(model)))
    real = F.pad
    monkeypatch.setattr(F, "pad", lambda x, *a, **k: (x.dim() < 3 and made.append(1)) or real(x, *a, **k))

    def step(data, mask, scale):
        return clip(engine_gradients(model, losses, data, len(mask)), rule, scale, groups, mask)

    batch, mask = torch.randint(0, 21, (5, 30)), torch.tensor([1, 1, 0, 1, 1]).bool()
    truth, norms = step(batch, mask, 1.0)
    assert not made
    found, again = Compiled(model, step)(batch, mask, 1.0)
    assert made
    assert set(seen) == {((5, 30, 21), True)}
    assert torch.allclose(norms, again, rtol=2e-3 if cuts else 1e-5)
    for name, value in truth.items():
        assert torch.allclose(found[name], value, atol=2e-3 if cuts else 1e-5)


@pytest.mark.parametrize(("cuts", "convolutions"), [(False, True), (True, False), (True, True)])
def test_factors_as_tensor_cores_take_them(cuts, convolutions, monkeypatch):
    """What a GPU does for convolutions and TF32, here on a CPU: channels last, and 11 bits of every factor."""
    monkeypatch.setattr("clipwise.engine.prepared._WHERE", frozenset({"cpu"}))
    monkeypatch.setattr(prepared, "_allowed", lambda: cuts)
    monkeypatch.setattr(prepared, "_allowed_in_convolutions", lambda: convolutions)
    strides = []

    class Flat(nn.Module):  # one that looks at how its input lies in memory
        def forward(self, x):
            strides.append(x.stride())
            return x.view(len(x), -1)

    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, padding=1), nn.ReLU(inplace=True), nn.Conv2d(16, 8, 3, padding="same", bias=False),
        Flat(), nn.Linear(8 * 16, 5),
    )  # fmt: skip
    rule = cw.PSAC()
    groups = rule.groups(list(trainable(model)))
    seen = []
    real = prepared.Prepared.shown
    monkeypatch.setattr(prepared.Prepared, "shown", lambda self, out: seen.append(self) or real(self, out))

    def step(data, mask, scale):
        losses = lambda m, batch: F.cross_entropy(m(batch[0]), batch[1], reduction="none")  # noqa: E731
        return clip(engine_gradients(model, losses, data, len(mask)), rule, scale, groups, mask)

    batch = torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))
    mask = torch.tensor([1, 1, 0, 1, 1, 1]).bool()
    truth, norms = step(batch, mask, 1.0)
    assert not seen
    found, again = Compiled(model, step)(batch, mask, 1.0)
    assert len(set(strides)) == 1
    assert {(r.last, r.cuts) for r in seen} == ({(True, convolutions), (False, True)} if cuts else {(True, False)})
    assert all(r.values["input"].is_contiguous(memory_format=torch.channels_last) for r in seen if r.last)
    far = 4e-3 if cuts else 1e-5
    assert torch.allclose(norms, again, rtol=far)
    for name, value in truth.items():
        assert (found[name] - value).norm() <= far * value.norm(), name
    if cuts:  # each factor has 11 bits, and the sums are those of the numbers that norms were taken of
        assert any(not torch.equal(found[name], value) for name, value in truth.items())


class Opaque:
    """Shows nothing of what it holds."""

    def __repr__(self):
        return "Opaque"


def test_what_is_no_tensor_counts_whole_or_is_refused():
    """A graph keeps such values: none may pass for another. A long array's repr leaves out its middle."""
    model, keep = nn.Linear(4, 1, bias=False), torch.ones(1200, dtype=torch.bool)
    x = torch.ones(1200, 4)

    def step(data, mask, scale):
        weighted = lambda m, b: m(b["x"])[:, 0] * torch.from_numpy(b["w"])  # noqa: E731
        return clip(engine_gradients(model, weighted, data, 1200), cw.Abadi(), scale, [("weight",)], mask)

    compiled = Compiled(model, step)
    for value in (0.0, 1.0):
        weights = np.ones(1200, np.float32)
        weights[500] = value
        data = {"x": x, "w": weights}
        assert_same(compiled(data, keep, 1e9), step(data, keep, 1e9))
    for more, name in ((Opaque(), "Opaque"), (np.array([Opaque()]), "ndarray")):
        with pytest.raises(errors.UnsupportedOp, match=f"holds a {name}"):
            compiled({"x": x, "w": weights, "more": more}, keep, 1e9)


@pytest.mark.parametrize("microbatch", [None, 12])
def test_records_that_lie_otherwise_in_memory(microbatch):
    """A collate function that turns images: what is compiled before the first private batch fits all of them."""
    model = nn.Sequential(nn.Conv2d(3, 5, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(80, 3))
    images, labels = torch.randn(60, 10, 10, 3), torch.arange(60) % 3

    def collate(records):
        x, y = torch.utils.data.default_collate(records)
        return x.permute(0, 3, 1, 2), y

    training = make(model, compile=True, microbatch=microbatch)
    for batch in training.batches(torch.utils.data.TensorDataset(images, labels), collate_fn=collate):
        training.step(batch)
    assert len(training._compiled.warm_up) <= 2  # a batch that fills its rows comes as the collate function made it
