"""Convolutions without patches: norms from the Gram matrix of the input, here with TF32's precision on a CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from clipwise.clipping import engine_gradients
from clipwise.engine import contributions, conv, cuda_ops, reduce, strips
from clipwise.engine.patches import PatchGrad
from clipwise.engine.products import cut
from clipwise.engine.reduce import DenseGrad, Path

WINDOWS = {  # images, height, width, channels, outputs, then the convolution
    "3×3": ((5, 8, 8, 16, 24), {"kernel_size": 3, "padding": 1}),
    "strides": ((4, 9, 7, 20, 70), {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}),
    "rows left over": ((4, 8, 6, 16, 8), {"kernel_size": (2, 3), "stride": 3}),
    "1×1, more outputs": ((3, 8, 8, 16, 40), {"kernel_size": 1, "stride": 2}),
    "same": ((6, 6, 6, 32, 16), {"kernel_size": 3, "padding": "same", "dilation": 2}),
}


@pytest.fixture(autouse=True)
def tf32(monkeypatch):
    """What a GPU says."""
    for module in (conv, contributions, reduce):
        monkeypatch.setattr(module, "precision_of", lambda left, right: "tf32")


def made(name, scale=1.0):
    (n, h, w, c, p), options = WINDOWS[name]
    torch.manual_seed(0)
    model = nn.Conv2d(c, p, bias=False, **options)
    return model, cut(scale * torch.randn(n, c, h, w)), {k: v for k, v in options.items() if k != "kernel_size"}


def losses(model, batch):
    return model(batch).square().flatten(1).sum(1)


def one_by_one(model, x, options):
    """Gradients of single examples in float64, of factors cut to TF32's bits."""
    grads = []
    for i in range(len(x)):
        weight = model.weight.detach().double().requires_grad_()
        left = cut(2 * model(x[i : i + 1]).detach()).double()
        right = F.conv2d(x[i : i + 1].double(), weight, **options)
        grads.append(torch.autograd.grad((right * left).sum(), weight)[0])
    return torch.stack(grads)


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
@pytest.mark.parametrize("name", WINDOWS)
def test_norms_and_sums_against_single_examples(name, scale):
    model, x, options = made(name, scale)
    truth = one_by_one(model, x, options)
    exact = truth.flatten(1).norm(dim=1)
    for form, kind in (("outer", PatchGrad), ("dense", DenseGrad)):
        found = engine_gradients(model, losses, x, len(x), paths={"weight": Path(form, False)})
        assert isinstance(found.reduced["weight"], kind)
        norms = found.norms([["weight"]])[:, 0]
        assert (norms >= exact * (1 - 1e-6 * (form == "dense"))).all()
        assert (norms <= exact * 1.02).all()
        weights = torch.rand(len(x), 1)
        total = found.weighted_sum(weights, torch.ones(len(x), dtype=torch.bool), [["weight"]])["weight"]
        expected = (truth * weights[:, :, None, None, None]).sum(0)
        assert (total - expected).norm() <= 2e-3 * expected.norm()
        assert total.norm() <= (weights[:, 0] * norms).sum()


def test_an_example_that_is_not_finite_takes_part_in_nothing():
    model, x, options = made("3×3")
    x[1, 0, 3, 3] = float("nan")
    found = engine_gradients(model, losses, x, len(x), paths={"weight": Path("outer", False)})
    norms = found.norms([["weight"]])[:, 0]
    assert norms.isnan().tolist() == [i == 1 for i in range(len(x))]
    keep, weights = ~norms.isnan(), torch.ones(len(x), 1)
    total = found.weighted_sum(weights, keep, [["weight"]])["weight"]
    expected = one_by_one(model, x, options)[keep].sum(0)
    assert (total - expected).norm() <= 2e-3 * expected.norm()


