"""Norms from inner products of positions, strip by strip, against the gradient itself in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ways import WAYS, by

from clipwise.engine import gram as grams
from clipwise.engine.contributions import Outer
from clipwise.engine.products import cut, cut_once


@pytest.fixture(params=WAYS, autouse=True, scope="module")
def way(request):
    """Both, where there is native code."""
    with by(request.param):
        yield request.param


def factors(size, groups, t, p, d, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(size, groups, t, k, generator=generator, dtype=torch.float64) for k in (p, d))
    return left.to(dtype), right.to(dtype)


def truth(left, right):
    return torch.einsum("bgtp,bgtd->bgpd", left.double(), right.double()).square().sum((1, 2, 3)).sqrt()


@given(
    st.integers(1, 4), st.integers(1, 3), st.integers(0, 13), st.integers(1, 6), st.integers(1, 6), st.integers(1, 14)
)
def test_any_strips_give_the_norm(size, groups, t, p, d, strip):
    left, right = factors(size, groups, t, p, d)
    before, grams._STRIP = grams._STRIP, strip
    try:
        found = grams.gram(Outer(left, right), torch.float64, "exact")
    finally:
        grams._STRIP = before
    torch.testing.assert_close(found.bound().sqrt(), truth(left, right), rtol=1e-6, atol=1e-150)
    torch.testing.assert_close(found.left, left.norm(dim=3), rtol=1e-10, atol=1e-100)
    torch.testing.assert_close(found.right, right.norm(dim=3), rtol=1e-10, atol=1e-100)


@pytest.mark.parametrize("t", [127, 128, 129, 300])
def test_many_positions_that_cancel_are_never_taken_for_less(t):
    left, right = factors(3, 1, t, 24, 40, torch.float32)
    right[1, :, : t // 2] = 1e4 * right[1, :, :1]
    right[1, :, t // 2 : t // 2 * 2] = -right[1, :, : t // 2]
    left[1] = left[1, :, :1]
    found = grams.gram(Outer(left, right), torch.float32, "exact").bound().sqrt()
    assert bool((found >= truth(left, right)).all())
    assert bool((found[[0, 2]] <= 1.01 * truth(left, right)[[0, 2]]).all())


def test_a_bad_position_drops_its_example_alone():
    left, right = factors(3, 1, 200, 4, 5, torch.float32)
    left[1, 0, 150, 2] = torch.inf
    found = grams.gram(Outer(left, right), torch.float32, "exact").bound()
    assert found.isfinite().tolist() == [True, False, True]


def test_numbers_that_are_cut_from_one_use():
    """All patterns of bits: as `cut` has them, but that a NaN may become an infinity, which drops a record as well."""
    bits = torch.cat([torch.randint(-(2**31), 2**31, (100_000,)), torch.tensor([0x7F800001, 0x7FC00000, 0x7F800000])])
    x = bits.to(torch.int32).view(torch.float32)
    found, truth = cut_once(x), cut(x)
    assert torch.equal(found[~x.isnan()], truth[~x.isnan()])
    assert not found[x.isnan()].isfinite().any()
