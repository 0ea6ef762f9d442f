"""Frozen features of a ResNet-50, on small weights in the same layout."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments import datasets, recipes, resnet50


def shapes(width: int = 4) -> dict[str, tuple[int, ...]]:
    """Of every array, with `width` channels where the real one has 64."""
    found = {"conv1": (7, 7, 3, width)}
    given = width
    for stage, blocks in resnet50.BLOCKS.items():
        inner = width * 2 ** (stage - 2)
        for block in blocks:
            name = f"res{stage}{block}_branch"
            found |= {f"{name}2a": (1, 1, given, inner), f"{name}2b": (3, 3, inner, inner)}
            found[f"{name}2c"] = (1, 1, inner, 4 * inner)
            if block == "a":
                found[f"{name}1"] = (1, 1, given, 4 * inner)
            given = 4 * inner
    every = {}
    for name, shape in found.items():
        every |= {f"{name}/kernel": shape, f"{name}/bias": shape[-1:]}
        norm = "bn_conv1" if name == "conv1" else name.replace("res", "bn", 1)
        every |= {f"{norm}/{part}": shape[-1:] for part in ("gamma", "beta", "moving_mean", "moving_variance")}
    return every


@pytest.fixture
def weights(made):
    """In the layout of TensorFlow.js, in two shards."""
    rng, folder = np.random.default_rng(0), made / "resnet50"
    folder.mkdir()
    arrays = {name: rng.uniform(0.5, 1.0, shape).astype("<f4") / shape[0] for name, shape in shapes().items()}
    raw = b"".join(a.tobytes() for a in arrays.values())
    for k, part in enumerate((raw[:1000], raw[1000:])):
        (folder / f"{k}.bin").write_bytes(part)
    listed = [{"name": name, "shape": list(a.shape), "dtype": "float32"} for name, a in arrays.items()]
    manifest = {"weightsManifest": [{"paths": ["0.bin", "1.bin"], "weights": listed}]}
    (folder / "model.json").write_text(json.dumps(manifest))
    return folder


def test_weights_are_read_in_order_and_a_missing_byte_is_noticed(weights):
    found = resnet50.read(weights)
    assert {name: tuple(v.shape) for name, v in found.items()} == shapes()
    (weights / "1.bin").write_bytes((weights / "1.bin").read_bytes() + b"0000")
    with pytest.raises(ValueError, match="bytes for"):
        resnet50.read(weights)


def test_a_folded_convolution_is_a_convolution_and_a_batch_norm(weights):
    found = resnet50.read(weights)
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    plain = F.conv2d(x, found["res2a_branch2b/kernel"].permute(3, 2, 0, 1), found["res2a_branch2b/bias"], padding=1)
    gamma, beta, mean, variance = (
        found[f"bn2a_branch2b/{p}"] for p in ("gamma", "beta", "moving_mean", "moving_variance")
    )
    wanted = F.batch_norm(plain, mean, variance, gamma, beta, eps=1e-3)
    kernel, bias = resnet50.folded(found, "res2a_branch2b", "bn2a_branch2b")
    assert torch.allclose(F.conv2d(x, kernel, bias, padding=1), wanted, atol=1e-5)


def test_features_are_made_once_and_trained_on(weights, made, tmp_path):
    data = datasets.load("cifar10_resnet50")
    assert data.train[0].shape == (20, 4 * 4 * 8)
    assert (weights / "cifar10_64.pt").exists()
    (weights / "model.json").write_text("{}")  # not read again
    assert torch.equal(datasets.load("cifar10_resnet50").train[0], data.train[0])
    recipe = recipes.RECIPES["cifar10_features"].changed({"epochs": 1, "batch_size": 10, "epsilon": 50.0})
    assert 0 <= recipes.run_one(recipe, "psac", 0)["accuracy"] <= 1
