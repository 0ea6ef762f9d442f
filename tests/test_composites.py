"""Fused ops, written out by the tape: outputs as PyTorch's own, gradients as brute force."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from brute import assert_matches
from test_ops import B, Module, floats, losses, one, words
from torch import nn

import clipwise as cw
from clipwise import errors
from clipwise.engine import Tape

MASK = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)


def attention(**options):
    need = options.pop("need_weights", False)
    masks = {k: options.pop(k) for k in ("attn_mask", "average_attn_weights") if k in options}

    def forward(m, x):
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        padding[:, -1] = True
        out, seen = m.a(x, x, x, need_weights=need, key_padding_mask=padding if need else None, **masks)
        return out if seen is None else torch.cat([out.flatten(1), seen.flatten(1)], dim=1)

    return lambda: Module(forward, a=nn.MultiheadAttention(6, 2, batch_first=True, **options))


def cross(m, x):
    return m.a(x, x.flip(-1)[:, :3], x.cos()[:, :3], need_weights=False)[0]


def recurrent(kind, **options):
    states = 2 if kind is nn.LSTM else 1

    def forward(m, x):
        out, last = m.a(x)
        ends = last if states == 2 else (last,)
        return torch.cat([out.flatten(1), *(e.transpose(0, 1).flatten(1) for e in ends)], dim=1)

    return lambda: Module(forward, a=kind(6, 3, batch_first=True, **options))


def time_major(m, x):
    return m.a(x.transpose(0, 1))[0].transpose(0, 1)


def with_state(m, x):
    first = (x[:, :1, :3].transpose(0, 1).contiguous(), x[:, 1:2, 3:].transpose(0, 1).contiguous())
    return m.a(x, first)[0]


def cells(m, x):
    h = c = torch.zeros(len(x), 3, dtype=x.dtype)
    g = torch.zeros(len(x), 3, dtype=x.dtype)
    for t in range(x.shape[1]):
        h, c = m.a(x[:, t], (h, c))
        g = m.b(h, g)
    return g


def bag(mode, **options):
    return lambda: nn.EmbeddingBag(7, 3, mode=mode, **options)


def turned(dims, *args, **options):
    return one(getattr(nn, f"ConvTranspose{dims}d"), *args, **options)


CASES = {
    "attention": (attention(), floats(5, 6)),
    "attention, weights and padding": (attention(need_weights=True), floats(5, 6)),
    "attention, weights of each head": (attention(need_weights=True, average_attn_weights=False), floats(5, 6)),
    "attention, causal": (attention(attn_mask=MASK), floats(5, 6)),
    "attention, float mask per head": (attention(attn_mask=torch.randn(2 * B, 5, 5)), floats(5, 6)),
    "attention, no bias": (attention(bias=False), floats(5, 6)),
    "attention, bias of keys, zeros": (
        attention(add_bias_kv=True, add_zero_attn=True, need_weights=True),
        floats(5, 6),
    ),
    "attention, across": (lambda: Module(cross, a=nn.MultiheadAttention(6, 2, batch_first=True)), floats(5, 6)),
    "attention, other widths": (
        lambda: Module(
            lambda m, x: m.a(x, x[..., :4], x[..., :5], need_weights=False)[0],
            a=nn.MultiheadAttention(6, 2, kdim=4, vdim=5, batch_first=True),
        ),
        floats(5, 6),
    ),
    "encoder layer": (one(nn.TransformerEncoderLayer, 6, 2, 8, dropout=0.0, batch_first=True), floats(5, 6)),
    "encoder layer, norm first": (
        one(nn.TransformerEncoderLayer, 6, 2, 8, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"),
        floats(5, 6),
    ),
    "decoder layer": (
        lambda: Module(
            lambda m, x: m.a(x, x.flip(1).tanh()), a=nn.TransformerDecoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        ),
        floats(5, 6),
    ),
    "lstm": (recurrent(nn.LSTM), floats(5, 6)),
    "lstm, two layers, both ways": (recurrent(nn.LSTM, num_layers=2, bidirectional=True), floats(5, 6)),
    "lstm, no bias": (recurrent(nn.LSTM, bias=False), floats(5, 6)),
    "lstm, projected": (recurrent(nn.LSTM, proj_size=2), floats(5, 6)),
    "lstm, time-major": (lambda: Module(time_major, a=nn.LSTM(6, 3)), floats(5, 6)),
    "lstm, first state from data": (lambda: Module(with_state, a=nn.LSTM(6, 3, batch_first=True)), floats(5, 6)),
    "gru": (recurrent(nn.GRU), floats(5, 6)),
    "gru, two layers, both ways": (recurrent(nn.GRU, num_layers=2, bidirectional=True), floats(5, 6)),
    "rnn": (recurrent(nn.RNN), floats(5, 6)),
    "rnn, relu": (recurrent(nn.RNN, nonlinearity="relu", num_layers=2), floats(5, 6)),
    "cells": (lambda: Module(cells, a=nn.LSTMCell(6, 3), b=nn.GRUCell(3, 3)), floats(4, 6)),
    "rnn cell": (
        lambda: Module(lambda m, x: m.a(x[:, 0], m.a(x[:, 1])), a=nn.RNNCell(6, 3)),
        floats(4, 6),
    ),
    "bag, mean": (bag("mean"), words(4)),
    "bag, sum": (bag("sum", padding_idx=2), words(4)),
    "bag, mean, padding": (bag("mean", padding_idx=2), words(4)),
    "bag, max": (bag("max"), words(4)),
    "bilinear": (lambda: Module(lambda m, x: m.a(x, x.cos()), a=nn.Bilinear(6, 6, 3)), floats(6)),
    "bilinear 3-D": (lambda: Module(lambda m, x: m.a(x, x.cos()), a=nn.Bilinear(6, 6, 3)), floats(5, 6)),
    "prelu": (one(nn.PReLU), floats(5, 6)),
    "prelu per channel": (one(nn.PReLU, 5), floats(5, 6)),
    "einsum": (lambda: Module(lambda m, x: torch.einsum("bld,dk->blk", x, m.w), w=(6, 3)), floats(5, 6)),
    "einsum, heads": (
        lambda: Module(lambda m, x: torch.einsum("bld,hdk,blf->bhkf", x, m.w, x), w=(2, 6, 3)),
        floats(5, 6),
    ),
    "einsum, two parameters": (
        lambda: Module(lambda m, x: torch.einsum("bld,dk,k->bl", x, m.w, m.v), w=(6, 3), v=(3,)),
        floats(5, 6),
    ),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), floats(5, 6)),
    "weight norm of a convolution": (lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(5, 3, 2)), floats(5, 6)),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(6, 6)), floats(5, 6)),
    "a reshaped weight": (
        lambda: Module(lambda m, x: F.linear(x, m.w.view(4, 6)) @ m.w.reshape(4, 6), w=(2, 2, 6)),
        floats(5, 6),
    ),
    "a reshaped convolution": (lambda: Module(lambda m, x: F.conv1d(x, m.w.view(3, 5, 2)), w=(15, 2)), floats(5, 6)),
    "a table that is reshaped elsewhere": (
        lambda: Module(
            lambda m, i: (
                F.linear(F.embedding(i, m.w)[..., :3], m.w.view(14, 3)) + F.embedding(i, m.w).sum(-1)[..., None]
            ),
            w=(7, 6),
        ),
        words(4),
    ),
    "conv transposed 1-D": (turned(1, 5, 3, 3), floats(5, 6)),
    "conv transposed, stride": (turned(1, 5, 4, 3, stride=2, padding=1, output_padding=1), floats(5, 6)),
    "conv transposed, groups": (turned(1, 6, 4, 3, stride=2, groups=2), floats(6, 5)),
    "conv transposed, dilated": (turned(2, 2, 3, 2, dilation=2, padding=1), floats(2, 4, 5)),
    "conv transposed 2-D": (turned(2, 2, 3, (3, 2), stride=(2, 1), bias=False), floats(2, 4, 5)),
    "conv transposed 3-D": (turned(3, 2, 2, 2, stride=2), floats(2, 3, 2, 3)),
    "conv transposed, flattened": (
        lambda: Module(lambda m, x: m.a(x.flatten(0, 1)).unflatten(0, x.shape[:2]), a=nn.ConvTranspose1d(3, 2, 2)),
        floats(2, 3, 4),
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_matches_brute_force(case, dtype):
    make, data = CASES[case]
    torch.manual_seed(7)
    model, x = make().to(dtype), data()
    x = x.to(dtype) if x.is_floating_point() else x
    if "float mask" in case:  # one mask per example and head cannot be taken apart by brute force
        model.function = _masked
    for rule in (cw.PSAC(), cw.Abadi()):
        assert_matches(model, losses, (x,), rule, clip_norm=0.7)


def _masked(m, x):
    mask = x.sum(-1)[:, None, :, None].expand(-1, 2, -1, x.shape[1]).sin().reshape(2 * len(x), x.shape[1], x.shape[1])
    return m.a(x, x, x, need_weights=False, attn_mask=mask)[0]


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_those_of_the_fused_op(case):
    make, data = CASES[case]
    torch.manual_seed(7)
    model, x = make().double(), data()
    x = x.double() if x.is_floating_point() else x
    expected = model(x)
    tape = Tape(model, (x,), len(x))
    with tape:
        found = model(x)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_packed_sequences_are_refused_by_name():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.LSTM(6, 3, batch_first=True)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(x, [5] * len(x), batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.a(packed)[0], batch_first=True)[0]

    with pytest.raises(errors.ClipwiseError, match=r"packed|lstm"):
        cw.clipped_sum(Packed(), losses, (floats(5, 6)(),))


@pytest.mark.parametrize("equation", ["ld,dk->lk", "lbd,dk->lbk", "bld,dk->kbl", "bld,bk->bl", "...d,dk->...k"])
def test_einsums_without_a_batch_axis_in_front_are_refused(equation):
    shape = {"ld,dk->lk": (6,), "bld,bk->bl": (5, 6)}.get(equation, (5, 6))
    width = (B, 3) if equation == "bld,bk->bl" else (6, 3)

    def forward(m, x):
        x = x.transpose(0, 1) if equation.startswith("lbd") else x
        return torch.einsum(equation, x, m.w)

    model = Module(forward, w=width)
    if equation == "ld,dk->lk":  # its first letter IS the examples' axis
        assert_matches(model, losses, (floats(*shape)(),), cw.PSAC())
        return
    with pytest.raises(errors.UnsupportedOp, match="einsum"):
        cw.clipped_sum(model, losses, (floats(*shape)(),))


def test_dropout_inside_is_independent_per_example():
    """With dropout on, each example's gradient is that of its own masks: the norms of equal rows differ."""
    torch.manual_seed(0)
    model = Module(lambda m, x: m.a(x)[0], a=nn.LSTM(6, 8, num_layers=2, dropout=0.5, batch_first=True))
    x = floats(5, 6)()[:1].expand(8, -1, -1).contiguous()
    norms = cw.clipped_sum(model, losses, (x,)).norms
    assert len(norms.unique()) == 8


