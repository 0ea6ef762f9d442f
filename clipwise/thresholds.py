"""Thresholds decide the clip norm C of the next step."""

from __future__ import annotations

from dataclasses import dataclass

from ._check import clip_norm


@dataclass(frozen=True)
class FixedThreshold:
    """C stays what it is: no private input, no cost.

    >>> FixedThreshold(0.5).clip_norm
    0.5
    """

    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        """C > 0, in a range that floating point can bear."""
        object.__setattr__(self, "clip_norm", clip_norm(clip_norm=self.clip_norm))
