from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import ndtri

from clipwise import rounded
from clipwise.noise import NoiseSource
from clipwise.rounded import grid_for, rounded_gaussians

MAX = 2**64 - 1


def by_hand(word: int, scale: float, more: int = 2**63) -> int:
    """round(scale·z) with 100 digits, for one continuation of the word's bits."""
    with mpmath.workdps(100):
        u = (mpmath.mpf(word >> 1) + mpmath.mpf(more) / 2**64) / mpmath.mpf(2) ** 64
        magnitude = int(mpmath.nint(mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * u) * scale))
    return -magnitude if word & 1 else magnitude


@given(st.integers(0, MAX), st.floats(1.0, 1e9))
def test_every_word_is_rounded_as_the_ideal_number_is(word, scale):
    found = rounded_gaussians(np.array([word], dtype=np.uint64), scale, lambda: 2**63)
    assert int(found[0]) == by_hand(word, scale)


@pytest.mark.parametrize("word", [0, 1, 2, 3, 2**20, 2**40, MAX - 1, MAX])
def test_the_last_words_are_taken_exactly(word):
    found = rounded_gaussians(np.array([word], dtype=np.uint64), 1e6, lambda: 2**63)
    assert int(found[0]) == by_hand(word, 1e6)


def test_words_next_to_a_boundary_ask_for_more_bits():
    """Where 64 bits do not say on which side of k + ½ the number lies, the next bits decide, either way."""
    scale, asked = 1e6, []
    with mpmath.workdps(60):
        boundary = mpmath.erfc(mpmath.mpf("1000000.5") / scale / mpmath.sqrt(2)) / 2 * mpmath.mpf(2) ** 64
        word = int(mpmath.floor(boundary)) << 1

    def more(bits):
        asked.append(bits)
        return bits

    low = rounded_gaussians(np.array([word], dtype=np.uint64), scale, lambda: more(MAX))
    high = rounded_gaussians(np.array([word], dtype=np.uint64), scale, lambda: more(0))
    assert (int(low[0]), int(high[0])) == (1_000_000, 1_000_001)
    assert len(asked) >= 2


def test_doubt_is_rare():
    words, asked = np.random.default_rng(0).integers(0, MAX, 10**6, dtype=np.uint64), []
    rounded_gaussians(words, 1e7, lambda: asked.append(1) or 2**63)
    assert len(asked) < 20


def test_the_floating_point_quantile_is_as_exact_as_assumed():
    rng = np.random.default_rng(1)
    for u in np.concatenate([rng.random(200) / 2, 2.0 ** -rng.uniform(1, 60, 200)]):
        with mpmath.workdps(50):
            true = mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(float(u)))
            assert abs(-ndtri(u) - true) <= 2.0**-48 * (1 + true)


def test_the_distribution():
    words = np.random.default_rng(2).integers(0, MAX, 10**6, dtype=np.uint64)
    z = rounded_gaussians(words, 3.0, lambda: 2**63)
    assert z.std() == pytest.approx(math.sqrt(9 + 1 / 12), rel=3e-3)
    counts = np.array([(z == k).sum() for k in range(-6, 7)])
    expected = len(z) * np.diff(stats.norm.cdf((np.arange(-6, 8) - 0.5) / 3))
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


@given(st.floats(1e-12, 1e12), st.integers(1, 10**9))
def test_the_grid_costs_little(sensitivity, dimension):
    step, bound = grid_for(sensitivity, dimension)
    assert math.frexp(step)[0] == 0.5
    assert sensitivity < bound <= sensitivity * (1 + rounded.FINENESS)
    assert bound >= sensitivity + math.sqrt(dimension) * step * (1 - 1e-12)


def test_hardened_noise_lies_on_the_grid_whatever_was_added():
    """The set of possible outputs does not depend on the value: what a floating-point attack would look for."""
    values = {"a": torch.rand(3000, dtype=torch.float64), "b": torch.full((2, 500), 1 / 3, dtype=torch.float64)}
    step, _ = grid_for(0.7, 4000)
    noised = NoiseSource("hardened").add_(values, sensitivity=0.7, noise_multiplier=2.0, sequence=1, stream="s")
    for value in noised.values():
        assert value.dtype == torch.float64
        assert torch.equal(value / step, (value / step).round())


def test_ordinary_noise_does_not():
    step, _ = grid_for(0.7, 4000)
    noised = NoiseSource().add_({"a": torch.rand(4000, dtype=torch.float64)}, sensitivity=0.7, noise_multiplier=2.0, sequence=1, stream="s")  # fmt: skip  # noqa: E501
    assert (noised["a"] / step != (noised["a"] / step).round()).double().mean() > 0.9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_hardened_noise_has_the_planned_scale(dtype):
    source = NoiseSource("hardened")
    value = {"a": torch.full((1000, 1000), 5.0, dtype=dtype)}
    noised = source.add_(value, sensitivity=0.5, noise_multiplier=3.0, sequence=1, stream="s")["a"].double()
    assert source.certified
    assert source.reach == math.inf
    assert float(noised.mean()) == pytest.approx(5.0, abs=8e-3)
    assert 1.5 * (1 - 4.5e-3) < float(noised.std()) < 1.5 * (1 + 4.5e-3)
    again = source.add_({"a": torch.zeros(5)}, sensitivity=1.0, noise_multiplier=1.0, sequence=1, stream="s")
    other = source.add_({"a": torch.zeros(5)}, sensitivity=1.0, noise_multiplier=1.0, sequence=2, stream="s")
    assert not torch.equal(again["a"], other["a"])