def test_own_rules_win_over_the_written_out_op():
    from clipwise.engine.ops import OP_RULES

    assert torch.conv_transpose1d in OP_RULES
    called = []

    def uses(call, grad):
        called.append(call.op)
        negative = torch.where(call.values["input"] > 0, 0.0, call.values["input"])
        yield "weight", cw.Dense((grad * negative).flatten(1).sum(1, keepdim=True))

    rule = cw.OpRule(("input", "weight"), frozenset({"weight"}), frozenset({"input"}), uses)
    assert_matches(nn.PReLU().double(), losses, (floats(5, 6)().double(),), cw.PSAC(), op_rules={torch.prelu: rule})
    assert called == ["prelu"]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_model_trains(kind):
    class Names(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(7, 6), kind(6, 8, batch_first=True), nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.rnn(self.embed(x))[0][:, -1])

    model = Names()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.2, steps=3, expected_batch_size=8)
    training = cw.privatize(
        model, optimizer, plan, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), microbatch=4
    )
    for batch in training.batches((torch.randint(0, 7, (40, 5)), torch.arange(40) % 3)):
        training.step(batch)
    assert training.epsilon == plan.epsilon


def learned_state(m, x):
    h = m.h.expand(len(x), -1)
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ m.wx + h @ m.wh)
    return h


