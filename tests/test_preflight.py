from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from test_ops import Module
from torch import nn
from torch.utils.data import default_collate

import clipwise as cw
from clipwise import errors

PLAN = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.5, steps=3, expected_batch_size=4)


def per_example(model, batch):
    out = model(batch[0]).flatten(1)
    return F.cross_entropy(out, batch[1], reduction="none")


def training(model, loss_fn=per_example, **options):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return cw.privatize(model, optimizer, PLAN, loss_fn, **options)


DATA = (torch.randn(8, 6), torch.randint(0, 3, (8,)))
SEQUENCES = (torch.randn(8, 5, 6), torch.randint(0, 3, (8,)))


def passes(model, data=DATA, **options):
    return next(iter(training(model, **options).batches(data)))


def test_an_ordinary_model_passes_and_is_left_untouched():
    model = nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.GroupNorm(2, 4), nn.Linear(4, 3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.random.get_rng_state()
    training(model).batches(DATA)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert model.training


def mean_shift(m, x):
    return m.b(m.a(x) - m.a(x).mean(0))


def attend_over_batch(m, x):
    h = m.a(x)
    return m.b(torch.softmax(h @ h.T, 1) @ h)


def shared_scale(m, x):
    h = m.a(x)
    return m.b(h / h.abs().max())


@pytest.mark.parametrize("forward", [mean_shift, attend_over_batch, shared_scale])
def test_mixing_in_the_model_is_refused(forward):
    model = Module(forward, a=nn.Linear(6, 4), b=nn.Linear(4, 3))
    with pytest.raises(errors.CrossExampleOp, match="inside a batch than alone"):
        passes(model)


def test_the_module_at_fault_is_named():
    class Mixer(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), Mixer(), nn.Linear(4, 3))
    with pytest.raises(errors.CrossExampleOp, match=r"'2' \(Mixer\)"):
        passes(model)


def test_batch_norm_is_refused_by_name():
    with pytest.raises(errors.CrossExampleOp, match="batch_norm"):
        passes(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))


def test_contrastive_loss_is_refused():
    def loss_fn(model, batch):
        h = F.normalize(model(batch[0]), dim=1)
        return F.cross_entropy(h @ h.T, torch.arange(len(h)), reduction="none")

    with pytest.raises(errors.CrossExampleOp, match="loss_fn"):
        passes(nn.Linear(6, 4), loss_fn=loss_fn)


def test_time_major_layout_is_refused():
    def forward(m, x):
        return m.b(m.a(x.transpose(0, 1).reshape(-1, 6)).reshape(x.shape[1], x.shape[0], -1).mean(0))

    data = (torch.randn(8, 6, 6), torch.randint(0, 3, (8,)))
    with pytest.raises(errors.ClipwiseError):
        passes(Module(forward, a=nn.Linear(6, 4), b=nn.Linear(4, 3)), data)


