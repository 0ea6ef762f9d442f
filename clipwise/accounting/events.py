"""What happens to the data, as frozen values. Nothing here computes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

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

    >>> StepEvent(noise_multiplier=1, sampling_prob=0.01, steps=10)
    StepEvent(noise_multiplier=1.0, sampling_prob=0.01, steps=10, adjacency='add_or_remove_one')
    """

    noise_multiplier: float
    sampling_prob: float
    steps: int
    adjacency: str = "add_or_remove_one"

    def __post_init__(self) -> None:
        """Refuse numbers that no mechanism has."""
        object.__setattr__(self, "noise_multiplier", between(1e-10, 1e10, noise_multiplier=self.noise_multiplier))
        object.__setattr__(self, "sampling_prob", probability(sampling_prob=self.sampling_prob))
        object.__setattr__(self, "steps", count(steps=self.steps))
        one_of(ADJACENCIES, adjacency=self.adjacency)

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
    """

    levels: tuple[tuple[float, int], ...]
    sampling_prob: float
    adjacency: str = "add_or_remove_one"

    def __post_init__(self) -> None:
        """Refuse numbers that no mechanism has."""
        if not self.levels:
            raise ValueError("levels must not be empty.")
        for sigma, steps in self.levels:
            StepEvent(noise_multiplier=sigma, sampling_prob=self.sampling_prob, steps=steps, adjacency=self.adjacency)


Event = StepEvent | ScheduledEvent


def rescaled(event: Event, factor: float = 1.0, sampling_prob: float | None = None) -> Event:
    """The same event with all noise multiplied by `factor`, or with another sampling probability."""
    levels = tuple((sigma * factor, steps) for sigma, steps in event.levels)
    prob = event.sampling_prob if sampling_prob is None else sampling_prob
    if len(levels) == 1:
        ((sigma, steps),) = levels
        return StepEvent(noise_multiplier=sigma, sampling_prob=prob, steps=steps, adjacency=event.adjacency)
    return ScheduledEvent(levels=levels, sampling_prob=prob, adjacency=event.adjacency)


def decaying(
    noise_multiplier: float, decay: float, steps: int, planned: int, sampling_prob: float, adjacency: str
) -> Event:
    """The first `steps` of `planned` steps whose noise multiplier falls from σ_0 towards decay·σ_0 (Du et al.).

    >>> decaying(2.0, 0.25, 2, 2, 0.1, "add_or_remove_one").levels
    ((2.0, 1), (1.0, 1))
    """
    if decay == 1:
        return StepEvent(
            noise_multiplier=noise_multiplier, sampling_prob=sampling_prob, steps=steps, adjacency=adjacency
        )
    levels = Counter(decayed(noise_multiplier, decay, step, planned) for step in range(steps))
    return ScheduledEvent(levels=tuple(levels.items()), sampling_prob=sampling_prob, adjacency=adjacency)


def decayed(noise_multiplier: float, decay: float, step: int, planned: int) -> float:
    """σ of step `step` (from 0): σ_0·decay^(t/T), in at most 50 stairs: what is run is what the accountant composes."""
    stairs = min(planned, 50)
    return float(noise_multiplier * decay ** (step * stairs // planned / stairs))
