"""Every op rule × shape × rule against brute force, in float32 (1e-5) and float64 (1e-10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from brute import assert_matches
from torch import Tensor, nn
from ways import WAYS, by

import clipwise as cw

RULES = [cw.PSAC(), cw.AutoS(), cw.AutoV(), cw.Abadi(), cw.Reparam(), cw.Global()]
B = 4


@pytest.fixture(params=WAYS, autouse=True, scope="module")
def way(request):
    """Both, where there is native code."""
    with by(request.param):
        yield request.param


class Module(nn.Module):
    """A module from a dict of parameter shapes and a forward function."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor], **shapes: Any) -> None:
        super().__init__()
        self.function = forward
        generator = torch.Generator().manual_seed(3)
        for name, shape in shapes.items():
            if isinstance(shape, nn.Module):
                self.add_module(name, shape)
            else:
                self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def losses(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Each example's loss; the scale differs between examples."""
    out = model(batch[0]).flatten(1)
    return out.tanh().sum(1) + 0.1 * out.square().sum(1)


def one(kind: Any, *args: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: kind(*args, **options)


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(B, *shape, generator=torch.Generator().manual_seed(5))


def words(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 7, (B, *shape), generator=torch.Generator().manual_seed(5))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear 2-D": (one(nn.Linear, 5, 3), floats(5)),
    "linear 3-D": (one(nn.Linear, 5, 3), floats(6, 5)),
    "linear 4-D": (one(nn.Linear, 5, 3), floats(2, 3, 5)),
    "linear 3-D, wide": (one(nn.Linear, 40, 30), floats(4, 40)),
    "linear 3-D, long": (one(nn.Linear, 4, 3), floats(50, 4)),
    "linear without bias": (one(nn.Linear, 5, 3, bias=False), floats(6, 5)),
    "linear flattened": (
        lambda: Module(lambda m, x: m.l(x.reshape(-1, 5)).reshape(x.shape[0], -1), l=nn.Linear(5, 3)),
        floats(6, 5),
    ),
    "linear by keyword": (
        lambda: Module(lambda m, x: F.linear(weight=m.w, input=x, bias=m.b), w=(3, 5), b=(3,)),
        floats(6, 5),
    ),
    "conv1d": (one(nn.Conv1d, 3, 4, 3), floats(3, 9)),
    "conv1d same, even kernel, dilated": (one(nn.Conv1d, 3, 4, 4, padding="same", dilation=2), floats(3, 9)),
    "conv1d, one position": (one(nn.Conv1d, 3, 4, 9), floats(3, 9)),
    "conv2d": (one(nn.Conv2d, 2, 4, 3), floats(2, 6, 6)),
    "conv2d strided, padded": (one(nn.Conv2d, 2, 4, 3, stride=2, padding=1), floats(2, 7, 6)),
    "conv2d uneven": (one(nn.Conv2d, 2, 4, (3, 2), stride=(1, 2), padding=(2, 0), dilation=(1, 2)), floats(2, 7, 8)),
    "conv2d same": (one(nn.Conv2d, 2, 4, 3, padding="same"), floats(2, 6, 6)),
    "conv2d valid": (one(nn.Conv2d, 2, 4, 3, padding="valid"), floats(2, 6, 6)),
    "conv2d circular": (one(nn.Conv2d, 2, 4, 3, padding=1, padding_mode="circular"), floats(2, 6, 6)),
    "conv2d grouped": (one(nn.Conv2d, 4, 6, 3, groups=2), floats(4, 6, 6)),
    "conv2d depthwise": (one(nn.Conv2d, 4, 8, 3, groups=4, stride=2, padding=1), floats(4, 6, 6)),
    "conv2d few positions, wide": (one(nn.Conv2d, 16, 16, 3), floats(16, 4, 4)),
    "conv2d grouped, few positions": (one(nn.Conv2d, 16, 16, 3, groups=2), floats(16, 4, 4)),
    "conv2d on flattened frames": (
        lambda: Module(lambda m, x: m.c(x.flatten(0, 1)).reshape(len(x), -1), c=nn.Conv2d(2, 3, 3, groups=1)),
        floats(5, 2, 5, 5),
    ),
    "conv3d": (one(nn.Conv3d, 2, 3, 2, stride=(1, 2, 1), padding=(0, 1, 1)), floats(2, 4, 4, 4)),
    "conv3d dilated": (one(nn.Conv3d, 2, 4, 2, dilation=2, groups=2), floats(2, 4, 5, 4)),
    "embedding": (one(nn.Embedding, 7, 3), words(5)),
    "embedding of one word": (one(nn.Embedding, 7, 3), words()),
    "embedding 3-D": (one(nn.Embedding, 7, 3), words(2, 3)),
    "embedding with padding": (one(nn.Embedding, 7, 3, padding_idx=2), words(5)),
    "embedding with negative padding": (one(nn.Embedding, 7, 3, padding_idx=-3), words(5)),
    "embedding, torch.embedding": (lambda: Module(lambda m, x: torch.embedding(m.w, x), w=(7, 3)), words(5)),
    "layer_norm": (one(nn.LayerNorm, 6), floats(5, 6)),
    "layer_norm 2 axes": (one(nn.LayerNorm, (5, 6)), floats(3, 5, 6)),
    "layer_norm without bias": (one(nn.LayerNorm, 6, bias=False), floats(6)),
    "group_norm": (one(nn.GroupNorm, 2, 6), floats(6, 3, 3)),
    "group_norm 2-D": (one(nn.GroupNorm, 2, 6), floats(6)),
    "instance_norm": (one(nn.InstanceNorm2d, 3, affine=True), floats(3, 4, 4)),
    "instance_norm 1d": (one(nn.InstanceNorm1d, 3, affine=True), floats(3, 6)),
    "rms_norm": (one(nn.RMSNorm, 6), floats(5, 6)),
    "batch_norm in eval mode": (lambda: nn.BatchNorm2d(3).eval(), floats(3, 4, 4)),
    "matmul with a matrix": (lambda: Module(lambda m, x: x @ m.w, w=(5, 3)), floats(6, 5)),
    "matmul with a transposed matrix": (lambda: Module(lambda m, x: torch.matmul(x, m.w.T), w=(3, 5)), floats(6, 5)),
    "matmul with a vector": (lambda: Module(lambda m, x: x @ m.w, w=(5,)), floats(6, 5)),
    "matmul from the left": (lambda: Module(lambda m, x: m.w @ x, w=(3, 6)), floats(6, 5)),
    "matmul from the left, vector": (lambda: Module(lambda m, x: m.w @ x, w=(6,)), floats(6, 5)),
    "matmul with heads": (lambda: Module(lambda m, x: x @ m.w, w=(2, 5, 3)), floats(2, 6, 5)),
    "mm": (lambda: Module(lambda m, x: x.mm(m.w), w=(5, 3)), floats(5)),
    "addmm": (lambda: Module(lambda m, x: torch.addmm(m.b, x, m.w), b=(3,), w=(5, 3)), floats(5)),
    "addmm flattened": (
        lambda: Module(lambda m, x: torch.addmm(m.b, x.view(-1, 5), m.w).view(len(x), -1, 3), b=(3,), w=(5, 3)),
        floats(6, 5),
    ),
    "addmm scaled": (
        lambda: Module(lambda m, x: torch.addmm(m.b, x, m.w, beta=0.5, alpha=2.0), b=(3,), w=(5, 3)),
        floats(5),
    ),
    "add": (lambda: Module(lambda m, x: x + m.w, w=(5,)), floats(6, 5)),
    "add in place": (lambda: Module(lambda m, x: (2 * x).add_(m.w), w=(5,)), floats(6, 5)),
    "sub and rsub": (lambda: Module(lambda m, x: (x - m.w) * (m.v - x), w=(5,), v=(6, 1)), floats(6, 5)),
    "mul over one axis": (lambda: Module(lambda m, x: x * m.w, w=(1, 6, 1)), floats(6, 5)),
    "div": (lambda: Module(lambda m, x: x / (m.w**2 + 1) + m.v / (x**2 + 1), w=(5,), v=(5,)), floats(6, 5)),
    "scalar parameter": (lambda: Module(lambda m, x: x * m.w, w=()), floats(6, 5)),
    "where": (lambda: Module(lambda m, x: torch.where(x > 0, x, m.w * x), w=(5,)), floats(6, 5)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_op_matches_brute_force_under_every_rule(case, dtype):
    make, data = CASES[case]
    torch.manual_seed(7)
    model, x = make().to(dtype), data()
    x = x.to(dtype) if x.is_floating_point() else x
    for rule in RULES:
        assert_matches(model, losses, (x,), rule, clip_norm=0.7)


@pytest.mark.parametrize("case", CASES)
def test_vmap_reference_agrees(case):
    make, data = CASES[case]
    assert_matches(make().double(), losses, (double_(data()),), cw.PSAC(), engine="vmap")


def double_(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x


def test_per_layer_matches_brute_force():
    from brute import gradients, norm

    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.randn(B, 6, 5).double()
    rule = cw.PerLayer(cw.PSAC(), shares=(1.0, 2.0))
    out = cw.clipped_sum(model, losses, (x,), rule, clip_norm=0.7)
    grads = gradients(model, losses, (x,))
    for column, (share, layer) in enumerate(zip((1 / 5**0.5, 2 / 5**0.5), ("0", "2"), strict=True)):
        names = [f"{layer}.weight", f"{layer}.bias"]
        norms = torch.tensor([norm({n: g[n] for n in names}) for g in grads], dtype=torch.float64)
        torch.testing.assert_close(out.norms[:, column], norms, rtol=1e-10, atol=0)
        weights = 0.7 * share / (norms + 0.1 / (norms + 0.1))
        for n in names:
            expected = sum(w * g[n] for w, g in zip(weights, grads, strict=True))
            torch.testing.assert_close(out.grads[n], expected, rtol=1e-9, atol=1e-12)
    assert out.sensitivity == pytest.approx(0.7)


def test_a_wrong_op_rule_is_found():
    import dataclasses

    from clipwise.engine.ops import OP_RULES

    right = OP_RULES[F.linear]

    def wrong(call, grad):
        for name, use in right.uses(call, grad):
            yield name, cw.Dense(use.grad * 1.01) if name == "bias" else use

    with pytest.raises(AssertionError, match="bias"):
        cw.check_op_rule(
            F.linear, dataclasses.replace(right, uses=wrong), nn.Linear(3, 2), lambda m, x: m(x), torch.randn(4, 3)
        )