def test_a_buffer_that_gathers_statistics_is_refused():
    class Average(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            with torch.no_grad():
                self.mean.mul_(0.9).add_(0.1 * x.mean(0))
            return x

    model = nn.Sequential(Average(), nn.Linear(6, 3))
    with pytest.raises(errors.CrossExampleOp, match=r"0\.mean"):
        passes(model)
    assert not model[0].mean.any()


# -- collate functions -------------------------------------------------------------------------------


class Ragged(torch.utils.data.Dataset):
    """Sequences of unequal length."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((3 + i % 4, 6), 0.1 * i), i % 3


def pad(records):
    return nn.utils.rnn.pad_sequence([r[0] for r in records], batch_first=True), torch.tensor([r[1] for r in records])


def test_mean_pooling_over_padding_is_refused():
    model = Module(lambda m, x: m.a(x).tanh().mean(1), a=nn.Linear(6, 3))
    with pytest.raises(errors.CrossExampleOp, match="inside a batch than alone"):
        next(iter(training(model).batches(Ragged(), collate_fn=pad)))


def test_masked_pooling_over_padding_passes():
    def forward(m, x):
        mask = (x != 0).any(-1, keepdim=True)
        return (m.a(x).tanh() * mask).sum(1) / mask.sum(1).clamp(min=1)

    next(iter(training(Module(forward, a=nn.Linear(6, 3))).batches(Ragged(), collate_fn=pad)))


def test_mixup_in_the_collate_function_is_refused():
    def mixup(records):
        x, y = default_collate(records)
        return 0.7 * x + 0.3 * x.flip(0), y

    with pytest.raises(errors.CrossExampleOp, match="inside a batch than alone"):
        next(iter(training(nn.Linear(6, 3)).batches(DATA, collate_fn=mixup)))


def test_packing_in_the_collate_function_is_refused():
    def packed(records):
        x, y = default_collate(records)
        return x.reshape(1, -1), y[:1]

    with pytest.raises(errors.BatchShape, match="another number of rows"):
        next(iter(training(nn.Linear(6, 3)).batches(DATA, collate_fn=packed)))


# -- what is looked at -------------------------------------------------------------------------------


class Watched(torch.utils.data.Dataset):
    """Tells which private values reach the model."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((6,), 1234.5), 2


def test_private_values_never_reach_the_model_in_the_preflight():
    seen = []

    def loss_fn(model, batch):
        seen.append(((batch[0] == 1234.5).any().item(), batch[1].max().item()))
        return per_example(model, batch)

    training(nn.Linear(6, 3), loss_fn=loss_fn).batches(Watched())
    assert seen
    assert not any(x for x, _ in seen)
    assert max(y for _, y in seen) <= 1


def test_private_preflight_is_opt_in_and_on_record():
    seen = []

    def loss_fn(model, batch):
        seen.append(batch[0].max().item())
        return per_example(model, batch)

    run = training(nn.Linear(6, 3), loss_fn=loss_fn, preflight="private", ledger=None)
    run.batches(Watched())
    assert 1234.5 in seen
    assert "private records" in run.statement()["asserted_by_user"]["preflight"]
    assert not run.statement()["certified"]


def test_public_probe_records_are_used():
    seen = []

    def loss_fn(model, batch):
        seen.append(batch[0].max().item())
        return per_example(model, batch)

    probe = [(torch.full((6,), 77.0), 0), (torch.full((6,), 78.0), 1)]
    training(nn.Linear(6, 3), loss_fn=loss_fn, probe=probe).batches(Watched())
    assert max(seen) == 78


def test_records_that_cannot_be_made_up_ask_for_probe():
    class Text(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            return {"text": "hello", "label": 1}

    with pytest.raises(errors.UnsupportedOp, match="probe="):
        training(nn.Linear(6, 3)).batches(Text())


def test_failure_on_made_up_records_says_so():
    def loss_fn(model, batch):
        if (batch[1] > 1).sum() == 0:
            raise KeyError("class 2 is missing")
        return per_example(model, batch)

    with pytest.raises(errors.UnsupportedOp, match="made-up records"):
        training(nn.Linear(6, 3), loss_fn=loss_fn).batches(DATA)


def test_unused_parameters_are_reported():
    model = Module(lambda m, x: m.a(x), a=nn.Linear(6, 3), b=nn.Linear(6, 3))
    with pytest.warns(UserWarning, match=r"b\.weight"):
        training(model).batches(DATA)


def test_preflight_can_be_skipped():
    model = Module(mean_shift, a=nn.Linear(6, 4), b=nn.Linear(4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        passes(model, preflight=False)


def test_attention_and_dropout_pass():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(6, 18), nn.Linear(6, 3)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3 if self.training else 0.0)
            return self.out(F.dropout(mixed, 0.2, self.training)).mean(1)

    report = cw.preflight(Block(), per_example, [(torch.randn(5, 6), i % 3) for i in range(4)])
    assert report.worst_norm_error < 1e-4
    passes(Block(), SEQUENCES)


def test_one_record_cannot_show_anything():
    with pytest.raises(ValueError, match="at least two"):
        cw.preflight(nn.Linear(6, 3), per_example, [(torch.randn(6), 0)])


# -- more ways to go wrong ----------------------------------------------------------------------------


def test_a_weak_mix_is_found():
    def loss_fn(model, batch):
        return per_example(model, batch) + 1e-3 * model(batch[0]).mean(0).square().sum()

    with pytest.raises(errors.CrossExampleOp):
        passes(nn.Linear(6, 3), loss_fn=loss_fn)


def test_a_mix_behind_a_zero_gate_is_found():
    def forward(m, x):
        h = m.a(x)
        return m.b(h + m.gate * (h - h.mean(0)))

    model = Module(forward, a=nn.Linear(6, 4), b=nn.Linear(4, 3), gate=())
    nn.init.zeros_(model.gate)
    nn.init.zeros_(model.b.weight)
    with pytest.raises(errors.CrossExampleOp):
        passes(model)
    assert not model.gate.any()


def test_made_up_nan_asks_for_probe():
    model = Module(lambda m, x: m.a(x.log()), a=nn.Linear(6, 3))
    with pytest.raises(errors.UnsupportedOp, match="probe="):
        passes(model)


def test_a_step_counter_is_not_a_statistic():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x):
            with torch.no_grad():
                self.steps += 1
            return x

    model = nn.Sequential(Counter(), nn.Linear(6, 3))
    training(model).batches(DATA)
    assert int(model[0].steps) == 0
    training(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))).batches(DATA)


def test_a_wide_head_passes():
    model = Module(lambda m, x: m.a(x).mean(1), a=nn.Linear(6, 2000))
    passes(model, SEQUENCES)


def test_the_vmap_engine_is_checked_by_itself():
    model = Module(lambda m, x: torch.einsum("...i,ij->...j", x, m.w), w=(6, 3))
    with pytest.raises(errors.UnsupportedOp, match="einsum"):
        passes(model)
    passes(model, engine="vmap")


def test_a_loss_that_keeps_its_own_model_is_checked_too():
    model = nn.Linear(6, 3)
    passes(model, loss_fn=lambda m, batch: per_example(model, batch))
    mixing = Module(mean_shift, a=nn.Linear(6, 4), b=nn.Linear(4, 3))
    with pytest.raises(errors.CrossExampleOp):
        passes(mixing, loss_fn=lambda m, batch: per_example(mixing, batch))


def test_private_records_cannot_hide_in_frozen_parameters_or_attributes():
    class Queue(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.l = nn.Linear(6, 3)
            self.kept = nn.Parameter(torch.zeros(6), requires_grad=False) if kind == "parameter" else torch.zeros(6)

        def forward(self, x):
            if isinstance(self.kept, nn.Parameter):
                with torch.no_grad():
                    self.kept.copy_(x[0])
            else:
                self.kept = self.kept + x.detach().sum(0)
            return self.l(x)

    for kind in ("parameter", "attribute"):
        with pytest.raises(errors.ClipwiseError):
            passes(Queue(kind))
