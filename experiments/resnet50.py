"""CIFAR-10 as a frozen ResNet-50 sees it: 2,048 features of each image, made by itself alone.

Keras' weights of ImageNet, as TensorFlow.js stores them (`python -m experiments data resnet50`): a list of names and
shapes, and the numbers in shards. Batch norm (eps 1e-3) is folded into the convolutions; the stride is in the first 1×1
convolution of a stage; images are BGR from 0 to 255 less a mean of ImageNet.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .datasets import Data, Part, find, load

SIDE = 64  # pixels to which the 32 of CIFAR-10 are enlarged
BLOCKS = {2: "abc", 3: "abcd", 4: "abcdef", 5: "abc"}
MEAN = (103.939, 116.779, 123.68)
Weights = dict[str, Tensor]


def read(folder: Path) -> Weights:
    """The arrays of a TensorFlow.js model, by name."""
    manifest = json.loads((folder / "model.json").read_text())["weightsManifest"][0]
    raw = b"".join((folder / path).read_bytes() for path in manifest["paths"])
    found, start = {}, 0
    for entry in manifest["weights"]:
        size = int(np.prod(entry["shape"]))
        array = np.frombuffer(raw, "<f4", size, start).reshape(entry["shape"])
        found[entry["name"]] = torch.from_numpy(array.copy())
        start += 4 * size
    if start != len(raw):
        raise ValueError(f"{folder}: {len(raw)} bytes for {start} that model.json names.")
    return found


def folded(weights: Weights, conv: str, norm: str) -> tuple[Tensor, Tensor]:
    """A convolution and the batch norm after it as one convolution: [out, in, h, w] and a bias."""
    gamma, beta, mean, variance = (weights[f"{norm}/{p}"] for p in ("gamma", "beta", "moving_mean", "moving_variance"))
    scale = gamma / (variance + 1e-3).sqrt()
    kernel = weights[f"{conv}/kernel"].permute(3, 2, 0, 1) * scale[:, None, None, None]
    return kernel.contiguous(memory_format=torch.channels_last), (weights[f"{conv}/bias"] - mean) * scale + beta


def network(weights: Weights) -> Callable[[Tensor], Tensor]:
    """[b, 3, h, w] → [b, features], the mean over all places."""
    names = ["conv1", *(n[: -len("/kernel")] for n in weights if n.startswith("res") and n.endswith("/kernel"))]
    parts = {n: folded(weights, n, "bn_conv1" if n == "conv1" else n.replace("res", "bn", 1)) for n in names}

    def apply(x: Tensor, name: str, stride: int = 1) -> Tensor:
        kernel, bias = parts[name]
        return F.conv2d(x, kernel, bias, stride, kernel.shape[2] // 2)

    def forward(x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(apply(x, "conv1", 2)), 3, 2, 1)
        for stage, blocks in BLOCKS.items():
            for block in blocks:
                name, first = f"res{stage}{block}_branch", block == "a"
                stride = 2 if first and stage > 2 else 1
                h = F.relu(apply(x, f"{name}2a", stride))
                h = apply(F.relu(apply(h, f"{name}2b")), f"{name}2c")
                x = F.relu(h + (apply(x, f"{name}1", stride) if first else x))
        return x.mean((2, 3))

    return forward


@torch.no_grad()
def features(images: Tensor, forward: Callable[[Tensor], Tensor], rows: int = 100) -> Tensor:
    """Of RGB images from 0 to 255."""
    found = []
    for part in images.split(rows):
        large = F.interpolate(part.float(), size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        given = large.flip(1) - torch.tensor(MEAN)[:, None, None]
        found.append(forward(given.contiguous(memory_format=torch.channels_last)))
    return torch.cat(found)


def cifar10() -> Data:
    """Features of all images, each of length 1; they are kept beside the images, since making them takes a while."""
    pixels, kept = load("cifar10"), find("cifar10", "test_lables.json") / f"resnet50_{SIDE}.pt"
    parts = torch.load(kept) if kept.exists() else _made(pixels, kept)
    train, test = (F.normalize(part) for part in parts)
    return Data((train, pixels.train[1]), (test, pixels.test[1]), pixels.classes)


def _made(pixels: Data, kept: Path) -> Part:
    forward = network(read(find("resnet50", "model.json")))
    mean, deviation = (torch.tensor(v)[:, None, None] for v in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))
    parts = tuple(features((part[0] * deviation + mean) * 255, forward) for part in (pixels.train, pixels.test))
    torch.save(parts, kept)
    return parts
