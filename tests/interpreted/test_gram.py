"""kernels_cuda.py against the same sums by torch. The interpreter knows float32 and no tensor cores."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clipwise.engine import kernels_cuda
from clipwise.engine.contributions import Outer
from clipwise.engine.gram import errors, gram
from clipwise.engine.kernels_cuda import column_sums, gram_bounds, norm_sums


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    monkeypatch.setattr(kernels_cuda, "_CHUNK", 1024)


def factors(b, g, t, p, d):
    torch.manual_seed(0)
    left, right = torch.randn(b, g, t, p), 0.1 * torch.randn(b, g, t, d)
    right[0, :, t // 2 :] = 0
    return left, right


@pytest.mark.parametrize("shape", [(3, 1, 200, 64, 40), (2, 2, 70, 16, 24), (2, 1, 130, 40, 1104), (1, 1, 9, 8, 8)])
def test_gram_sums_and_diagonals(shape):
    left, right = factors(*shape)
    sums, squares = kernels_cuda.gram(left, right, False)
    a, b = (torch.matmul(x, x.mT).double() for x in (left, right))
    truth = torch.stack([(a * b).sum((2, 3)), a.square().sum((2, 3)), b.square().sum((2, 3))]).flatten(1)
    assert torch.allclose(sums, truth, rtol=1e-5)
    assert torch.allclose(squares[0], left.square().sum(3), rtol=1e-5)
    assert torch.allclose(squares[1], right.square().sum(3), rtol=1e-5, atol=1e-12)


def test_rows_that_lie_apart():
    """Factors are read as they lie: padded rows are not."""
    left, right = factors(2, 1, 40, 24, 16)
    apart = torch.full((2, 1, 40, 32), float("nan"))
    apart[..., :24] = left
    found, _ = kernels_cuda.gram(apart[..., :24], right, False)
    assert torch.allclose(found, kernels_cuda.gram(left, right, False)[0])


def test_bounds_of_several_pairs():
    left, right = factors(3, 1, 200, 64, 40)
    pairs = [(left, right), (2 * left, right), (right, left), (left, left), (3 * left, -left), (left, left + 1)]
    ways = ["tf32", "tf32", "bfloat16", "tf32", "tf32", "bfloat16"]
    pairs += [(one[:, :, :50], other[:, :, :50]) for one, other in pairs[:2]]  # like neighbours share a launch
    ways += ways[:2]
    more, known = torch.rand(len(pairs), 3, 3, dtype=torch.float64), []
    for (one, other), way in zip(pairs, ways, strict=True):
        sides = (one.shape[3], other.shape[3])
        known += errors(sides, torch.float32, way, sides[0] <= sides[1])
    found = gram_bounds([a for a, _ in pairs], [b for _, b in pairs], more, [False] * len(pairs), known)
    for row, (one, other), way, added in zip(found, pairs, ways, more, strict=True):
        truth = gram(Outer(one, other), torch.float32, way).bound(tuple(added))
        assert torch.allclose(row, truth, rtol=1e-7)


def test_a_record_that_is_not_finite_has_no_bound_and_changes_no_other():
    left, right = factors(3, 1, 130, 16, 24)
    more = torch.zeros(1, 3, 3, dtype=torch.float64)
    known = list(errors((16, 24), torch.float32, "tf32", True))
    whole = gram_bounds([left], [right], more, [False], known)[0]
    left[1, 0, 7, 3] = float("nan")
    spoiled = gram_bounds([left], [right], more, [False], known)[0]
    assert spoiled.isnan().tolist() == [False, True, False]
    assert torch.equal(spoiled[[0, 2]], whole[[0, 2]])


def test_sums_over_positions():
    x = torch.randn(3, 50, 200)[..., :130]
    assert torch.allclose(column_sums(x), x.sum(1), atol=1e-4)
    grad, x = torch.randn(3, 45, 70), torch.randn(3, 45, 70) + 2
    _, mean, scale = torch.native_layer_norm(x, [70], None, None, 1e-5)
    found = norm_sums(grad, x, mean.reshape(3, 45).contiguous(), scale.reshape(3, 45).contiguous())
    assert torch.allclose(found[0], (grad * F.layer_norm(x, [70])).sum(1), atol=1e-4)
    assert torch.allclose(found[1], grad.sum(1), atol=1e-4)
