"""chacha_cuda.py against chacha.py: the same numbers, wherever a tensor begins."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from clipwise import chacha, chacha_cuda

KEYS = [bytes(range(32)), bytes(range(1, 33))]


class Functions:
    """What the interpreter lacks of the device's library."""

    log = staticmethod(lambda u: tl.log(u))
    log1p = staticmethod(lambda u: tl.log(1.0 + u))
    cospi = staticmethod(lambda u: tl.cos(u * math.pi))
    sinpi = staticmethod(lambda u: tl.sin(u * math.pi))


def all_ones(self, type):
    """The interpreter's own fails for unsigned numbers."""
    return interpreter.TensorHandle(np.invert(np.zeros(1, dtype=interpreter._get_np_dtype(type))), type.scalar)


@pytest.mark.parametrize("offsets", [(0, 0, 0), (1, 2047, 4095), (3000, 6143, 0)])
def test_noise_by_its_address(offsets, monkeypatch):
    monkeypatch.setattr(chacha_cuda, "libdevice", Functions)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "get_all_ones_value", all_ones)
    values = [torch.zeros(5000), torch.ones(700), torch.zeros(3)]
    keys = [KEYS[0], KEYS[1], KEYS[0]]
    found = [v.clone() for v in values]
    chacha_cuda.add_gaussians_(found, keys, 2.0, offsets)
    for value, key, offset, noised in zip(values, keys, offsets, found, strict=True):
        truth = chacha.gaussians(key, 0, offset + len(value))[offset:].float()
        assert torch.allclose(noised - value, 2 * truth, atol=1e-5)


def test_small_numbers_have_all_their_digits(monkeypatch):
    """An angle in float32 as a whole would give multiples of 10⁻⁷ there, which tell what they were added to."""
    monkeypatch.setattr(chacha_cuda, "libdevice", Functions)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "get_all_ones_value", all_ones)
    found = torch.zeros(20_480)
    chacha_cuda.add_gaussians_([found], [KEYS[0]], 1.0, [0])
    truth = chacha.gaussians(KEYS[0], 0, len(found))
    radius = truth.reshape(-1, 2, chacha.LANES).norm(dim=1, keepdim=True).expand(-1, 2, -1).flatten()
    small = (truth.abs() < 1e-2) & (radius > 0.5)  # not the radius: the interpreter's log1p is not as good as a GPU's
    assert int(small.sum()) > 50
    assert float((found[small] / truth[small] - 1).abs().max()) < 1e-5
