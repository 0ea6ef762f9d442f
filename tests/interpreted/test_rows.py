"""kernels_rows.py against the same by torch."""

from __future__ import annotations

import pytest
import torch

from clipwise.engine import cuda_ops
from clipwise.engine.kernels_rows import move_rows, squares, weigh, weighted_rows
from clipwise.engine.products import cut, weighted_product

DROPPED = torch.tensor([0, 1, 0, 0, 1, 0]).bool()


def apart(x):
    """The same numbers as a column of a matrix: what per-layer clipping gives."""
    return torch.stack([~x if x.dtype == torch.bool else x + 5, x], dim=1)[:, 1]


ROWS = DROPPED.repeat_interleave(10)


@pytest.mark.parametrize("wide", [0, 8])
@pytest.mark.parametrize("width", [70, 600])
def test_rows_are_put_aside_and_back(wide, width):
    x = torch.randn(60, width + wide)[:, :width]
    before, spare = x.clone(), torch.full((60, width), 9.0)
    move_rows(x, spare, DROPPED, back=False)
    assert not x[ROWS].any()
    assert torch.equal(x[~ROWS], before[~ROWS])
    move_rows(x, spare, DROPPED, back=True)
    assert torch.equal(x, before)


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("wide", [0, 8])
def test_a_factor_takes_its_weights(cuts, wide):
    x, hidden = torch.randn(60, 300 + wide)[:, :300], torch.randn(60, 40 + wide)[:, :40]
    x[ROWS], hidden[ROWS], x[33, 7] = float("nan"), float("inf"), float("nan")  # row 33 is kept: its NaN is seen
    before, spare, weights = hidden.clone(), torch.empty(60, 40), torch.rand(6)
    found = weigh(x, apart(weights), apart(DROPPED), hidden, spare, cuts)
    truth = x * weights.repeat_interleave(10)[:, None]
    truth[ROWS] = 0
    assert torch.equal(found.nan_to_num(7.0), (cut(truth) if cuts else truth).nan_to_num(7.0))
    assert int(found.isnan().sum()) == 1
    assert not hidden[ROWS].any()
    assert torch.equal(hidden[~ROWS], before[~ROWS])
    move_rows(hidden, spare, apart(DROPPED), back=True)
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("weigh_left", [False, True])
@pytest.mark.parametrize("sides", [(20, 70), (70, 20), (70, 70)])
def test_weighted_products_in_parts(monkeypatch, sides, weigh_left):
    """Parts of 32 columns, and of 25 rows or two examples."""
    monkeypatch.setattr(cuda_ops, "_SPARE", 32)
    monkeypatch.setitem(cuda_ops.ROWS, "exact", 25 if weigh_left else 2**13)
    monkeypatch.setattr(cuda_ops, "_EXAMPLES", 2**11 if weigh_left else 2)
    left, right = (torch.randn(60, k) for k in sides)
    weights, keep = torch.rand(6), ~DROPPED
    rows = (weights * keep).repeat_interleave(10)[:, None]
    truth = (left * rows).double().mT @ right.double()
    left[ROWS], right[ROWS] = float("nan"), float("inf")
    before = left.clone(), right.clone()
    found = weighted_product(left, right, apart(weights), apart(keep), weigh_left, "exact")
    assert torch.allclose(found.double(), truth, atol=1e-5)
    assert torch.equal(left.nan_to_num(9.0), before[0].nan_to_num(9.0))
    assert torch.equal(right, before[1])


@pytest.mark.parametrize("width", [1, 130, 9000])
def test_gradients_in_rows(width):
    x, weights, keep = torch.randn(37, width), torch.rand(37), torch.arange(37) % 5 != 3
    assert torch.allclose(squares(x, 128), x.double().square().sum(1), rtol=1e-5)
    truth = (weights * keep).double() @ x.double()
    x[~keep] = float("nan")
    assert torch.allclose(weighted_rows(x, apart(weights), apart(keep)).double(), truth, atol=1e-5)
    assert squares(x, 128).isnan().equal(~keep)


@pytest.mark.parametrize("weigh_left", [False, True])
def test_factors_of_one_column_or_one_row(weigh_left):
    """Strides of an axis of one entry may be anything."""
    weights, keep = torch.rand(6), ~DROPPED
    column, wide = torch.randn(1, 60).T, torch.randn(60, 5)
    truth = (column * (weights * keep).repeat_interleave(10)[:, None]).mT @ wide
    for left, right, expected in ((column, wide, truth), (wide, column, truth.mT)):
        assert torch.allclose(weighted_product(left, right, weights, keep, weigh_left, "exact"), expected, atol=1e-5)
    row = torch.arange(9.0).as_strided((1, 5), (1, 1))
    found = weighted_product(row, row, torch.ones(1), torch.ones(1, dtype=torch.bool), weigh_left, "exact")
    assert torch.equal(found, row.mT @ row)
