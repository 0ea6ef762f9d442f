"""Random models: chains of random layers over vectors, sequences, images or tokens, with shared and tied weights."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """x + f(x), sometimes in place."""

    def __init__(self, inner: nn.Sequential, in_place: bool) -> None:
        super().__init__()
        self.inner, self.in_place = inner, in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            y = self.inner[0](x)  # a linear layer: what follows it would need its own output again
            y += x
            return self.inner[1:](y)
        return x + self.inner(x)


class Scale(nn.Module):
    """x·w + c, w broadcast over the last axis; sometimes 1 + w."""

    def __init__(self, width: int, plus_one: bool) -> None:
        super().__init__()
        self.w, self.c, self.plus_one = nn.Parameter(torch.randn(width)), nn.Parameter(torch.zeros(())), plus_one

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.w if self.plus_one else self.w) + self.c


class Twice(nn.Module):
    """One layer, used twice."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.inner(x).tanh())


class Attention(nn.Module):
    """Self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Recurrent(nn.Module):
    """GRU, LSTM or RNN over a sequence."""

    def __init__(self, width: int, kind: str, both: bool) -> None:
        super().__init__()
        self.inner = getattr(nn, kind)(width, width, batch_first=True, bidirectional=both)
        self.both = both

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)[0]
        return y.unflatten(-1, (2, -1)).sum(-2) if self.both else y


class OverTime(nn.Module):
    """A convolution along the sequence."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.inner = nn.Conv1d(width, width, kernel, padding="same")

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mT).mT


class TiedHead(nn.Module):
    """Tokens in, layers, and the same table out."""

    def __init__(self, words: int, width: int, middle: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.middle = middle

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.middle(self.table(ids)), self.table.weight)


def activation(r: random.Random) -> nn.Module:
    return r.choice([nn.Tanh, nn.GELU, nn.SiLU, lambda: nn.ReLU(inplace=True)])()


def vector_layer(r: random.Random, width: int) -> nn.Module:
    return r.choice([
        lambda: nn.Linear(width, width, bias=r.random() < 0.7),
        lambda: nn.LayerNorm(width),
        lambda: Scale(width, r.random() < 0.5),
        lambda: Twice(nn.Linear(width, width)),
        lambda: Residual(nn.Sequential(nn.Linear(width, width), activation(r)), r.random() < 0.5),
        lambda: nn.Sequential(nn.Linear(width, width), activation(r)),
    ])()  # fmt: skip


def sequence_layer(r: random.Random, width: int) -> nn.Module:
    return r.choice([
        lambda: vector_layer(r, width),
        lambda: nn.RMSNorm(width),
        lambda: Attention(width, r.choice([1, 2])),
        lambda: Recurrent(width, r.choice(["GRU", "LSTM", "RNN"]), r.random() < 0.3),
        lambda: OverTime(width, r.choice([1, 3])),
        lambda: Residual(nn.Sequential(Attention(width, 2)), r.random() < 0.5),
    ])()  # fmt: skip


def image_layer(r: random.Random, width: int) -> nn.Module:
    groups = r.choice([1, 1, 2, width])
    return r.choice([
        lambda: nn.Conv2d(width, width, r.choice([1, 3]), padding=1, groups=groups, bias=r.random() < 0.7),
        lambda: nn.Conv2d(width, width, 3, padding=2, dilation=2),
        lambda: nn.Conv2d(width, width, 3, stride=2, padding=1),
        lambda: nn.ConvTranspose2d(width, width, 3, stride=r.choice([1, 2]), padding=1, groups=groups),
        lambda: nn.GroupNorm(2, width),
        lambda: nn.InstanceNorm2d(width, affine=True),
        lambda: Twice(nn.Conv2d(width, width, 3, padding=1)),
        lambda: activation(r),
    ])()  # fmt: skip


def losses(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """One number per example, from whatever shape comes out."""
    flat = model(batch[0]).flatten(1)
    flat = flat if flat.dtype == torch.float64 else flat.float()
    return flat.logsumexp(1) + flat.square().mean(1)


def random_case(seed: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model and a batch of 2 to 5 examples for it, in float32."""
    r = random.Random(seed)
    torch.manual_seed(seed)
    kind, width = r.choice(["vector", "sequence", "image", "tokens"]), r.choice([2, 4, 6])
    depth, size = r.randint(1, 4), r.randint(2, 5)
    if kind == "vector":
        return nn.Sequential(*(vector_layer(r, width) for _ in range(depth))), (torch.randn(size, width),)
    if kind == "sequence":
        return nn.Sequential(*(sequence_layer(r, width) for _ in range(depth))), (
            torch.randn(size, r.randint(1, 9), width),
        )
    if kind == "image":
        model = nn.Sequential(*(image_layer(r, width) for _ in range(depth)), nn.Conv2d(width, width, 1))
        return model, (torch.randn(size, width, r.randint(4, 8), r.randint(4, 8)),)
    words = r.choice([5, 40])
    ids = torch.randint(0, words, (size, r.randint(1, 9)))
    middle = nn.Sequential(*(sequence_layer(r, width) for _ in range(depth)))
    if r.random() < 0.5:
        return TiedHead(words, width, middle), (ids,)
    table: Any = nn.Embedding(words, width, padding_idx=0 if r.random() < 0.3 else None)
    return nn.Sequential(table, middle), (ids,)
