"""What happens to the data, as frozen values. Nothing here computes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from .._check import between, count, one_of, probability

ADJACENCIES = ("add_or_remove_one", "replace_one")


@dataclass(frozen=True, kw_only=True)
class StepEvent:
    """`steps` times a Gaussian mechanism on a Poisson sample.

    Attributes:
        noise_multiplier: σ, the noise standard deviation divided by the sensitivity.
        sampling_prob: q, each record joins with this probability.
        steps: how many times.
        adjacency: what neighbouring data sets are. Under replace-one the accountant doubles the shift
            itself, so the sensitivity stays the norm bound.
        looks: Σ 1/σ² over Gaussian releases on all of the data, without sampling, beside the steps.

    >>> StepEvent(noise_multiplier=1, sampling_prob=0.01, steps=10)
    StepEvent(noise_multiplier=1.0, sampling_prob=0.01, steps=10, adjacency='add_or_remove_one', looks=0.0)
    """

    noise_multiplier: float
    sampling_prob: float
    steps: int
    adjacency: str = "add_or_remove_one"
    looks: float = 0.0

    def __post_init__(self) -> None:
        """Refuse numbers that no mechanism has."""
        object.__setattr__(self, "noise_multiplier", between(1e-10, 1e10, noise_multiplier=self.noise_multiplier))
        object.__setattr__(self, "sampling_prob", probability(sampling_prob=self.sampling_prob))
        object.__setattr__(self, "steps", count(steps=self.steps))
        one_of(ADJACENCIES, adjacency=self.adjacency)
        if self.looks:
            between(1e-20, 1e20, looks=self.looks)

    @property
    def levels(self) -> tuple[tuple[float, int], ...]:
        """(noise multiplier, how many steps)."""
        return ((self.noise_multiplier, self.steps),)


@dataclass(frozen=True, kw_only=True)
class ScheduledEvent:
    """As StepEvent, with noise multipliers that change over the run: a heterogeneous composition.

    Attributes:
        levels: (noise multiplier, how many steps) for each level.
        sampling_prob: as in StepEvent.
        adjacency: as in StepEvent.
        looks: as in StepEvent.
    """

    levels: tuple[tuple[float, int], ...]
    sampling_prob: float
    adjacency: str = "add_or_remove_one"
    looks: float = 0.0

    def __post_init__(self) -> None:
        """Refuse numbers that no mechanism has."""
        if not self.levels:
            raise ValueError("levels must not be empty.")
        for sigma, steps in self.levels:
            StepEvent(
                noise_multiplier=sigma,
                sampling_prob=self.sampling_prob,
                steps=steps,
                adjacency=self.adjacency,
                looks=self.looks,
            )


Event = StepEvent | ScheduledEvent


def rescaled(event: Event, factor: float = 1.0, sampling_prob: float | None = None) -> Event:
    """The same event with all noise multiplied by `factor`, or with another sampling probability."""
    levels = tuple((sigma * factor, steps) for sigma, steps in event.levels)
    prob = event.sampling_prob if sampling_prob is None else sampling_prob
    common: dict[str, Any] = {
        "sampling_prob": prob,
        "adjacency": event.adjacency,
        "looks": event.looks / factor**2,
    }
    if len(levels) == 1:
        ((sigma, steps),) = levels
        return StepEvent(noise_multiplier=sigma, steps=steps, **common)
    return ScheduledEvent(levels=levels, **common)


def decaying(
    noise_multiplier: float,
    decay: float,
    steps: int,
    planned: int,
    sampling_prob: float,
    adjacency: str,
    looks: float = 0.0,
) -> Event:
    """The first `steps` of `planned` steps whose noise multiplier falls from σ_0 towards decay·σ_0 (Du et al.).

    >>> decaying(2.0, 0.25, 2, 2, 0.1, "add_or_remove_one").levels
    ((2.0, 1), (1.0, 1))
    """
    common: dict[str, Any] = {"sampling_prob": sampling_prob, "adjacency": adjacency, "looks": looks}
    if decay == 1:
        return StepEvent(noise_multiplier=noise_multiplier, steps=steps, **common)
    levels = Counter(decayed(noise_multiplier, decay, step, planned) for step in range(steps))
    return ScheduledEvent(levels=tuple(levels.items()), **common)


def decayed(noise_multiplier: float, decay: float, step: int, planned: int) -> float:
    """σ of step `step` (from 0): σ_0·decay^(t/T), in at most 50 stairs: what is run is what the accountant composes."""
    stairs = min(planned, 50)
    return float(noise_multiplier * decay ** (step * stairs // planned / stairs))
