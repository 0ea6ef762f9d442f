"""Frozen features of a ResNet-50, on small weights in the same layout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from experiments_data import resnet50_shapes

from experiments import datasets, recipes, resnet50


@pytest.fixture
def weights(made):
    return made / "resnet50"


def test_weights_are_read_in_order_and_a_missing_byte_is_noticed(weights):
    found = resnet50.read(weights)
    assert {name: tuple(v.shape) for name, v in found.items()} == resnet50_shapes()
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
    assert torch.allclose(data.train[0].norm(dim=1), torch.ones(20))
    assert (made / "cifar10" / "resnet50_64.pt").exists()
    (weights / "model.json").write_text("{}")  # not read again
    assert torch.equal(datasets.load("cifar10_resnet50").train[0], data.train[0])
    recipe = recipes.RECIPES["cifar10_features"].changed({"epochs": 1, "batch_size": 10, "epsilon": 50.0})
    assert 0 <= recipes.run_one(recipe, "psac", 0)["accuracy"] <= 1