LEARNED = {
    "a learned first state": (learned_state, {"h": (5,), "wx": (6, 5), "wh": (5, 5)}),
    "mm of two parameters": (
        lambda m, x: x @ m.wx + torch.mm(m.h.expand(len(x), -1), m.wh),
        {"h": (5,), "wx": (6, 5), "wh": (5, 5)},
    ),
    "a parameter times a constant": (
        lambda m, x: x @ m.wx + m.h.expand(len(x), -1) @ torch.ones(5, 5, dtype=x.dtype),
        {"h": (5,), "wx": (6, 5)},
    ),
    "addmm on rows of zeros": (
        lambda m, x: x @ m.wx + torch.addmm(m.h, torch.ones(len(x), 3, dtype=x.dtype), m.wh),
        {"h": (5,), "wx": (6, 5), "wh": (3, 5)},
    ),
    "transposed, contiguous, viewed": (lambda m, x: x @ m.w.T.contiguous().view(6, 5), {"w": (5, 6)}),
    "transposed, contiguous, strided": (
        lambda m, x: x[..., :3] @ m.w.T.contiguous().as_strided((3, 2), (2, 1)),
        {"w": (5, 6)},
    ),
    "permuted, cloned": (
        lambda m, x: x @ m.w.permute(1, 0, 2).clone(memory_format=torch.contiguous_format).view(6, 5),
        {"w": (3, 2, 5)},
    ),
}


