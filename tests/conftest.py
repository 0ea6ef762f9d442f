"""Shared settings of the tests."""

from __future__ import annotations

import os

os.environ.setdefault("DNNL_MAX_CPU_ISA", "AVX512_CORE")  # some CPUs announce AMX and then fault on it

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest_plugins = ["experiments_data"]  # the fixture `made`

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=60)
settings.load_profile("default")


@pytest.fixture(autouse=True)
def _as_at_the_start() -> None:
    """Nothing that another test has set. Tests run on two processes: more threads would only fight."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
