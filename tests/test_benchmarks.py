"""What the GPU benchmark measures can be built and run: on the meta device, which computes nothing."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("gpu_benchmark", ROOT / "benchmarks/gpu.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("peers", "step"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("simple", [False, True])
def test_the_models_of_the_gpu_benchmark(gpu, simple):
    works = gpu.works("meta", simple)
    assert len(works) == 5
    for make in works.values():
        with torch.device("meta"):
            model, losses, batch = make()
        assert losses(model, batch).shape == batch[0].shape[:1]
