"""kernels_conv.py against single examples in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from clipwise.engine.contributions import Window
from clipwise.engine.gram import errors
from clipwise.engine.kernels_conv import inner_products, patch_bound, patch_products
from clipwise.engine.kernels_conv import strips as kernel
from clipwise.engine.patches import PatchGrad
from clipwise.engine.products import cut
from clipwise.engine.strips import Given, count, strips

CASES = {  # images, height, width, channels, outputs; kernel, stride, padding, dilation
    "3×3": ((5, 8, 8, 16, 24), ((3, 3), (1, 1), (1, 1), (1, 1))),
    "strides": ((4, 9, 7, 20, 70), ((3, 2), (2, 1), (1, 0), (1, 2))),
    "1×1": ((3, 8, 8, 32, 16), ((1, 1), (2, 2), (0, 0), (1, 1))),
    "many positions": ((3, 13, 11, 16, 17), ((3, 3), (1, 1), (1, 1), (1, 1))),
    "wide": ((3, 4, 4, 130, 130), ((2, 2), (2, 2), (0, 0), (1, 1))),
}


def made(name):
    (n, h, w, c, p), (kernel, stride, before, dilation) = CASES[name]
    torch.manual_seed(0)
    x, weight = torch.randn(n, c, h, w, dtype=torch.float64), torch.zeros(p, c, *kernel, dtype=torch.float64)
    out = F.conv2d(x, weight, None, stride, before, dilation)
    grad, truth = torch.randn_like(out), []
    for i in range(n):
        own = weight.clone().requires_grad_()
        alone = F.conv2d(x[i : i + 1], own, None, stride, before, dilation)
        truth.append(torch.autograd.grad((alone * grad[i : i + 1]).sum(), own)[0])
    window = Window(kernel, stride, before, dilation, tuple(out.shape[2:]))
    left, seen = grad.flatten(2).mT.float().contiguous(), x.movedim(1, -1).float().contiguous()
    return left, seen, window, torch.stack(truth)


def close(found, truth):
    return (found.double() - truth).abs().max() <= 1e-6 * truth.abs().max()


@pytest.mark.parametrize("name", CASES)
def test_one_gradient_per_example(name):
    left, x, window, truth = made(name)
    every = torch.ones(len(x), dtype=torch.bool)
    assert close(patch_products(left, x, every, *window, 1, False).movedim(-1, 2), truth)


@pytest.mark.parametrize("each", [2, 3, 100])
def test_sums_of_groups_without_dropped_images(each):
    left, x, window, truth = made("3×3")
    keep = torch.tensor([1, 0, 1, 1, 1]).bool()
    left[1], x[1] = float("nan"), float("inf")
    found = patch_products(left, x, keep, *window, each, True).movedim(-1, 2)
    truth = torch.stack([(part * k[:, None, None, None, None]).sum(0) for part, k in zip(
        truth.split(each), keep.double().split(each), strict=True
    )])  # fmt: skip
    assert close(found, truth)


@pytest.mark.parametrize("images_last", [False, True])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_strips(name, given, images_last):
    _, x, window, _ = made(name)
    x[0, 1, 2, 3] = float("nan")
    keep = torch.arange(len(x)) != 1
    more = Given(torch.rand(len(x), 3)[:, 1], torch.stack([~keep, keep], 1)[:, 1]) if given else None
    if given:
        x[1] = float("inf")
    found, truth = kernel(x, window, count(window), more, images_last), strips(x, window, more, images_last)
    assert found.shape == truth.shape
    assert torch.equal(found.nan_to_num(7.0), truth.nan_to_num(7.0))
    assert int(found.isnan().sum()) > 0


@pytest.mark.parametrize("shape", [(3, 5, 40), (2, 16, 16), (2, 70, 130), (1, 130, 7)])
@pytest.mark.parametrize("turned", [False, True])
def test_inner_products_of_cut_factors(shape, turned):
    x = torch.randn(*shape).mT.contiguous().mT if turned else torch.randn(shape[0], shape[1], shape[2] + 3)[:, :, 1:-2]
    x[0, 1, 2] = float("nan")
    truth = cut(x).double() @ cut(x).double().mT
    found = inner_products(x)
    assert torch.equal(found.isnan(), truth.isnan())
    assert close(found.nan_to_num(), truth.nan_to_num())


@pytest.mark.parametrize("name", CASES)
def test_bounds_of_norms(name):
    left, x, window, truth = made(name)
    x[1, 2, 2, 3], left[2] = float("nan"), 0.0
    sides = (left.shape[2], x.shape[3] * window.kernel[0] * window.kernel[1])
    found = patch_bound(left, x, *window, list(errors(sides, torch.float32, "tf32", weigh_left=True)))
    known = PatchGrad(left, x, window, (), "tf32").squared_norms()
    assert found.isnan().tolist() == [i == 1 for i in range(len(x))]
    torch.testing.assert_close(found, known, rtol=1e-5, atol=1e-30, equal_nan=True)
    kept = torch.tensor([i not in (1, 2) for i in range(len(x))])
    exact = truth.flatten(1).norm(dim=1)[kept]
    assert (found.sqrt()[kept] >= exact * (1 - 2e-3)).all()  # of cut factors
    assert (found.sqrt()[kept] <= exact * 1.02).all()
