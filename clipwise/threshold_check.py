"""check_threshold: does an object keep the promises of `thresholds`? For the tests of new thresholds."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import torch
from torch import Tensor

from .thresholds import LARGEST, SMALLEST, Facts, Release, State, Threshold


def check_threshold(threshold: Threshold, trials: int = 50) -> None:
    """Raise AssertionError unless `threshold` keeps the promises of this module; for the tests of new thresholds.

    >>> from clipwise import MinErrorThreshold
    >>> check_threshold(MinErrorThreshold())
    """
    facts = Facts(step=0, steps=100, expected_batch_size=64.0, gradient_noise_multiplier=1.0, dimension=1000)
    state = threshold.init(facts)
    assert isinstance(state, State), "init must return a State"
    release = threshold.release(facts.expected_batch_size, 1.0)
    assert release is None or (release.sensitivity > 0 and release.noise_multiplier > 0), "a release needs noise"
    odd = [0.0, 5e-324, 1e-30, state.clip_norm, 1e30, math.inf, math.nan]
    for trial in range(trials):
        _check_state(state)
        norms = torch.tensor(
            [*odd, *((k * 0.37 + trial) % 7 * state.clip_norm for k in range(20))], dtype=torch.float64
        )
        if release is not None:
            _check_observation(threshold, state, norms, release)
            if trial < 2:
                _check_continuity(threshold, state)
        released = None if release is None else _extreme(trial, release.size)
        later = replace(facts, step=trial + 1)
        after = threshold.update(state, released, later)
        again = threshold.update(state, released, later)
        assert after == again, "update must depend on its arguments alone"
        state = after


def _check_state(state: State) -> None:
    assert SMALLEST / 2 <= state.clip_norm <= 2 * LARGEST, f"clip norm {state.clip_norm} left its public bounds"
    assert math.isfinite(state.range), "the range must stay finite"


def _check_observation(threshold: Threshold, state: State, norms: Tensor, release: Release) -> None:
    def seen(mask: Tensor) -> Tensor:
        found = threshold.observe(state, norms, mask)
        assert found is not None, "release is declared, but nothing is observed"
        assert found.shape == (release.size,), f"observe gave shape {tuple(found.shape)}, declared {release.size}"
        assert found.dtype == torch.float64, "observe must give float64"
        return found

    full = torch.ones(len(norms), dtype=torch.bool)
    whole, empty = seen(full), seen(~full)
    assert not empty.any(), "rows outside the mask are padding: they must not count"
    alone = []
    for i in range(len(norms)):
        without = full.clone()
        without[i] = False
        change = float((whole - seen(without)).norm())
        assert change <= release.sensitivity, f"norm {float(norms[i])} changes the release by {change}"
        alone.append(seen(~without))
    total = sum(alone, empty)
    assert torch.allclose(total, whole, rtol=0, atol=1e-9), "observations of microbatches must add up to the batch's"


def _check_continuity(threshold: Threshold, state: State) -> None:
    """A jump in the norm would be crossed by rounding, which depends on who else is in the batch."""
    one = torch.ones(1, dtype=torch.bool)

    def seen(norm: float) -> Tensor:
        found = threshold.observe(state, torch.tensor([norm], dtype=torch.float64), one)
        assert found is not None
        return found

    reach = max(state.clip_norm, state.range)
    points = [2.5 * reach * k / 80 for k in range(81)]
    for low, high in itertools.pairwise(points):
        at_low, at_high = seen(low), seen(high)
        for _ in range(60):  # follow the half with the larger change down to neighbouring numbers
            middle = (low + high) / 2
            at_middle = seen(middle)
            if float((at_middle - at_low).norm()) >= float((at_high - at_middle).norm()):
                high, at_high = middle, at_middle
            else:
                low, at_low = middle, at_middle
        assert float((at_high - at_low).norm()) <= 1e-6, f"the observation jumps at norm {high:g}"


def _extreme(trial: int, size: int) -> Tensor:
    """Releases that noise could make, and some that it hardly can."""
    values = torch.linspace(-1, 1, size, dtype=torch.float64).roll(trial)
    factor = [0.0, 1.0, -1.0, 1e3, -1e3, 1e12, 1e300, math.inf, math.nan][trial % 9]
    return values * factor + [0.0, 10.0, -10.0][trial % 3]
