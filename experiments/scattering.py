"""Scattering features: a fixed, public transform of single images, so it costs no privacy.

    image ─► |· * ψ| (2 scales × 8 angles) ─► |· * ψ| at the coarser scale ─► every order blurred, every 4th pixel kept

Mallat 2012, with the Morlet filters of kymatio (J = 2, L = 8: 1 + 16 + 64 = 81 channels for each channel of the image);
all maps stay at full resolution until the end. Tramèr and Boneh 2021 use them under differential privacy.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SCALES, ANGLES = 2, 8
STRIDE = 2**SCALES


def _gabor(side: int, sigma: float, angle: float, frequency: float, slant: float) -> Tensor:
    """A Gaussian with an oscillation along `angle`, on a torus of side² pixels."""
    at = torch.arange(-2 * side, 3 * side, dtype=torch.float64)
    rows, columns = torch.meshgrid(at, at, indexing="ij")
    along, across = (
        rows * math.cos(angle) + columns * math.sin(angle),
        columns * math.cos(angle) - rows * math.sin(angle),
    )
    envelope = torch.exp(-(along.square() + (slant * across).square()) / (2 * sigma**2))
    values = torch.polar(envelope * slant / (2 * math.pi * sigma**2), frequency * along)
    return values.view(5, side, 5, side).sum(dim=(0, 2))


def _morlet(side: int, scale: int, angle: float) -> Tensor:
    """A Gabor filter less a Gaussian, so that its mean is 0."""
    sigma, frequency, slant = 0.8 * 2**scale, 0.75 * math.pi / 2**scale, 4 / ANGLES
    wave, blur = (_gabor(side, sigma, angle, f, slant) for f in (frequency, 0.0))
    return wave - wave.sum() / blur.sum() * blur


def filters(side: int) -> tuple[Tensor, Tensor]:
    """The wavelets [scale, angle, side, side] and the blur [side, side], in the Fourier domain, where they are real."""
    angles = [(ANGLES // 2 - 1 - k) * math.pi / ANGLES for k in range(ANGLES)]
    waves = torch.stack([torch.stack([_morlet(side, scale, a) for a in angles]) for scale in range(SCALES)])
    blur = _gabor(side, 0.8 * 2 ** (SCALES - 1), 0.0, 0.0, 1.0)
    return tuple(torch.fft.fft2(f).real.float() for f in (waves, blur))


def scattering(images: Tensor) -> Tensor:
    """[b, c, n, n] → [b, 81·c, n/4, n/4]; borders are mirrored.

    >>> scattering(torch.rand(2, 1, 28, 28)).shape
    torch.Size([2, 81, 7, 7])
    """
    b, side = len(images), images.shape[-1]
    padded = F.pad(images, (STRIDE,) * 4, mode="reflect").flatten(0, 1)
    waves, blur = (f.to(images.device) for f in filters(side + 2 * STRIDE))

    def filtered(x: Tensor, bank: Tensor) -> Tensor:
        found: Tensor = torch.fft.ifft2(torch.fft.fft2(x) * bank)
        return found

    first = filtered(padded[:, None, None], waves).abs()  # [bc, scale, angle, ·, ·]
    second = filtered(first[:, 0, :, None], waves[1]).abs()  # only finer, then coarser: the other order is nearly 0
    maps = torch.cat([padded[:, None], first.flatten(1, 2), second.flatten(1, 2)], dim=1)
    blurred = filtered(maps, blur).real[..., STRIDE:-STRIDE:STRIDE, STRIDE:-STRIDE:STRIDE]
    return blurred.reshape(b, -1, side // STRIDE, side // STRIDE)


def features(images: Tensor, groups: int, rows: int = 1_000) -> Tensor:
    """Scattering features, standardised within each example in `groups` of channels: no statistic of the data."""
    parts = [F.group_norm(scattering(part), groups) for part in images.split(rows)]
    return torch.cat(parts)