@pytest.mark.parametrize("case", LEARNED)
def test_states_and_views_made_of_parameters(case):
    forward, shapes = LEARNED[case]
    data = floats(4, 6)() if case == "a learned first state" else floats(6)()
    assert_matches(Module(forward, **shapes).double(), losses, (data.double(),), cw.PSAC())


REFUSED = {
    "heads first, by bmm": (lambda m, x: torch.bmm(x.transpose(0, 1), m.w).transpose(0, 1), {"w": (8, 6, 2)}, (8, 6)),
    "time first, by add": (lambda m, x: (x.transpose(0, 1) + m.w).transpose(0, 1), {"w": (8, 1, 6)}, (8, 6)),
    "a product of spectra": (
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x, n=12) * torch.fft.rfft(m.w, n=12), n=12),
        {"w": (6,)},
        (6,),
    ),
    "a complex view": (
        lambda m, x: (torch.fft.rfft(x) * torch.view_as_complex(m.w)).abs(),
        {"w": (4, 2)},
        (6,),
    ),
    "in place on a parameter": (lambda m, x: m.w.expand(len(x), -1).clone().add_(x), {"w": (6,)}, (6,)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_told_apart_is_refused(case):
    forward, shapes, data = REFUSED[case]
    with pytest.raises(errors.UnsupportedOp):
        cw.clipped_sum(Module(forward, **shapes), losses, (floats(*data)(),))


def test_rows_of_parameters_are_pushed_back_in_parts(monkeypatch):
    from clipwise.engine import rows

    def forward(m, x):
        tiled = torch.cat([m.w * 2] * len(x), dim=0)  # one block of two rows per example
        return torch.bmm(x.reshape(2 * len(x), 3, 6), tiled).reshape(len(x), -1)

    for most in (2**24, 1):
        monkeypatch.setattr(rows, "_SPREAD", most)
        assert_matches(Module(forward, w=(2, 6, 3)).double(), losses, (floats(6, 6)().double(),), cw.PSAC())
