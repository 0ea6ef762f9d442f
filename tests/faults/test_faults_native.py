"""Rows 2b, 3 and 8 where loops in C read and write memory by address."""

from __future__ import annotations

import pytest
import torch
from ways import by

import clipwise as cw
from clipwise import native


@pytest.fixture(autouse=True)
def _natively():
    with by("native"):
        yield


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("t", [1, 4, 70])
def test_03_what_torch_makes_by_default_changes_nothing(dtype, t):
    """C writes float32 to an address: whoever loads a model in half precision has another default for a while."""
    model, data = torch.nn.Linear(40, 30), torch.randn(3, t, 40)

    def sums():
        return cw.clipped_sum(model, lambda m, x: m(x).square().sum((1, 2)), data, cw.Abadi(), 1.0)

    known = sums()
    torch.set_default_dtype(dtype)
    try:
        found = sums()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found.norms, known.norms)
    assert all(torch.equal(found.grads[name], known.grads[name]) for name in known.grads)
    with torch.device("meta"):
        assert native.gram_sums(data[:, None], data[:, None])[0].device.type == "cpu"
        assert native.example_gradients(data[:, None], data[:, None])[0].device.type == "cpu"
        assert native.weighted_sum(data[:, None], data[:, None], data[:, 0, 0], data[:, 0, 0] > 0, True).is_cpu


def test_08_numbers_that_are_negated_when_they_are_read():
    z = torch.randn(4, 6, 5, dtype=torch.complex64)
    negated = z.conj().imag
    assert negated.is_neg()
    model = torch.nn.Linear(5, 3)
    both = [
        cw.clipped_sum(model, lambda m, x: m(x).square().sum((1, 2)), x, cw.Abadi(), 1e9).grads["weight"]
        for x in (negated, negated.clone().resolve_neg().contiguous())
    ]
    torch.testing.assert_close(*both)


def test_02b_rounding_of_a_long_sum_does_not_grow():
    """One record more is not to change how all the others round: rounded once, at the end."""
    left, right = torch.rand(2048, 1, 33, 40) + 0.5, torch.rand(2048, 1, 33, 50) + 0.5
    weights = torch.ones(2048)
    found = native.weighted_sum(left, right, weights, weights > 0, True)
    exact = torch.einsum("bgtp,bgtd->gpd", left.double(), right.double())
    assert float((found.double() - exact).norm() / exact.norm()) <= 2.0**-24
