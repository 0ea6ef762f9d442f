from __future__ import annotations

import copy
import math
import os
import pickle

import pytest
import torch
from scipy import stats

from clipwise import chacha, chacha_cpu
from clipwise.chacha import Keystream
from clipwise.noise import BLOCK, NoiseSource

ONE = {"sensitivity": 1.0, "noise_multiplier": 1.0, "sequence": 1, "stream": "gradient"}


def draw(source, count=1, *, sequence=1, stream="gradient", name="w", **options):
    settings = {"sensitivity": 1.0, "noise_multiplier": 1.0} | options
    return source.add_({name: torch.zeros(count)}, sequence=sequence, stream=stream, **settings)[name]


def test_standard_deviation_mean_and_shape_are_those_of_a_gaussian():
    x = draw(NoiseSource(), 2_000_000, sensitivity=0.5, noise_multiplier=3.0).double()
    assert float(x.std()) == pytest.approx(1.5, rel=3e-3)
    assert abs(float(x.mean())) < 6 * 1.5 / math.sqrt(len(x))
    assert stats.kstest((x[:200_000] / 1.5).numpy(), "norm").pvalue > 1e-9


def test_tails_are_full():
    """P(|z| > 4.8) = 1.6e-6: ten million draws see about sixteen."""
    source, beyond = NoiseSource(), 0
    for sequence in range(5):
        beyond += int((draw(source, 2_000_000, sequence=sequence).abs() > 4.8).sum())
    assert 1 <= beyond <= 50


def test_parts_steps_and_streams_are_uncorrelated_and_never_repeat():
    source = NoiseSource()
    zeros = lambda: {"a": torch.zeros(100_000), "b": torch.zeros(100_000)}  # noqa: E731
    first, second = (
        source.add_(zeros(), sensitivity=1.0, noise_multiplier=1.0, sequence=s, stream="gradient") for s in (1, 2)
    )
    third = source.add_(zeros(), sensitivity=1.0, noise_multiplier=1.0, sequence=1, stream="threshold")
    draws = [x for noised in (first, second, third) for x in noised.values()]
    for i, x in enumerate(draws):
        for y in draws[:i]:
            assert not torch.equal(x, y)
            assert abs(float((x * y).mean())) < 6 / math.sqrt(len(x))
    blocks = draw(source, 2 * BLOCK)
    assert abs(float((blocks[:BLOCK] * blocks[BLOCK:]).mean())) < 6 / math.sqrt(BLOCK)


@pytest.mark.parametrize("failing", range(8))
@pytest.mark.parametrize("mode", ["secure", "hardened"])
def test_a_thread_that_fails_stops_the_release(failing, mode, monkeypatch):
    """Whichever thread has the block: no part of the sum may come back without its noise."""
    source, begin = NoiseSource(mode), []

    class OneFails(Keystream):
        def bytes(self, count, into=None):
            begin.append(None)
            if len(begin) == failing + 1:
                raise MemoryError
            return super().bytes(count, into)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    monkeypatch.setattr(chacha_cpu, "is_native", lambda: False)  # which cannot fail: it asks for no memory
    monkeypatch.setattr(chacha, "Keystream", OneFails)
    monkeypatch.setattr(chacha_cpu, "Keystream", OneFails)
    with pytest.raises(MemoryError):
        source.add_({"w": torch.zeros(8 * BLOCK)}, **ONE)


@pytest.mark.parametrize("natively", [False, True])
def test_every_block_gets_its_noise_on_any_number_of_threads(monkeypatch, natively):
    found = []
    if not natively:
        monkeypatch.setattr(chacha_cpu, "is_native", lambda: False)
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        values = {"w": torch.zeros(9 * BLOCK + 5), "b": torch.zeros(7), "v": torch.zeros(2 * BLOCK)}
        found.append(NoiseSource(seed=1).add_(values, **ONE))
    assert all(torch.equal(x[name], found[0][name]) for x in found for name in values)
    assert all(bool((x != 0).all()) for x in found[0].values())


def test_two_sources_copies_and_pickles_draw_differently():
    source = NoiseSource()
    others = [NoiseSource(), copy.deepcopy(source), copy.copy(source), pickle.loads(pickle.dumps(source))]
    draws = [draw(s, 4) for s in (source, *others)]
    assert len({tuple(x.tolist()) for x in draws}) == len(draws)
    assert source._key not in pickle.dumps(source)
    assert source._key.hex() not in repr(source)


def test_a_fork_draws_its_own_noise():
    source = NoiseSource()
    parent = draw(source, 4)
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.write(writer, repr(draw(source, 4).tolist()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 4096).decode() != repr(parent.tolist())


def test_global_seeds_do_not_matter():
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        draws.append(draw(NoiseSource(), 4))
    assert not torch.equal(*draws)


def test_a_seed_repeats_and_is_not_certified():
    a, b = NoiseSource(seed=1), NoiseSource(seed=1)
    assert torch.equal(draw(a, 4), draw(b, 4))
    assert not a.certified
    assert not NoiseSource("fast").certified
    assert NoiseSource().certified


def test_fast_mode_has_the_right_scale():
    assert float(draw(NoiseSource("fast"), 1_000_000, noise_multiplier=2.0).std()) == pytest.approx(2.0, rel=5e-3)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_noise_is_added_in_float32_or_wider(given, expected):
    value = torch.ones(100_000, dtype=given)
    noised = NoiseSource().add_({"w": value}, sensitivity=1e-4, noise_multiplier=1.0, sequence=1, stream="g")["w"]
    assert noised.dtype == expected
    assert float((noised.double() - 1).std()) == pytest.approx(1e-4, rel=2e-2)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), True, "1"])
def test_bad_scales_are_refused(bad):
    for option in ("sensitivity", "noise_multiplier"):
        with pytest.raises((ValueError, TypeError), match=option):
            draw(NoiseSource(), **{option: bad})
