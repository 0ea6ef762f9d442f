"""What a CUDA graph of the compiled step holds of a GPU's memory. Runs where there is one."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import clipwise as cw
from clipwise.clipping import clip, engine_gradients, trainable
from clipwise.engine.compiled import Compiled

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_a_step_that_is_dropped_gives_its_memory_back():
    model = nn.Sequential(nn.Linear(512, 1024), nn.Tanh(), nn.Linear(1024, 512)).cuda()
    groups, rule = cw.PSAC().groups(list(trainable(model))), cw.PSAC()
    batch, mask = torch.randn(32, 512, 512, device="cuda"), torch.ones(32, dtype=torch.bool)

    def loss(model, x):
        return model(x).square().mean((1, 2))

    def step(data, mask, scale):
        return clip(engine_gradients(model, loss, data, len(mask)), rule, scale, groups, mask)

    before = reserved()
    held = []
    for _ in range(3):
        whole = Compiled(model, step)
        whole(batch, mask, 1.0)
        held.append(reserved() - before)
        del whole
    left = reserved() - before
    assert min(held) > 2**26, "too small to be seen"
    assert left < min(held) / 2, f"{left / 2**20:.0f} MiB are left of {[round(h / 2**20) for h in held]}"
