"""What happens to the data, as frozen values. Nothing here computes."""

from __future__ import annotations

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
