"""What finite arithmetic costs: δ beyond that of the ideal mechanism."""

from __future__ import annotations

import math

ROOM = 1e-4  # share of δ that plans leave to arithmetic: ε is computed at δ·(1 − ROOM)


def accounted(delta: float) -> float:
    """The δ at which ε is computed, so that δ itself covers the arithmetic too."""
    return delta * (1 - ROOM)


def tail_delta(*, reach: float, noise_multiplier: float, steps: int, dimension: int) -> float:
    """An upper bound of the δ that noise without draws beyond `reach`·σ adds over `steps` releases.

    Two neighbouring sums differ by v with ‖v‖ ≤ 1/σ, in units of the noise. What one can give and the other cannot has
    some coordinate (or, by Box–Muller, some pair of coordinates) within |v_j| of the end of its tail. For pairs, whose
    radius has the density r·exp(−r²/2), that is at most Σ_j |v_j|·reach·exp(−(reach − |v_j|)²/2), which is at most
    √d/σ·reach·exp(−(reach − 1/σ)²/2); for single coordinates it is less. Conditioning on no draw beyond the end
    multiplies both sides by at most 1/(1 − its probability)^steps, which the second term covers.

    >>> tail_delta(reach=12.2, noise_multiplier=1.0, steps=1000, dimension=10**6) < 1e-19
    True
    """
    if reach == math.inf:
        return 0.0
    shift = 1 / noise_multiplier
    if shift >= reach:
        return 1.0
    beyond = dimension * math.exp(-(reach**2) / 2)
    if steps * beyond >= 0.1:
        return 1.0
    edge = math.sqrt(dimension) * shift * reach * math.exp(-((reach - shift) ** 2) / 2)
    return min(1.0, 2 * steps * (edge + beyond))
