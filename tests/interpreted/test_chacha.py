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
