"""Thresholds decide the clip norm C of the next step, from released values only.

A threshold is a frozen object with three functions and no state of its own: `init` gives the first
`State`, `observe` turns the (secret) norms of a step into a vector whose sensitivity it declares in
`release`, and `update` makes the next state from that vector after noise. Vector and gradient come
from one Poisson batch, so together they are ONE Gaussian mechanism: σ⁻² = σ_T⁻² + σ_H⁻², and the plan
gives the gradient what is left, σ_T. C and the range of a histogram stay within public constants.
Formulas: DC-SGD, algorithms 1 and 2 (misprints corrected); Andrew et al. 2021; Du et al. 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ._check import between, clip_norm, count, open_unit, positive, probability
from ._types import ROUNDINGS, largest_batch, unit_roundoff
from .rules import Abadi, Global, PerLayer, Reparam, Rule

SMALLEST, LARGEST = 1e-12, 1e12  # no clip norm leaves this range, whatever noise says


@dataclass(frozen=True)
class State:
    """What a threshold remembers between steps. Public: it comes from released values alone."""

    clip_norm: float
    range: float = 0.0  # of the histogram, [0, range]

    def __post_init__(self) -> None:
        """Only numbers that a step can bear."""
        clip_norm(clip_norm=self.clip_norm)
        if not 0 <= self.range <= 1e15:
            raise ValueError(f"range must lie in [0, 1e15], got {self.range!r}.")


@dataclass(frozen=True)
class Release:
    """What a threshold releases beside the gradient: a vector, one example's influence on it, and its noise.

    The sensitivity has room for rounding: one more example changes how the others' norms round, so observations must
    be continuous in the norm, and `slope` is by how much one of them moves for a relative change of its norm.
    """

    size: int
    sensitivity: float
    noise_multiplier: float  # σ_H, in units of the sensitivity

    @property
    def noise(self) -> float:
        """The standard deviation."""
        return self.noise_multiplier * self.sensitivity

    @classmethod
    def of(cls, size: int, reach: float, slope: float, noise: float, expected_batch_size: float) -> Release:
        """`reach` bounds one example's own part; `noise` is the standard deviation for that part."""
        rounding = slope * ROUNDINGS * unit_roundoff(torch.float32) * largest_batch(expected_batch_size)
        return cls(size, reach + rounding, noise / reach)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Public numbers of the run that a threshold may use."""

    step: int  # how many steps are charged already
    steps: int
    expected_batch_size: float
    gradient_noise_multiplier: float
    dimension: int  # number of trainable entries


@runtime_checkable
class Threshold(Protocol):
    """What a threshold is. `check_threshold` tells whether an object really is one."""

    def init(self, facts: Facts) -> State:
        """The state for the next step of a run that begins, or goes on, at `facts.step`."""

    def release(self, expected_batch_size: float, noise_multiplier: float) -> Release | None:
        """What is released in every step, under a total σ of `noise_multiplier`; None: nothing, at no cost."""

    def observe(self, state: State, norms: Tensor, mask: Tensor) -> Tensor | None:
        """The vector of `release` for norms [b], float64. Rows outside `mask` are padding and never count. Secret."""

    def update(self, state: State, released: Tensor | None, facts: Facts) -> State:
        """The next state. Never fails, whatever noise did."""

    def why_not(self, rule: Rule) -> str | None:
        """Why this threshold makes no sense with `rule`; None if it does."""


def _bounded(x: float) -> float:
    return min(max(x, SMALLEST), LARGEST)


def _initial(value: float) -> float:
    return between(SMALLEST, LARGEST, initial=value)


class _Public:
    """A threshold that looks at no data: nothing released, no cost."""

    def release(self, expected_batch_size: float, noise_multiplier: float) -> Release | None:
        """Nothing."""
        return None

    def observe(self, state: State, norms: Tensor, mask: Tensor) -> Tensor | None:
        """Nothing."""
        return None

    def why_not(self, rule: Rule) -> str | None:
        """Goes with every rule."""
        return None


@dataclass(frozen=True)
class FixedThreshold(_Public):
    """C stays what it is: no private input, no cost.

    >>> FixedThreshold(0.5).clip_norm
    0.5
    """

    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        """C > 0, in a range that floating point can bear."""
        object.__setattr__(self, "clip_norm", clip_norm(clip_norm=self.clip_norm))

    def init(self, facts: Facts) -> State:
        """C."""
        return State(self.clip_norm)

    def update(self, state: State, released: Tensor | None, facts: Facts) -> State:
        """C."""
        return state


@dataclass(frozen=True)
class DecayThreshold(_Public):
    """C_t = C_0·ρ^(t/T): from C_0 towards ρ·C_0 (Du et al.). No private input, no cost.

    With `Plan(noise_decay=…)` the noise multiplier falls as well, and the accountant composes every step.

    >>> facts = Facts(step=5, steps=10, expected_batch_size=8, gradient_noise_multiplier=1, dimension=3)
    >>> DecayThreshold(4.0, rho=0.25).init(facts).clip_norm
    2.0
    """

    initial: float = 1.0
    rho: float = 0.5

    def __post_init__(self) -> None:
        """C_0 > 0 and 0 < ρ ≤ 1."""
        object.__setattr__(self, "initial", _initial(self.initial))
        object.__setattr__(self, "rho", probability(rho=self.rho))

    def init(self, facts: Facts) -> State:
        """C of the step that comes next."""
        return State(_bounded(self.initial * self.rho ** (facts.step / facts.steps)))

    def update(self, state: State, released: Tensor | None, facts: Facts) -> State:
        """A function of the step alone."""
        return self.init(facts)


_CLIPPING = (Abadi, Reparam, Global)


@dataclass(frozen=True)
class QuantileThreshold:
    """C follows a quantile of the norms (Andrew et al.): C ← C·exp(−η(b̃ − quantile)), b̃ the noisy share with n ≤ C.

    An example counts as 1 below 31/32·C and falls to 0 at 33/32·C: a jump would make all of them depend on rounding.

    Guarantee: releases Σ(bᵢ − ½) + N(0, count_noise²), whose sensitivity is ½: the plan pays for it. The share is
    of the declared `expected_batch_size`, never of the realised count.

    Args:
        quantile: the share of examples that shall not be clipped.
        initial: C of the first step.
        learning_rate: η.
        count_noise: standard deviation; None means expected_batch_size / 20.
    """

    quantile: float = 0.5
    initial: float = 1.0
    learning_rate: float = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        """Numbers in their ranges."""
        open_unit(quantile=self.quantile)
        object.__setattr__(self, "initial", _initial(self.initial))
        object.__setattr__(self, "learning_rate", positive(learning_rate=self.learning_rate))
        if self.count_noise is not None:  # a plain number: numpy's half precision would round what σ is made of
            object.__setattr__(self, "count_noise", positive(count_noise=self.count_noise))

    def init(self, facts: Facts) -> State:
        """C_0."""
        return State(self.initial)

    def release(self, expected_batch_size: float, noise_multiplier: float) -> Release | None:
        """One centred count."""
        noise = self.count_noise if self.count_noise is not None else expected_batch_size / 20
        return Release.of(1, 0.5, 17.0, noise, expected_batch_size)

    def observe(self, state: State, norms: Tensor, mask: Tensor) -> Tensor | None:
        """Σ(bᵢ − ½): an infinite or NaN norm is above every C."""
        below = (16.5 - 16 * (norms.double() / state.clip_norm)).clamp(0.0, 1.0)
        centred = torch.where(torch.isfinite(norms), below, 0.0) - 0.5
        return torch.where(mask, centred, 0.0).sum()[None]

    def update(self, state: State, released: Tensor | None, facts: Facts) -> State:
        """Geometric descent on the quantile."""
        assert released is not None
        share = float(released[0]) / facts.expected_batch_size + 0.5
        if math.isnan(share):
            return state
        exponent = min(max(-self.learning_rate * (share - self.quantile), -50.0), 50.0)
        return replace(state, clip_norm=_bounded(state.clip_norm * math.exp(exponent)))

    def why_not(self, rule: Rule) -> str | None:
        """Needs one norm per example, and a rule that clips at C."""
        return None if isinstance(rule, _CLIPPING) else _only_scales("QuantileThreshold", rule)


def _only_scales(name: str, rule: Rule, goes_with: str = "Abadi(), Reparam() or Global()") -> str:
    if isinstance(rule, PerLayer):
        return f"{name} follows one norm per example, and {type(rule).__name__} has one per layer. Use {goes_with}."
    return (
        f"under {rule!r} C is only a factor of the learning rate, so {name} would spend privacy on a learning-rate "
        f"schedule. Use {goes_with}, or leave the threshold fixed: that rule needs none."
    )


class _Histogram:
    """What the two thresholds of DC-SGD share: a noisy histogram of norms over [0, range].

    An example is one count, shared between the two bins whose middles are nearest to its norm (linear binning): a count
    that jumped from bin to bin would jump for many examples at once when one more changes how their norms round.
    """

    initial: float
    bins: int
    histogram_noise: float | None

    def _check(self) -> None:
        object.__setattr__(self, "initial", _initial(self.initial))
        if not 2 <= count(bins=self.bins) <= 10_000:
            raise ValueError(f"bins must lie in [2, 10000], got {self.bins!r}.")
        if self.histogram_noise is not None:
            object.__setattr__(self, "histogram_noise", positive(histogram_noise=self.histogram_noise))

    def release(self, expected_batch_size: float, noise_multiplier: float) -> Release | None:
        """One example is one count. Without a given noise: 5, 8 from σ = 2 on, 12 beyond 3 (DC-SGD)."""
        usual = 5.0 if noise_multiplier < 2 else 8.0 if noise_multiplier <= 3 else 12.0
        noise = usual if self.histogram_noise is None else self.histogram_noise
        return Release.of(self.bins, 1.0, math.sqrt(2) * self.bins, noise, expected_batch_size)

    def observe(self, state: State, norms: Tensor, mask: Tensor) -> Tensor | None:
        """Counts per bin; norms beyond the range, infinite or NaN go to the last."""
        last = self.bins - 1
        place = norms.double() * (self.bins / state.range) - 0.5  # in bins, from the middle of the first
        place = torch.where(torch.isfinite(place), place, float(last)).clamp(0, last)
        bins = torch.arange(self.bins, device=norms.device)
        shared = (1 - (place[:, None] - bins).abs()).clamp(min=0)
        return torch.where(mask[:, None], shared, 0.0).sum(0)

    def why_not(self, rule: Rule) -> str | None:
        """Reads the share or the error of Abadi's clipping."""
        return None if isinstance(rule, Abadi) else _only_scales(type(self).__name__, rule, "Abadi()")


