"""The papers' models, written out: convolutional nets with group norm, a recurrent net, a linear probe."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def paper_cnn(channels: int = 1, classes: int = 10) -> nn.Sequential:
    """The 4-layer tanh CNN; with three input channels it has the 28,058 parameters of the DC-SGD paper.

    >>> sum(p.numel() for p in paper_cnn(3).parameters())
    28058
    """
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, 2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


class StandardisedConv(nn.Conv2d):
    """A convolution whose filters have mean 0 and variance 1 / fan-in."""

    def forward(self, x: Tensor) -> Tensor:
        """With standardised filters."""
        flat = self.weight.flatten(1)
        centred = flat - flat.mean(dim=1, keepdim=True)
        scale = (centred.square().sum(dim=1, keepdim=True) + 1e-8).rsqrt()
        return F.conv2d(x, (centred * scale).view_as(self.weight), self.bias, self.stride, self.padding)


def _conv(standardised: bool, given: int, made: int, stride: int = 1, kernel: int = 3) -> nn.Conv2d:
    kind = StandardisedConv if standardised else nn.Conv2d
    return kind(given, made, kernel, stride, padding=kernel // 2, bias=False)


class _Residual(nn.Module):
    def __init__(self, c: int, p: int, stride: int, groups: int, standardised: bool) -> None:
        super().__init__()
        self.a, self.b = _conv(standardised, c, p, stride=stride), _conv(standardised, p, p)
        self.norm_a, self.norm_b = nn.GroupNorm(groups, p), nn.GroupNorm(groups, p)
        self.skip = nn.Identity() if stride == 1 and c == p else _conv(standardised, c, p, stride=stride, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm_a(self.a(x)))
        return F.relu(self.norm_b(self.b(h)) + self.skip(x))


def _resnet(depths: tuple[int, ...], classes: int, standardised: bool) -> nn.Sequential:
    layers: list[nn.Module] = [_conv(standardised, 3, 64), nn.GroupNorm(32, 64), nn.ReLU()]
    width = 64
    for stage, depth in enumerate(depths):
        for block in range(depth):
            p, stride = 64 * 2**stage, 2 if stage and block == 0 else 1
            layers.append(_Residual(width, p, stride, 32, standardised))
            width = p
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def resnet18(classes: int = 10, standardised: bool = False) -> nn.Sequential:
    """For 32 pixels, with group norm."""
    return _resnet((2, 2, 2, 2), classes, standardised)


def resnet34(classes: int = 10, standardised: bool = False) -> nn.Sequential:
    """For 32 pixels, with group norm."""
    return _resnet((3, 4, 6, 3), classes, standardised)


class _Pair(nn.Module):
    """Two convolutions around which the input is added; `scaled` normalises the sum (arXiv 2203.00324)."""

    def __init__(self, width: int, groups: int, scaled: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*_mish(width, width, groups), *_mish(width, width, groups))
        self.scale = nn.GroupNorm(groups, width) if scaled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.scale(x + self.layers(x))
        return added


def _mish(c: int, p: int, groups: int) -> list[nn.Module]:
    return [nn.Conv2d(c, p, 3, padding=1, bias=False), nn.GroupNorm(min(groups, p), p), nn.Mish()]


def resnet9(
    classes: int = 10, width: int = 64, groups: int = 32, scaled: bool = False, places: int = 1
) -> nn.Sequential:
    """Eight convolutions and a linear layer, Mish and group norm: 2.4 million parameters.

    The linear layer sees the largest value of each channel, in the whole image or in each of `places`² parts of it.

    >>> round(sum(p.numel() for p in resnet9().parameters()) / 1e6, 1)
    2.4
    """
    w = width
    return nn.Sequential(
        *_mish(3, w, groups),
        *_mish(w, 2 * w, groups),
        nn.MaxPool2d(2),
        _Pair(2 * w, groups, scaled),
        *_mish(2 * w, 4 * w, groups),
        nn.MaxPool2d(2),
        *_mish(4 * w, 4 * w, groups),
        nn.MaxPool2d(2),
        _Pair(4 * w, groups, scaled),
        nn.AdaptiveMaxPool2d(places),
        nn.Flatten(),
        nn.Linear(4 * w * places**2, classes),
    )


class NamesLstm(nn.Module):
    """Letters in, a language out: two LSTM layers, and the state after the last letter, or after the padding."""

    def __init__(
        self, letters: int, classes: int, width: int = 128, one_hot: bool = False, padding: bool = False
    ) -> None:
        """`letters` counts the padding, 0; letters are embedded in 64 dimensions unless they stay one-hot."""
        super().__init__()
        self.letters, self.padding = letters, padding
        self.embed = None if one_hot else nn.Embedding(letters, 64)
        self.lstm = nn.LSTM(letters if one_hot else 64, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """[b, t] of numbers."""
        given = self.embed(x) if self.embed else F.one_hot(x, self.letters).to(self.head.weight.dtype)
        states, _ = self.lstm(given)
        if self.padding:
            out: Tensor = self.head(states[:, -1])
            return out
        last = (x != 0).sum(dim=1).clamp(min=1) - 1
        chosen = F.one_hot(last, x.shape[1]).to(states.dtype)[:, :, None]
        out = self.head((states * chosen).sum(dim=1))
        return out


def linear_probe(width: int, classes: int) -> nn.Linear:
    """On features that a frozen net has made."""
    probe = nn.Linear(width, classes)
    nn.init.zeros_(probe.weight)
    return probe


def flat_probe(width: int, classes: int) -> nn.Sequential:
    """A linear probe on all features of all places."""
    return nn.Sequential(nn.Flatten(), linear_probe(width, classes))


def small_cnn(channels: int, side: int, classes: int, width: int = 64) -> nn.Sequential:
    """Two convolutions and a linear layer, for the small maps of scattering features."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(width * (side // 2) ** 2, classes),
    )


def flipped_and_shifted(images: Tensor, copies: int, shift: int = 4, flip: bool = True, edges: bool = False) -> Tensor:
    """[b, c, h, w] → [b·copies, c, h, w]: each copy moved by up to `shift` pixels and perhaps mirrored, by chance.

    What moves in is 0, or with `edges` the border of the image once more.
    """
    many = images.repeat_interleave(copies, dim=0)
    n, _, h, w = many.shape
    padded = F.pad(many, (shift,) * 4, mode="replicate" if edges else "constant")
    row, column = (torch.randint(0, 2 * shift + 1, (n,), device=images.device) for _ in range(2))
    rows = row[:, None] + torch.arange(h, device=images.device)
    columns = column[:, None] + torch.arange(w, device=images.device)
    if flip:
        mirrored = torch.rand(n, device=images.device) < 0.5
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    padded = padded.gather(2, rows[:, None, :, None].expand(-1, many.shape[1], -1, padded.shape[3]))
    return padded.gather(3, columns[:, None, None, :].expand(-1, many.shape[1], h, -1))


def count(model: nn.Module) -> str:
    """Parameters, for people."""
    n = sum(p.numel() for p in model.parameters())
    return f"{n:,}" if n < 10**6 else f"{n / 10**6:.{max(0, 1 - int(math.log10(n / 10**6)))}f}M"
