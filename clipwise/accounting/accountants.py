"""ε of an event, by dp-accounting: "pld" (default; pessimistic, tight), "rdp" (looser), "gdp" (an estimate).

dp-accounting is imported when first needed: it takes over a second.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from typing import Any

import numpy as np

from .._check import one_of, open_unit
from .events import Event, StepEvent, rescaled

CERTIFYING = ("pld", "rdp")
ACCOUNTANTS = (*CERTIFYING, "gdp")
ROUNDED = 1e-13  # of RDP, for one sampled release
FOURIER = 3 * 2.0**-53  # what one release adds to the rounding of δ; measured against finer grids


def epsilon(
    *,
    noise_multiplier: float,
    sampling_prob: float,
    steps: int,
    delta: float,
    accountant: str = "pld",
    adjacency: str = "add_or_remove_one",
) -> float:
    """ε at `delta` of `steps` Poisson-sampled Gaussian releases.

    Guarantee: "pld" and "rdp" never lie below the true ε. "gdp" is the central-limit estimate, which DOES lie
    below it: it may be shown, it certifies nothing.

    >>> round(epsilon(noise_multiplier=1.5, sampling_prob=0.04, steps=2250, delta=1e-5), 3)
    6.769
    """
    event = StepEvent(noise_multiplier=noise_multiplier, sampling_prob=sampling_prob, steps=steps, adjacency=adjacency)
    return epsilon_of(event, delta, accountant)


@lru_cache(maxsize=4096)
def epsilon_of(event: Event, delta: float, accountant: str = "pld", grid: float = 1e-4) -> float:
    """As `epsilon`, for an event. `grid` is PLD's discretisation: coarser is faster and larger, never smaller."""
    open_unit(delta=delta)
    one_of(ACCOUNTANTS, accountant=accountant)
    if accountant == "gdp":
        return _gdp(event, delta)
    if accountant == "rdp":
        return _rdp(event, delta)
    return _pld(event, delta, grid)


def dp_events(event: Event) -> list[tuple[Any, int]]:
    """dp-accounting's events and how often each. Without sampling, Gaussians are exactly one with 1/σ² = Σ 1/σ_i²."""
    import dp_accounting

    if event.sampling_prob == 1:
        return [(dp_accounting.GaussianDpEvent((event.looks + sum(n / s**2 for s, n in event.levels)) ** -0.5), 1)]
    releases = ((dp_accounting.GaussianDpEvent(sigma), steps) for sigma, steps in event.levels)
    sampled = [(dp_accounting.PoissonSampledDpEvent(event.sampling_prob, r), steps) for r, steps in releases]
    return sampled + ([(dp_accounting.GaussianDpEvent(event.looks**-0.5), 1)] if event.looks else [])


def _pld(event: Event, delta: float, grid: float) -> float:
    """PLD; where the answer is large a coarser grid is as exact in relative terms, and beyond 2,000 RDP must do.

    The grid follows RDP's bound, which is monotone, and a coarser grid only raises ε: so this is monotone too. Fourier
    transforms round: δ of a composition of T releases is off by a few T·2⁻⁵³, so as much is taken off the δ that is
    asked for; where that leaves less than half of it, RDP must do.
    """
    add_or_remove = event.adjacency == "add_or_remove_one"
    rough = _rdp(_simpler(event), delta)
    certain = delta - FOURIER * sum(times for _, times in dp_events(event))
    if not rough <= 2000 or certain < delta / 2:
        found = rough if add_or_remove else math.inf
    else:
        fine = grid / 10 if rough <= 1 and min(sigma for sigma, _ in event.levels) >= 1 else grid
        width = max(fine, 1e-2 if rough > 200 else 1e-3 if rough > 20 or len(event.levels) > 1 else 0.0)
        with np.errstate(over="ignore"):  # a quotient with a vanishing mass, compared as infinite: as it should be
            found = float(_composed_pld(event, width).get_epsilon(certain))
    if 0.5 < event.sampling_prob < 1:  # sampling only helps: the grid's own error must not say otherwise
        found = min(found, epsilon_of(rescaled(event, sampling_prob=1.0), delta, "pld", grid))
    return min(found, rough) if add_or_remove else found


