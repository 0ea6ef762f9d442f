"""Max pooling in its faster form is max pooling to the last bit; windows that see nothing are refused."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

import clipwise as cw
from clipwise.engine import pooling
from clipwise.errors import UnsupportedOp


def watched(patch):
    """Which shapes went the faster way."""
    found, real = [], pooling._Neighbours.apply
    patch.setattr(pooling._Neighbours, "apply", lambda x, w: found.append(x.shape) or real(x, w))
    return found


@pytest.fixture
def taken(monkeypatch):
    return watched(monkeypatch)


def bits(x):
    return x.contiguous().view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def both(x, *args, **kwargs):
    """What torch gives, and what we do: value and gradient."""
    found = []
    for pool in (F.max_pool2d, pooling.max_pool2d):
        given = x.clone(memory_format=torch.preserve_format).requires_grad_()
        out = pool(given, *args, **kwargs)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        found.append((out, *torch.autograd.grad(out, given, upstream)))
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
    for odd, share in ((float("nan"), 0.05), (float("inf"), 0.1), (-float("inf"), 0.2), (-0.0, 0.4)):
        x = torch.where((special < share) & (special > share / 2), odd, x)
    window = (kernel, stride, tuple(k // 2 for k in kernel) if padded else 0, dilation, ceil)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooling, "_MANY", 0)
        taken = watched(patch)
        for plain, quick in both(x, *window):
            assert plain.stride() == quick.stride()
            assert torch.equal(plain.isnan(), quick.isnan())
            assert torch.equal(bits(plain.nan_to_num(7.0)), bits(quick.nan_to_num(7.0)))
        wide = stride is None or all(k >= s for k, s in zip(kernel, np.broadcast_to(stride, 2), strict=True))
        assert len(taken) == (size[1] >= 8 and wide)


KINDS = {
    "no batch": lambda x: x[0],
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "bfloat16": lambda x: x.bfloat16(),
    "transposed": lambda x: x.mT,
    "few channels": lambda x: x[:, :7].contiguous(),
    "few numbers": lambda x: x[:1].contiguous(),
    "a type of its own": lambda x: x.as_subclass(Own),
}


class Own(Tensor):
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_faster_form_stays_as_it_is(kind, taken):
    for plain, quick in both(KINDS[kind](torch.randn(9, 16, 8, 8)), 2):
        assert torch.equal(plain, quick)
        assert plain.stride() == quick.stride()
        assert type(plain) is type(quick)
    assert not taken


ARGUMENTS = {
    "by name": ((), {"kernel_size": 2, "stride": 1, "ceil_mode": True}),
    "numpy's integer": ((np.int64(2),), {}),
    "a tensor": ((torch.tensor(2),), {}),
    "one number in a list": (([2],), {}),
    "no size": ((), {}),
    "a truth": ((True,), {}),
    "three sizes": (((2, 2, 2),), {}),
    "too much padding": ((2, 2, 2), {}),
    "a word": (("2",), {}),
    "a name that is none": ((2,), {"size": 3}),
    "ceil_mode is a number": ((2,), {"ceil_mode": 1}),
    "the places too": ((2,), {"return_indices": True}),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_are_taken_or_refused_as_torch_does(kind, taken):
    (args, kwargs), x = ARGUMENTS[kind], torch.randn(9, 16, 8, 8)
    try:
        plain = F.max_pool2d(x, *args, **kwargs)
    except Exception as error:
        with pytest.raises(type(error)):
            pooling.max_pool2d(x, *args, **kwargs)
        return
    quick = pooling.max_pool2d(x, *args, **kwargs)
    for a, b in zip(plain, quick, strict=True) if isinstance(plain, tuple) else [(plain, quick)]:
        assert torch.equal(a, b)
    assert len(taken) == (kind in ("by name", "one number in a list"))


def test_second_derivatives(taken):
    def penalty(pool):
        w = torch.full((), 1.5, requires_grad=True)
        a = torch.randn(9, 16, 8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out = pool(a * w, 2)
        (g,) = torch.autograd.grad(out.square().sum(), a, create_graph=True)
        return torch.autograd.grad(out.sum() + g.square().sum(), w)[0]

    assert penalty(pooling.max_pool2d) == penalty(F.max_pool2d)
    assert taken


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_torch_func_and_forward_derivatives(taken):
    x, ours = torch.randn(3, 9, 16, 8, 8), pooling.max_pool2d
    pool = lambda v: ours(v, 2)  # noqa: E731
    plain = F.max_pool2d(x.flatten(0, 1), 2).unflatten(0, (3, 9))
    assert torch.equal(torch.func.vmap(pool)(x), plain)
    assert torch.equal(torch.func.jvp(pool, (x[0],), (torch.ones_like(x[0]),))[0], plain[0])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x[0], x[1])
        tangents = [forward_ad.unpack_dual(f(dual, 2)).tangent for f in (ours, F.max_pool2d)]
    assert torch.equal(*tangents)
    assert not taken


class Average(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return F.avg_pool2d(*args[:2]) if func is F.max_pool2d else func(*args, **(kwargs or {}))


def test_a_mode_of_the_users_has_its_say(taken):
    """Around the run or within the model: what it makes of max pooling is what counts."""
    model, x = nn.Conv2d(1, 16, 1), torch.randn(9, 1, 8, 8)

    def loss(m, x):
        return F.max_pool2d(m(x), 2).square().flatten(1).sum(1)

    with Average():
        outer = cw.clipped_sum(model, loss, x).norms

    def within(m, x):
        with Average():
            return loss(m, x)

    plain = cw.clipped_sum(model, lambda m, x: F.avg_pool2d(m(x), 2).square().flatten(1).sum(1), x).norms
    assert torch.equal(outer, plain)
    assert torch.equal(cw.clipped_sum(model, within, x).norms, plain)
    assert not taken


def test_what_changes_in_place(taken):
    x = torch.randn(9, 16, 8, 8, requires_grad=True)
    h = x * 1.0
    pooling.max_pool2d(h, 2).mul_(2.0).sum().backward()
    assert x.grad.sum() == 2.0 * 9 * 16 * 16
    out = pooling.max_pool2d(h, 2)
    h.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    assert len(taken) == 2


def test_the_tape_takes_the_faster_form(taken, monkeypatch):
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(8 * 25, 2))
    x, y = torch.randn(40, 1, 8, 8), torch.randint(0, 2, (40,))

    def sums():
        found = cw.clipped_sum(model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), (x, y))
        return found.grads.values()

    quick = sums()
    assert taken == [(40, 8, 6, 6)]
    monkeypatch.setattr(pooling, "OPS", ())
    for a, b in zip(quick, sums(), strict=True):
        assert torch.equal(a, b)
    assert len(taken) == 1


POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
SIDES, KERNELS, STRIDES, PADDINGS, DILATIONS = (1, 2, 3), (1, 2, 3), (1, 2), (0, 1, 2), (1, 2, 3, 5)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_windows_that_see_nothing_are_refused_and_no_others(dims):
    found, name = [], f"max_pool{dims}d"
    for side, *window in product(SIDES, KERNELS, STRIDES, PADDINGS, DILATIONS, (False, True)):
        image = torch.zeros(1, 1, *(side,) * dims)
        try:
            out = POOLS[dims](image, *window)
        except RuntimeError:  # no window of torch's
            continue
        empty = bool((out != 0).any())  # -inf
        with pytest.raises(UnsupportedOp) if empty else nullcontext():
            pooling.check_window(name, (image, *window[:3]), {"dilation": window[3]})
        found.append(empty)
    assert any(found)
    assert not all(found)


def test_axes_are_looked_at_one_by_one():
    x = torch.zeros(2, 3, 32, 1)
    pooling.check_window("max_pool2d", (x, (3, 1)), {"dilation": (2, 1)})
    pooling.check_window("max_pool2d", (x, (3, 1)), {"dilation": 2})
    pooling.check_window("adaptive_max_pool2d", (x, 40), {})
    with pytest.raises(UnsupportedOp, match="dilation 3 and padding 1 along 1 places"):
        pooling.check_window("max_pool2d", (x, (3, 2), 1, (0, 1)), {"dilation": (1, 3)})


CALLS = {
    "module": lambda h: nn.MaxPool2d((1, 2), 1, (0, 1), (1, 3))(h),
    "the places too": lambda h: nn.MaxPool2d((1, 2), 1, (0, 1), (1, 3), return_indices=True)(h)[0],
    "F": lambda h: F.max_pool2d(h, (1, 2), 1, padding=(0, 1), dilation=(1, 3)),
    "F, the places too": lambda h: F.max_pool2d_with_indices(h, (1, 2), 1, (0, 1), (1, 3))[0],
    "torch": lambda h: torch.max_pool2d(h, (1, 2), 1, (0, 1), (1, 3)),
    "below": lambda h: torch._C._nn.max_pool2d_with_indices(h, (1, 2), 1, (0, 1), (1, 3))[0],
    "aten": lambda h: torch.ops.aten.max_pool2d(h, [1, 2], [1, 1], [0, 1], [1, 3]),
    "aten, one form": lambda h: torch.ops.aten.max_pool2d_with_indices.default(h, [1, 2], [1, 1], [0, 1], [1, 3])[0],
    "aten, by name": lambda h: torch.ops.aten.max_pool2d(
        self=h, kernel_size=[1, 2], stride=[1, 1], padding=[0, 1], dilation=[1, 3]
    ),
    "vmap": lambda h: torch.func.vmap(lambda r: F.max_pool2d(r, (1, 2), 1, (0, 1), (1, 3)))(h),
    "numpy's integers": lambda h: F.max_pool2d(h, (1, 2), 1, (0, np.int64(1)), (1, np.int64(3))),
}


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("call", CALLS)
def test_no_call_sends_a_gradient_to_another_image(call, engine):
    model = nn.Conv2d(1, 1, 1)
    with pytest.raises(UnsupportedOp, match="may see none of them"):
        cw.clipped_sum(model, lambda m, x: CALLS[call](m(x)).flatten(1).sum(1), torch.randn(3, 1, 1, 2), engine=engine)


def test_empty_images_and_too_few_axes_are_torchs_to_refuse():
    for image in (torch.zeros(1, 1, 0, 4), torch.zeros(4)):
        pooling.check_window("max_pool2d", (image, (1, 2), 1, (0, 1)), {"dilation": (1, 3)})


BAD = (torch.tensor([2, 2]), np.array([2, 2]), None, "2", [[2, 2]], [2, 2, 99], 0, (2, 0))


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
@pytest.mark.parametrize("dilation", BAD, ids=repr)
def test_bad_arguments_are_torchs_to_refuse(dilation, engine):
    model, x = nn.Conv2d(1, 1, 1), torch.randn(3, 1, 8, 8)

    def loss(m, x):
        return F.max_pool2d(m(x), 2, 1, 1, dilation).flatten(1).sum(1)

    with pytest.raises((TypeError, RuntimeError)) as plain:
        loss(model, x)
    with pytest.raises(type(plain.value)) as ours:
        cw.clipped_sum(model, loss, x, engine=engine)
    assert not isinstance(ours.value, UnsupportedOp)
