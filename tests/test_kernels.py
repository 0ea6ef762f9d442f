"""The GPU kernels in Triton's interpreter: no GPU is needed to see that they add up."""

from __future__ import annotations

import pytest
from kernels import interpret, needs_triton


@needs_triton
@pytest.mark.parametrize("part", ["gram", "conv", "chacha", "rows", "ops"])
def test_kernels(part):
    interpret(part)
