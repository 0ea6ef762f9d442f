"""Forms in which people run their models: autocast, channels last, half precision; against single examples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import clipwise as cw


def net(kind: str) -> nn.Module:
    if kind == "conv":
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 6, 3, stride=2), nn.Flatten(1),
            nn.Linear(6 * 3 * 3, 4),
        )  # fmt: skip
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(12, 16), layer, nn.Flatten(1), nn.Linear(16 * 5, 4))


DATA = {"conv": lambda: torch.randn(6, 3, 8, 8), "sequence": lambda: torch.randn(6, 5, 12)}


def losses(model, batch):
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")


def in_autocast(dtype):
    def loss_fn(model, batch):
        with torch.autocast("cpu", dtype):
            out = model(batch[0])
        return nn.functional.cross_entropy(out.float(), batch[1], reduction="none")

    return loss_fn


def by_hand(model, loss_fn, batch, clip_norm):
    """Plain autograd on one example at a time: norms, and the clipped sum in float64."""
    norms, total = [], None
    for i in range(len(batch[0])):
        loss = loss_fn(model, tuple(x[i : i + 1] for x in batch))[0]
        grads = [g.double() for g in torch.autograd.grad(loss, list(model.parameters()))]
        norms.append(float(torch.cat([g.flatten() for g in grads]).norm()))
        weight = min(1.0, clip_norm / norms[-1])
        total = (
            [weight * g for g in grads]
            if total is None
            else [a + weight * g for a, g in zip(total, grads, strict=True)]
        )
    return torch.tensor(norms, dtype=torch.float64), dict(zip(dict(model.named_parameters()), total, strict=True))


def compared(model, loss_fn, batch, near):
    clip_norm = 0.7
    norms, sums = by_hand(model, loss_fn, batch, clip_norm)
    found = cw.clipped_sum(model, loss_fn, batch, cw.Abadi(), clip_norm)
    assert ((found.norms / norms - 1).abs() <= near).all()
    length = float(torch.cat([v.flatten() for v in sums.values()]).norm())
    apart = float(torch.cat([(found.grads[n].double() - v).flatten() for n, v in sums.items()]).norm())
    assert apart <= near * length
    assert all(v.dtype == torch.float32 for v in found.grads.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", DATA)
def test_autocast_in_the_loss(kind, dtype):
    """A half-precision forward pass rounds with its batch, so single examples agree to some of its digits."""
    torch.manual_seed(0)
    near = 0.03 if dtype == torch.bfloat16 else 0.005
    compared(net(kind), in_autocast(dtype), (DATA[kind](), torch.randint(0, 4, (6,))), near)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_contribution_exceeds_the_sensitivity_under_autocast(dtype):
    torch.manual_seed(0)
    for kind in DATA:
        model, loss_fn = net(kind), in_autocast(dtype)
        for scale in (1e-2, 1.0, 30.0):
            batch = (DATA[kind]()[:1] * scale, torch.tensor([1]))
            found = cw.clipped_sum(model, loss_fn, batch, cw.AutoV(), 1.0)
            length = sum(float(v.double().square().sum()) for v in found.grads.values()) ** 0.5
            assert length <= found.sensitivity


def test_channels_last():
    torch.manual_seed(0)
    batch = (DATA["conv"](), torch.randint(0, 4, (6,)))
    for model_last in (False, True):
        model = net("conv")
        model = model.to(memory_format=torch.channels_last) if model_last else model
        last = (batch[0].contiguous(memory_format=torch.channels_last), batch[1])
        assert last[0].is_contiguous(memory_format=torch.channels_last)
        compared(model, losses, last, 1e-5)
        plain, turned = (cw.clipped_sum(model, losses, b, cw.PSAC()) for b in (batch, last))
        torch.testing.assert_close(plain.norms, turned.norms, rtol=1e-6, atol=0)


@pytest.mark.parametrize("form", ["autocast", "channels last"])
def test_a_run_in_each_form(form):
    """The preflight takes them too."""
    torch.manual_seed(0)
    model = net("conv")
    x, y = torch.randn(40, 3, 8, 8), torch.randint(0, 4, (40,))
    if form == "channels last":
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    loss_fn = in_autocast(torch.bfloat16) if form == "autocast" else losses
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.3, steps=3, expected_batch_size=12)
    training = cw.privatize(model, torch.optim.SGD(model.parameters(), 0.1), plan, loss_fn)
    for batch in training.batches((x, y)):
        training.step(batch)
    assert training.epsilon == plan.epsilon