@lru_cache(maxsize=4)
def _composed_pld(event: Event, width: float) -> Any:
    """The distribution of the privacy loss on a grid of `width`: the slow part, and the same for every δ."""
    import dp_accounting

    relations = dp_accounting.NeighboringRelation
    relation = relations.ADD_OR_REMOVE_ONE if event.adjacency == "add_or_remove_one" else relations.REPLACE_ONE
    accountant = dp_accounting.pld.PLDAccountant(relation, value_discretization_interval=width)
    for release, steps in dp_events(event):
        accountant.compose(release, steps)
    return accountant


def _simpler(event: Event) -> StepEvent:
    """An event that costs no less: every step with the least noise, and half of it for replace-one."""
    sigma, shift = min(sigma for sigma, _ in event.levels), 1 if event.adjacency == "add_or_remove_one" else 2
    steps = sum(steps for _, steps in event.levels)
    return StepEvent(
        noise_multiplier=sigma / shift, sampling_prob=event.sampling_prob, steps=steps, looks=event.looks * shift**2
    )


@lru_cache(maxsize=4096)
def _rdp(event: Event, delta: float) -> float:
    if event.adjacency != "add_or_remove_one":
        raise ValueError("accountant='rdp' knows add_or_remove_one only; use accountant='pld' for replace_one.")
    accountant, sampled = rdp_accountant(), 0
    for release, steps in dp_events(event):
        accountant.compose(release, steps)
        sampled += steps if event.sampling_prob < 1 else 0
    return rdp_epsilon(accountant, sampled, delta)


def rdp_epsilon(accountant: Any, sampled: int, delta: float) -> float:
    """ε of what an RDP accountant composed, of it so many sampled releases.

    RDP of one is the logarithm of a number near 1, and may be rounded down by some 1e-15, to 0 or below: the smaller it
    is below 1e-9, the more is added, up to a hundred times that.
    """
    from dp_accounting.rdp import compute_epsilon

    rdp = accountant.rdp
    if sampled:
        rdp += sampled * ROUNDED * np.clip(1 - rdp / (1e-9 * sampled), 0.0, 1.0)
    return float(compute_epsilon(accountant.orders, rdp, delta)[0])


def rdp_accountant() -> Any:
    """dp-accounting's, without its warnings of orders that it leaves out."""
    import dp_accounting

    logger = logging.getLogger("absl")
    if not any(isinstance(f, _LeftOutOrders) for f in logger.filters):
        logger.addFilter(_LeftOutOrders())
    return dp_accounting.rdp.RdpAccountant()


def pld_accountant() -> Any:
    """dp-accounting's, for add-or-remove-one, on a grid of 1e-3."""
    import dp_accounting

    return dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)


class _LeftOutOrders(logging.Filter):
    """dp-accounting warns of every RDP order that it leaves out, which is sound: the bound is a minimum over orders."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "_compute_log_a_frac" not in str(record.msg)


def _gdp(event: Event, delta: float) -> float:
    """μ² = q²·Σ(e^{1/σ²} − 1) over the steps, then δ(ε) = Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2) for ε (Bu et al. 2020)."""
    if event.adjacency != "add_or_remove_one":
        raise ValueError("accountant='gdp' knows add_or_remove_one only.")
    if any(1 / sigma**2 > 700 for sigma, _ in event.levels):
        return math.inf
    sampled = event.sampling_prob**2 * sum(steps * math.expm1(1 / sigma**2) for sigma, steps in event.levels)
    return gaussian_epsilon(math.sqrt(sampled + event.looks), delta)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε at δ of a Gaussian release whose two worlds lie μ standard deviations apart.

    >>> round(gaussian_epsilon(1.0, 1e-5), 3)
    4.377
    """
    from scipy.optimize import brentq
    from scipy.special import log_ndtr, ndtr

    if mu <= 0:
        return 0.0

    def excess(eps: float) -> float:
        second = math.exp(min(eps + float(log_ndtr(-eps / mu - mu / 2)), 0.0))
        return float(ndtr(-eps / mu + mu / 2)) - second - delta

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, 0.0, high))
