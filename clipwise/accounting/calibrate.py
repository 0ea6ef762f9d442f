"""σ for a wanted ε: search on a coarse grid, finish on the fine one, never above the target."""

from __future__ import annotations

import math
from collections.abc import Callable

from .._check import between, one_of
from ..errors import CannotCertify
from .accountants import ACCOUNTANTS, epsilon_of
from .events import Event, StepEvent

SLACK = 1e-3  # how far below the target the achieved ε may lie
_LARGEST = 1e6


def calibrate(
    *,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    steps: int,
    accountant: str = "pld",
    adjacency: str = "add_or_remove_one",
) -> float:
    """The noise multiplier σ whose ε is at most `epsilon`, and at most 1e-3 below it.

    Guarantee: `epsilon(noise_multiplier=σ, …) ≤ epsilon`, by the same accountant. "gdp" is refused.

    >>> round(calibrate(epsilon=3, delta=1e-5, sampling_prob=2048 / 60000, steps=1171), 3)
    1.808
    """
    return solve(
        lambda sigma: StepEvent(noise_multiplier=sigma, sampling_prob=sampling_prob, steps=steps, adjacency=adjacency),
        epsilon,
        delta,
        accountant,
    )


def solve(make: Callable[[float], Event], epsilon: float, delta: float, accountant: str) -> float:
    """As `calibrate`, for any event that has one noise multiplier to choose."""
    target = between(1e-9, 500.0, epsilon=epsilon)
    one_of(ACCOUNTANTS, accountant=accountant)
    if accountant == "gdp":
        raise CannotCertify(
            "accountant='gdp' is an estimate that lies below the true epsilon, so noise calibrated with it is too "
            "small. Calibrate with 'pld' or 'rdp'."
        )
    coarse = 1e-4 if accountant != "pld" else 1e-3 if len(make(1.0).levels) == 1 else 1e-2
    high = solve_for(lambda s: epsilon_of(make(s), delta, accountant, coarse), target)
    return _finish(lambda s: epsilon_of(make(s), delta, accountant), target, high)


def solve_for(spent: Callable[[float], float], target: float) -> float:
    """A σ with spent(σ) ≤ target, at most 1e-3 below it; `spent` falls with σ."""
    low, high = _bracket(spent, target)
    return _narrow(spent, target, low, high)


def _bracket(spent: Callable[[float], float], target: float) -> tuple[float, float]:
    """σ_low spends too much, σ_high does not."""
    low, high = 0.25, 1.0
    while spent(high) > target:
        low, high = high, high * 2
        if high > _LARGEST:
            raise ValueError(
                f"No noise multiplier up to {_LARGEST:g} reaches epsilon={target:g} at this delta. "
                "Ask for a larger epsilon or delta, fewer steps, or a smaller sampling_prob."
            )
    while spent(low) <= target:
        low, high = low / 2, low
        if low < 1e-3:
            raise ValueError(f"epsilon={target:g} is so large that no meaningful noise is left. Ask for a smaller one.")
    return low, high


def _narrow(spent: Callable[[float], float], target: float, low: float, high: float, slack: float = SLACK) -> float:
    """Halve (low, high) until high spends at most `slack` less than the target; log ε is nearly linear in log σ."""
    at_low, at_high = spent(low), spent(high)
    for turn in range(200):
        if target - at_high <= slack or high - low <= 1e-7 * high:
            break
        middle = math.sqrt(low * high)
        if turn % 3 and math.isfinite(at_low) and at_high > 0:
            slope = math.log(at_high / at_low) / math.log(high / low)
            aim = math.log((target - slack / 4) / at_low) / slope
            middle = min(max(low * math.exp(aim), low * (high / low) ** 0.01), low * (high / low) ** 0.99)
        found = spent(middle)
        if found > target:
            low, at_low = middle, found
        else:
            high, at_high = middle, found
    return high


def _finish(spent: Callable[[float], float], target: float, start: float) -> float:
    """From a σ of the coarse grid, which is pessimistic, down to the σ of the fine one."""
    at_start = spent(start)
    while at_start > target:  # a finer grid spends less; only rounding could say otherwise
        start *= 1 + 1e-6
        at_start = spent(start)
    if target - at_start <= SLACK / 4:
        return start
    low = start
    for widen in range(1, 60):
        low = start * (1 - 2e-3 * widen**2) if 2e-3 * widen**2 < 0.5 else low / 2
        if spent(low) > target:
            return _narrow(spent, target, low, start, SLACK / 4)
        start = low
    return start
