"""Exact noise on a grid, against floating-point attacks. Pure functions of random words; nothing here draws.

Floating-point noise has gaps: which numbers can come out depends, in the last bits, on the value that it was added
to (Mironov 2012). Here the value is rounded to a grid Δ, the noise is an ideal Gaussian rounded to the same grid, and
their sum is exact. For a value on the grid, rounding after adding is the same as rounding the noise: so the result is
the ideal Gaussian mechanism followed by a rounding, and its privacy is that of the ideal one.

The rounded Gaussian is sampled by inversion. 64 random bits bound the ideal uniform number from both sides; where both
ends and the error of the floating-point quantile give one grid point, that is the answer; where they do not (one draw
in 10 million for 10⁴ parameters and σ = 1, one in 100,000 for 10⁸: the share grows with σ·√d), more bits are drawn and
the quantile is taken with as many digits as it needs, in milliseconds. No draw is approximate, and no tail is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

Words = np.ndarray[Any, np.dtype[np.uint64]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

FINENESS = 2**-12  # rounding the value adds this much, relatively, to its sensitivity: noise grows by 0.02%
_ERROR = 2.0**-44  # relative error allowed for the floating-point quantile, 80 times its documented one


def grid_for(sensitivity: float, dimension: int) -> tuple[float, float]:
    """The grid Δ, a power of two, and the sensitivity of the rounded value: S + √d·Δ ≤ S·(1 + FINENESS).

    Rounding moves each of d coordinates by at most Δ/2, in either of two neighbouring data sets.

    >>> grid_for(1.0, 4)
    (0.0001220703125, 1.000244140625)
    """
    root = math.sqrt(max(dimension, 1))
    step = 2.0 ** math.floor(math.log2(sensitivity * FINENESS / root))
    return step, sensitivity + root * step


def rounded_gaussians(words: Words, scale: float, more: Callable[[], int]) -> Floats:
    """round(scale·z) for ideal Gaussian z, one for each 64-bit word; `more()` gives 64 further random bits.

    >>> rounded_gaussians(np.array([2**63, 2**63 + 1], dtype=np.uint64), 1e6, lambda: 0)
    array([ 674490., -674490.])
    """
    from scipy.special import ndtri

    tail = words >> np.uint64(1)  # u = (tail + more bits)·2^-64 in (0, 1/2): the probability beyond |z|
    u = (tail.astype(np.float64) + 0.5) * 2.0**-64
    z = -ndtri(u)
    wanted = z * scale
    nearest = np.rint(wanted)
    doubt = scale * (_ERROR * (1 + z) + 1.26 * 2.0**-65 / u)  # the quantile's error, and what the missing bits can move
    for i in np.flatnonzero(0.5 - np.abs(wanted - nearest) <= doubt):
        nearest[i] = _exactly(int(tail[i]), scale, more)
    signed: Floats = np.where(words & np.uint64(1), -nearest, nearest)
    return signed


def _exactly(tail: int, scale: float, more: Callable[[], int]) -> float:
    """As above, for one number: bits are added until both ends of the interval round to the same integer."""
    import mpmath

    digits, bits = mpmath.MPContext(), 64  # a context of its own: threads share the global one
    while True:
        tail, bits = (tail << 64) | int(more()), bits + 64
        digits.prec = 2 * bits + 128
        tails = [digits.mpf(end) / digits.mpf(2) ** bits for end in (tail + 1, tail) if end]
        ends = [digits.nint(digits.sqrt(2) * digits.erfinv(1 - 2 * u) * digits.mpf(scale)) for u in tails]
        if len(ends) == 2 and ends[0] == ends[1]:
            return float(ends[0])
