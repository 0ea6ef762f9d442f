"""What finite arithmetic costs: δ beyond that of the ideal mechanism."""

from __future__ import annotations

import math

ROOM = 1e-6  # share of δ that plans leave to arithmetic: ε is computed at δ·(1 − ROOM)


def accounted(delta: float) -> float:
    """The δ at which ε is computed, so that δ itself covers the arithmetic too."""
    return delta * (1 - ROOM)


def tail_delta(*, reach: float, noise_multiplier: float, steps: int, dimension: int) -> float:
    """An upper bound of the δ that noise without draws beyond `reach`·σ adds over `steps` steps.

    Two neighbouring sums differ by v with ‖v‖ ≤ 1/σ, in units of the noise. What one can give and the other cannot has
    some coordinate within |v_j| of the end of the tail: probability at most Σ_j |v_j|·φ(reach − |v_j|), which is at
    most √d/σ·φ(reach − 1/σ). Both are divided by the probability that no coordinate would have gone beyond.

    >>> tail_delta(reach=12.2, noise_multiplier=1.0, steps=1000, dimension=10**6) < 1e-20
    True
    """
    if reach == math.inf:
        return 0.0
    shift = 1 / noise_multiplier
    if shift >= reach:
        return 1.0
    beyond = 2 * dimension * math.exp(-(reach**2) / 2) / (reach * math.sqrt(2 * math.pi))
    if beyond >= 0.5:
        return 1.0
    edge = math.sqrt(dimension) * shift * math.exp(-((reach - shift) ** 2) / 2) / math.sqrt(2 * math.pi)
    return min(1.0, steps * edge / (1 - beyond))
