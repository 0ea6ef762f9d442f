"""Max pooling in its faster form is max pooling to the last bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clipwise.engine import pooling
from clipwise.engine.tape import Tape


def both(x, window):
    found = []
    for pool in (F.max_pool2d, pooling.max_pool2d):
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        out = pool(given, *window)
        weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)
        found.append((out, *torch.autograd.grad((out.nan_to_num(0.0, 0.0, 0.0) * weights).sum(), given)))
    return zip(*found, strict=True)


@settings(max_examples=150, deadline=None)
@given(
    size=st.tuples(st.integers(1, 3), st.sampled_from([1, 7, 8, 16, 33]), st.integers(5, 9), st.integers(5, 9)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.sampled_from([None, 1, 2, (2, 1)]),
    padded=st.booleans(),
    dilation=st.sampled_from([1, 2]),
    ceil=st.booleans(),
    double=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_values_and_gradients_are_equal_to_the_last_bit(size, kernel, stride, padded, dilation, ceil, double, seed):
    made = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, size, generator=made).to(torch.float64 if double else torch.float32)  # many are equal
    special = torch.rand(size, generator=made)
    for odd, share in ((float("nan"), 0.05), (float("inf"), 0.1), (-float("inf"), 0.2)):
        x = torch.where((special < share) & (special > share / 2), odd, x)
    padding = tuple(k // 2 for k in kernel) if padded else 0
    for plain, quick in both(x, (kernel, stride, padding, dilation, ceil)):
        assert plain.stride() == quick.stride()
        assert torch.equal(plain.isnan(), quick.isnan())
        assert torch.equal(plain.nan_to_num(7.0), quick.nan_to_num(7.0))


@pytest.mark.parametrize("kind", ["no batch", "channels last", "bfloat16", "transposed"])
def test_what_has_no_faster_form_stays_as_it_is(kind):
    x = torch.randn(4, 16, 8, 8)
    x = {
        "no batch": lambda: x[0],
        "channels last": lambda: x.contiguous(memory_format=torch.channels_last),
        "bfloat16": lambda: x.bfloat16(),
        "transposed": lambda: x.mT,
    }[kind]()
    for plain, quick in both(x, (2,)):
        assert torch.equal(plain, quick)
        assert plain.stride() == quick.stride()


def test_the_tape_takes_the_faster_form(monkeypatch):
    taken = []
    real = pooling.max_pool2d
    monkeypatch.setattr(pooling, "max_pool2d", lambda *a, **k: taken.append(1) or real(*a, **k))
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(8 * 25, 2))
    x, y = torch.randn(4, 1, 8, 8), torch.randint(0, 2, (4,))
    with (tape := Tape(model, (x,), 4)):
        losses = F.cross_entropy(model(x), y, reduction="none")
    tape.backward(losses)
    assert taken
    assert torch.equal(losses, F.cross_entropy(model(x), y, reduction="none"))