@dataclass(frozen=True)
class PercentileThreshold(_Histogram):
    """DC-SGD-P: C is the `percentile` of a noisy histogram of the norms.

    Guarantee: releases a histogram with N(0, histogram_noise²) on every bin, sensitivity 1: the plan pays for it.

    Args:
        percentile: the share of examples that shall not be clipped.
        initial: C of the first step.
        bins: of the histogram.
        histogram_noise: standard deviation; None means 5, 8 from σ = 2 on, 12 beyond σ = 3.
        initial_range: the first histogram covers [0, initial_range]; None means 2·initial.
    """

    percentile: float = 0.5
    initial: float = 1.0
    bins: int = 20
    histogram_noise: float | None = None
    initial_range: float | None = None

    def __post_init__(self) -> None:
        """Numbers in their ranges."""
        open_unit(percentile=self.percentile)
        self._check()
        if self.initial_range is not None:
            between(SMALLEST, LARGEST, initial_range=self.initial_range)

    def init(self, facts: Facts) -> State:
        """C_0 and R_0."""
        return State(self.initial, self.initial_range or 2 * self.initial)

    def update(self, state: State, released: Tensor | None, facts: Facts) -> State:
        """From the left until the running sum reaches p·S'; C is the middle of that bin, the next range 2·C."""
        histogram = _usable(released)
        if histogram is None:
            return state
        reached = np.cumsum(histogram) >= self.percentile * histogram.sum()
        middle = _bounded((int(np.argmax(reached)) + 0.5) * state.range / self.bins)
        return State(middle, 2 * middle)


