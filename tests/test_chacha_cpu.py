"""The CPU's noise against the reference of chacha.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ways import WAYS, by

from clipwise import chacha, chacha_cpu
from clipwise.chacha_cpu import LONGEST, Part, add_gaussians
from clipwise.noise import NoiseSource

KEY = bytes(range(32))


@pytest.fixture(params=WAYS, autouse=True, scope="module")
def way(request):
    """Both, where there is native code."""
    with by(request.param):
        yield request.param


lengths = st.one_of(st.integers(0, 5), st.integers(0, 3 * chacha.CHUNK), st.integers(LONGEST - 5, LONGEST))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3 * chacha.CHUNK), lengths), min_size=1, max_size=6), st.floats(0.1, 10))
def test_any_parts_together_get_the_numbers_of_the_reference(pieces, scale):
    keys = [bytes([i]) * 32 for i in range(len(pieces))]
    given = [np.random.default_rng(i).standard_normal(length) for i, (_, length) in enumerate(pieces)]
    targets = [x.copy() for x in given]
    add_gaussians([Part(k, o, t) for k, (o, _), t in zip(keys, pieces, targets, strict=True)], scale)
    for key, (offset, length), before, after in zip(keys, pieces, given, targets, strict=True):
        expected = before + scale * chacha.gaussians(key, offset, length).numpy()
        np.testing.assert_allclose(after, expected, rtol=1e-12, atol=1e-12)


def test_numbers_beyond_the_lower_counter_word_too():
    offset = 8 * 2**32 - 1000
    target = np.zeros(3000)
    add_gaussians([Part(KEY, offset, target)], 1.0)
    np.testing.assert_allclose(target, chacha.gaussians(KEY, offset, 3000).numpy(), atol=1e-12)


def test_it_is_added_in_float64_and_rounded_once():
    before = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    target = before.copy()
    add_gaussians([Part(KEY, 0, target)], 1e-3)
    exact = before.astype(np.float64) + 1e-3 * chacha.gaussians(KEY, 0, 5000).numpy()
    assert target.dtype == np.float32
    assert (target != exact.astype(np.float32)).mean() < 1e-4  # but for ties, in the last digit of float64


@pytest.mark.parametrize(("word", "radius"), [(0, chacha.REACH), (2**32 - 1, 0.0)])
def test_the_ends_of_the_radius(word, radius):
    words = np.full((4, 1, chacha.LANES), float(word))
    words[3] = 0.0
    found = chacha_cpu._gaussians(words, 2.0, np.empty((1, 2, chacha.LANES)))
    assert found[0, 0, 0] == pytest.approx(2 * radius, rel=1e-12, abs=1e-7)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("turn", [0, 1, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1, 2**31, 2**31 + 1, 3 * 2**30, 2**32 - 1])
def test_the_angle_where_its_tangent_ends_or_begins(turn):
    words = np.zeros((4, 1, chacha.LANES))
    words[3] = turn
    angle = 2 * np.pi * turn / 2**32
    expected = np.array([np.cos(angle), np.sin(angle)]) * chacha.REACH
    np.testing.assert_allclose(
        chacha_cpu._gaussians(words, 1.0, np.empty((1, 2, chacha.LANES)))[0, :, 0], expected, rtol=1e-12, atol=1e-13
    )


def test_a_seed_gives_the_noise_of_a_gpu():
    """The same address and the same numbers, so that seeded runs differ by rounding alone."""
    noised = NoiseSource(seed=3).add_(
        {"w": torch.zeros(100, dtype=torch.float64)}, sensitivity=2.0, noise_multiplier=1.5, sequence=7, stream="g"
    )
    key = NoiseSource(seed=3)._derived("7/g/w/gpu", 32)
    torch.testing.assert_close(noised["w"], 3 * chacha.gaussians(key, 0, 100))


@pytest.mark.parametrize("scale", [0.0, 1e-150, 1e150, float("inf"), float("nan")])
def test_a_scale_that_cannot_be_squared_is_refused(scale):
    with pytest.raises(ValueError, match="beyond what float64 can square"):
        add_gaussians([Part(KEY, 0, np.zeros(10))], scale)