def test_the_norm_does_not_depend_on_the_others():
    model, x, _ = made("3×3")
    paths = {"weight": Path("outer", False)}
    alone = torch.cat([engine_gradients(model, losses, row[None], 1, paths=paths).norms([["weight"]]) for row in x])
    together = engine_gradients(model, losses, x, len(x), paths=paths).norms([["weight"]])
    assert torch.allclose(alone, together, rtol=1e-6)


def test_ways_are_chosen_by_shapes():
    """Early layers of a network have many positions and few channels; late ones the other way round."""
    for side, channels, form in ((32, 64, "dense"), (4, 128, "outer")):
        model, paths = nn.Conv2d(channels, channels, 3, padding=1, bias=False), {}
        engine_gradients(model, losses, torch.randn(2, channels, side, side), 2, paths=paths)
        assert paths["weight"].form == form


def test_copies_of_an_example_count_as_one():
    model, _, _ = made("3×3")
    x = torch.randn(4, 2, 16, 8, 8)

    def both(m, batch):
        return losses(m, batch.flatten(0, 1)).view(-1, 2).sum(1)

    found = engine_gradients(model, both, x, 4, paths={"weight": Path("outer", False)})
    assert isinstance(found.reduced["weight"], DenseGrad)
    for row, norm in zip(x, found.norms([["weight"]])[:, 0], strict=True):
        alone = torch.autograd.grad(both(model, row[None]).sum(), model.weight)[0]
        assert torch.allclose(alone.double().norm(), norm, rtol=2e-3)


@pytest.mark.parametrize(("c", "p", "k"), [(20, 24, 1), (17, 18, 1), (17, 160, 3), (16, 8, 3)])
@pytest.mark.parametrize("weight", [1.0, 0.7129, 1.9999])
def test_the_bound_covers_the_factor_that_takes_the_weights(c, p, k, weight):
    """The gradient at the output does, whichever factor is smaller; alike entries are all cut the same way."""
    model, x = nn.Conv2d(c, p, k, bias=False), torch.full((2, c, 6, 6), 1.0039)
    for data in (x, torch.randn_like(x)):
        found = engine_gradients(model, losses, data, 2, paths={"weight": Path("outer", False)})
        keep = torch.tensor([True, False])
        total = found.reduced["weight"].weighted_sum(torch.full((2,), weight), keep)
        assert float(total.double().norm()) <= weight * float(found.norms([["weight"]])[0, 0])


@pytest.mark.parametrize("part", [1, 3000])
@pytest.mark.parametrize("name", WINDOWS)
def test_strips_of_a_few_images_at_a_time(name, part, monkeypatch):
    model, x, _ = made(name)
    whole = engine_gradients(model, losses, x, len(x), paths={"weight": Path("dense", False)})
    monkeypatch.setattr(strips, "_PART", part)
    monkeypatch.setitem(cuda_ops.ROWS, "tf32", 24)
    weights, keep = torch.rand(len(x)), torch.arange(len(x)) != 1
    for form in ("outer", "dense"):
        found = engine_gradients(model, losses, x, len(x), paths={"weight": Path(form, False)})
        sums = [g.reduced["weight"].weighted_sum(weights, keep) for g in (found, whole)]
        torch.testing.assert_close(*sums, rtol=2e-3, atol=2e-3 * float(sums[1].abs().max()))


def test_factors_of_derived_weights_are_cut_as_well():
    """A weight norm's gradient is made first and then pushed back: of the same numbers as any other."""
    seen = []
    real = contributions._alike
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contributions, "is_native", lambda x: False)
        patch.setattr(contributions, "_alike", lambda a, b, *rest: seen.extend((a, b)) or real(a, b, *rest))
        model = nn.utils.parametrizations.weight_norm(nn.Linear(12, 7, bias=False))
        engine_gradients(model, lambda m, b: m(b).square().sum((1, 2)), torch.randn(3, 5, 12), 3)
    assert seen
    assert all(torch.equal(cut(x), x) for x in seen)