@dataclass(frozen=True)
class MinErrorThreshold(_Histogram):
    """DC-SGD-E: C minimises the expected squared error of the released gradient. Nothing to tune.

    E(C') = σ_T²·C'²·d/B² (noise) + Σ_k H_k·max(m_k − C', 0)² / S' (clipping), m_k the middle of bin k, over candidates
    i·C/10, i = 1 … 20, again around the first or the last if that is the best: at most 100 times, and never beyond
    [SMALLEST, LARGEST]. Bins that noise made negative count as empty, so that E is convex.

    Guarantee: as PercentileThreshold.
    """

    initial: float = 1.0
    bins: int = 20
    histogram_noise: float | None = None

    def __post_init__(self) -> None:
        """Numbers in their ranges; with fewer bins the range could not settle."""
        self._check()
        if self.bins < 4:
            raise ValueError(f"bins must be at least 4, got {self.bins!r}.")

    def init(self, facts: Facts) -> State:
        """C_0, and R_0 = b."""
        return State(self.initial, float(self.bins))

    def update(self, state: State, released: Tensor | None, facts: Facts) -> State:
        """The best candidate, and a range that fits the norms better."""
        histogram = _usable(released)
        if histogram is None:
            return state
        counts = np.maximum(histogram, 0)  # or the error would have no minimum, and C would fall to its bound
        share = counts / counts.sum()
        middles = (np.arange(self.bins) + 0.5) * (state.range / self.bins)
        scale = max(state.range, state.clip_norm)  # errors in units of it: no overflow
        noise = (facts.gradient_noise_multiplier / facts.expected_batch_size) ** 2 * facts.dimension
        best = state.clip_norm
        for _ in range(_REPEATS):
            candidates = np.arange(1, 21) * (best / 10)
            clipped = np.maximum(middles - candidates[:, None], 0) / scale
            errors = noise * (candidates / scale) ** 2 + (clipped**2) @ share
            chosen = int(np.argmin(errors))
            before, best = best, _bounded(float(candidates[chosen]))
            if 0 < chosen < 19 or best == before:
                break
        return State(best, _bounded(self._next_range(state.range, histogram / histogram.sum())))

    def _next_range(self, reach: float, share: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        if share[-1] >= 0.5:
            return 2 * reach
        return reach / 2 if share[self.bins // 2 :].sum() <= 1 / self.bins else reach


_REPEATS = 100


def _usable(released: Tensor | None) -> np.ndarray[tuple[int], np.dtype[np.float64]] | None:
    """The noisy histogram, or None where noise has drowned it: its sum is not above zero."""
    assert released is not None
    histogram: np.ndarray[tuple[int], np.dtype[np.float64]] = released.double().cpu().numpy()
    return histogram if np.isfinite(histogram).all() and histogram.sum() > 0 else None
