"""Filters with one input channel: their gradient as one grouped convolution, against a loop over single examples."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import brute
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from ways import WAYS, by

import clipwise as cw
from clipwise.engine import contributions
from clipwise.engine.depthwise import depthwise_gradient
from clipwise.engine.static import static

pytestmark = pytest.mark.filterwarnings("ignore:Using padding=")
CASES = {
    "grey": (nn.Conv2d(1, 6, 5, 2, padding=1), (1, 12, 11)),
    "depthwise": (nn.Conv2d(4, 4, 3, padding=1, groups=4), (4, 7, 6)),
    "with a multiplier": (nn.Conv2d(3, 9, (3, 2), stride=(2, 3), groups=3), (3, 9, 10)),
    "dilated": (nn.Conv2d(2, 4, 3, dilation=2, stride=2, padding=2, groups=2), (2, 11, 12)),
    "padding same": (nn.Conv2d(2, 2, 4, padding="same", groups=2), (2, 6, 7)),
    "grey, dilated": (nn.Conv2d(1, 3, 4, dilation=2, padding="same"), (1, 10, 9)),
    "long sound": (nn.Conv1d(1, 5, 20, 3, padding=4), (1, 61)),
    "grey volume": (nn.Conv3d(1, 2, 3, 2), (1, 7, 6, 7)),
    "sound": (nn.Conv1d(1, 5, 7, 3), (1, 31)),
    "volume": (nn.Conv3d(2, 2, 2, 2, groups=2), (2, 5, 5, 4)),
    "transposed": (nn.ConvTranspose2d(4, 4, 3, 2, padding=1, output_padding=1, groups=4), (4, 4, 5)),
    "strides that leave something over": (nn.Conv2d(1, 2, 2, 3), (1, 7, 9)),
}


@pytest.fixture(params=WAYS, autouse=True, scope="module")
def way(request):
    """Both, where there is native code."""
    with by(request.param):
        yield request.param


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("as_compiled", [False, True])
def test_against_single_examples(name, copies, as_compiled):
    layer, shape = copy.deepcopy(CASES[name])
    torch.manual_seed(0)
    model = nn.Sequential(layer, nn.Tanh()).double()
    data = torch.randn(5, copies, *shape, dtype=torch.float64)

    def losses(m, x):
        return m(x.flatten(0, 1)).square().flatten(1).sum(1).view(len(x), -1).sum(1)

    with static() if as_compiled else nullcontext():  # a compiler is given patches of large filters
        out = cw.clipped_sum(model, losses, data, cw.Abadi(), 0.3)
    total, norms = brute.clipped(brute.gradients(model, losses, data), "Abadi", 0.3)
    assert torch.allclose(out.norms, norms, rtol=1e-10)
    assert brute.distance(dict(out.grads), total) <= 1e-10 * brute.norm(total)


@pytest.mark.parametrize("name", [n for n in CASES if n != "transposed"])
def test_an_examples_gradient_does_not_depend_on_how_many_others_there_are(name):
    """To the last bit, in float32: another kernel for another number of examples would round everybody otherwise."""
    layer, shape = copy.deepcopy(CASES[name])
    torch.manual_seed(0)
    x = torch.randn(70, *shape)
    with torch.no_grad():
        grad = torch.randn_like(layer(x))
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    if layer.padding == "same":
        pads = [(d * (k - 1) // 2, d * (k - 1) - d * (k - 1) // 2) for k, d in zip(kernel, dilation, strict=True)]
        x = F.pad(x, [n for pair in reversed(pads) for n in pair])
    elif any(layer.padding):
        x = F.pad(x, [n for n in reversed(layer.padding) for _ in (0, 1)])
    whole = depthwise_gradient(x, grad, kernel, stride, dilation)
    for size in (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 65):
        part = depthwise_gradient(x[:size], grad[:size], kernel, stride, dilation)
        assert torch.equal(part, whole[:size]), size


@pytest.mark.parametrize("as_compiled", [False, True])
def test_patches_come_a_few_examples_at_a_time_and_a_graph_has_few_parts(as_compiled, monkeypatch):
    monkeypatch.setattr(contributions, "_PART", (1, 1))
    made, real = [], contributions.Unfolded.parts
    monkeypatch.setattr(contributions.Unfolded, "parts", lambda use: made.append(list(real(use))) or iter(made[-1]))
    model, data = nn.Conv2d(2, 3, 4, padding=2).double(), torch.randn(19, 2, 7, 6, dtype=torch.float64)
    losses = lambda m, x: m(x).square().flatten(1).sum(1)  # noqa: E731
    with static() if as_compiled else nullcontext():
        out = cw.clipped_sum(model, losses, data, cw.Abadi(), 0.3)
    assert [len(parts) for parts in made] == [7 if as_compiled else 19]  # three examples each, or one
    total, norms = brute.clipped(brute.gradients(model, losses, data), "Abadi", 0.3)
    assert torch.allclose(out.norms, norms, rtol=1e-10)
    assert brute.distance(dict(out.grads), total) <= 1e-10 * brute.norm(total)


def test_a_bad_example_leaves_the_others_alone():
    model = nn.Sequential(nn.Conv2d(2, 2, 3, groups=2), nn.Flatten())
    x = torch.randn(6, 2, 5, 5)
    bad = x.clone()
    bad[2, 0, 1, 1], bad[4] = float("nan"), float("inf")
    losses = lambda m, b: m(b).square().sum(1)  # noqa: E731
    found, expected = (cw.clipped_sum(model, losses, b).grads for b in (bad, x[[0, 1, 3, 5]]))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
