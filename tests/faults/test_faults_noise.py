"""Rows 25 to 30: noise."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from small_runs import RULES, X, Y, plan, run, weights
from torch import nn
from ways import WAYS, by

import clipwise as cw
from clipwise import chacha, chacha_cpu, errors, native
from clipwise.noise import NoiseSource
from clipwise.rounded import rounded_gaussians


@pytest.fixture(params=WAYS, autouse=True, scope="module")
def way(request):
    """Both, where there is native code."""
    with by(request.param):
        yield request.param


def drawn(source, shape, dtype=torch.float32, sequence=1, stream="gradient", sigma=1.0, name="w"):
    value = {name: torch.zeros(shape, dtype=dtype)}
    return source.add_(value, sensitivity=1.0, noise_multiplier=sigma, sequence=sequence, stream=stream)[name]


@pytest.mark.parametrize("mode", ["secure", "hardened"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_25_standard_deviation_within_two_permille(mode, dtype):
    z = drawn(NoiseSource(mode), 4_000_000, dtype, sigma=1.7).double()
    assert float(z.std()) == pytest.approx(1.7, rel=2e-3)
    assert abs(float(z.mean())) < 6 * 1.7 / 2000
    assert stats.kurtosis(z.numpy()) == pytest.approx(0, abs=0.02)


@pytest.mark.parametrize("mode", ["secure", "hardened"])
def test_25_no_correlation_between_parameters_steps_and_streams(mode):
    source = NoiseSource(mode)
    parts = [
        drawn(source, 200_000, sequence=s, stream=t, name=n).double().numpy()
        for s, t, n in itertools.product((1, 2), ("gradient", "threshold"), ("a", "b"))
    ]
    correlation = np.corrcoef(np.stack(parts)) - np.eye(len(parts))
    assert np.abs(correlation).max() < 6 / math.sqrt(200_000)


THRESHOLDS = [cw.FixedThreshold(0.7), cw.DecayThreshold(2.0, 0.5), cw.QuantileThreshold(), cw.MinErrorThreshold(1.0)]


PAIRS = [(r, t) for r in RULES for t in THRESHOLDS if t.why_not(r) is None]


@pytest.mark.parametrize(("rule", "threshold"), PAIRS, ids=repr)
def test_25_every_rule_and_threshold_gets_its_noise(rule, threshold):
    """Empty batches release pure noise: σ_T·S/B on every coordinate, from the first step on."""
    numbers = {"rule": rule, "threshold": threshold, "sampling_prob": 1e-12, "expected_batch_size": 400, "steps": 2}
    model = nn.Sequential(nn.Linear(2000, 2000, bias=False), nn.Linear(2000, 3, bias=False))
    training = run(model, lr=1.0, preflight=False, noise_multiplier=2.0, **numbers)
    for batch in training.batches((X, Y)):
        before, bound, number = weights(training), training.sensitivity, training.ledger.charges
        training.step(batch)
        expected = training.plan.gradient_noise_multiplier_at(number) * bound / 400
        assert float((weights(training) - before).double().std()) == pytest.approx(expected, rel=2e-3)


def test_25_a_stream_goes_on_beyond_2_to_the_32_blocks():
    key, offset = bytes(range(32)), 8 * 2**32 - 1000
    target = np.zeros(3000)
    chacha_cpu.add_gaussians([chacha_cpu.Part(key, offset, target)], 1.0)
    np.testing.assert_allclose(target, chacha.gaussians(key, offset, 3000).numpy(), atol=1e-12)


@pytest.mark.parametrize("name", ["gram", "products", "noise"])
def test_25_a_native_library_that_gives_other_numbers_is_not_used(name, monkeypatch):
    """A bad build, a bad compiler: here one that writes nothing at all, so that there would be no noise."""

    class Silent:
        def __getattr__(self, name):
            return lambda *given: 0

    monkeypatch.setattr(native, "library", lambda asked: Silent())
    check = {"gram": native.has_gram, "products": native.has_products, "noise": chacha_cpu.is_native}[name].__wrapped__
    with pytest.warns(UserWarning, match=f"{name} was built wrongly"):
        assert not check()


def test_26_tails_reach_beyond_8_5_sigma(monkeypatch, way):
    """What the generators can give comes out unharmed, on the CPU (natively: test_native.py), a GPU, and hardened."""
    with monkeypatch.context() as patched:  # the words that give the largest radius, and angle 0
        patched.setattr(chacha.Keystream, "bytes", lambda self, count, into=None: np.zeros(count, dtype=np.uint8))
        if way == "without":
            assert drawn(NoiseSource(), 300, sigma=2.0).tolist() == pytest.approx([2 * chacha.REACH] * 256 + [0.0] * 44)
    zero = torch.tensor([0])
    assert float(chacha.pair((zero, zero, zero), zero)[0]) > 8.5
    assert rounded_gaussians(np.array([2**6], dtype=np.uint64), 1e3, lambda: 1)[0] > 8.5e3
    assert 11.5 < NoiseSource().reach < 12.5
    assert NoiseSource("hardened").reach == math.inf
    z = drawn(NoiseSource(), 30_000_000).abs()
    assert float(z.max()) > 5.0
    assert 2 * len(z) * stats.norm.sf(5) == pytest.approx(17.2, abs=0.1)
    assert 1 <= int((z > 5).sum()) <= 50


def test_26_the_fast_mode_is_not_certified():
    training = run(noise="fast")
    assert not training.statement()["certified"]
    assert training.statement()["guarantee"].startswith("NOT CERTIFIED")
    assert training.ledger.head["assertions"] == {"noise": "fast: NOT CERTIFIED"}


def test_27_keys_are_fresh_secret_and_not_torchs():
    sources = []
    for _ in range(3):
        torch.manual_seed(0)
        np.random.seed(0)
        sources.append(NoiseSource())
    assert len({source._key for source in sources}) == 3
    assert all(len(source._key) == 32 for source in sources)
    for text in (repr(sources[0]), str(sources[0]), str(vars(run()))):
        assert sources[0]._key.hex() not in text
    assert sources[0]._key not in pickle.dumps(sources[0])
    assert copy.deepcopy(sources[0])._key != sources[0]._key


def test_27_a_seed_is_not_private_everywhere(tmp_path):
    training = run(seed=5, ledger=tmp_path / "run.ledger")
    assert training.statement()["guarantee"].startswith("NOT PRIVATE")
    assert not training.statement()["certified"]
    assert "NOT PRIVATE" in (tmp_path / "run.ledger").read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_28_noise_is_added_in_float32(dtype):
    noised = drawn(NoiseSource(), 1000, dtype)
    assert noised.dtype == torch.float32
    assert len(noised.unique()) > 990  # rounding to 8 bits would leave a few hundred values


def test_29_hardened_runs_train_and_say_so():
    training = run(noise="hardened")
    for batch in training.batches((X, Y)):
        training.step(batch)
    statement = training.statement()
    assert statement["certified"]
    assert statement["noise"] == {"mode": "hardened", "arithmetic_delta": 0.0, "room": 1e-4}
    assert not any("floating-point gaps" in line for line in statement["not_certified"])
    assert any("floating-point gaps" in line for line in run().statement()["not_certified"])


def test_29_angles_are_finer_than_one_word():
    """With 32 bits alone a pair in float64 would tell which of two sums it was added to."""
    cosines, sines = drawn(NoiseSource(), 2**16, torch.float64).numpy().reshape(-1, 2, chacha.LANES).swapaxes(0, 1)
    steps = np.arctan2(sines, cosines) / (2 * math.pi) * 2**32 % 1
    assert stats.kstest(steps.ravel(), "uniform").pvalue > 1e-6


BAD = [0, -1, math.nan, math.inf, -math.inf, True, "1", None, [1.0]]


@pytest.mark.parametrize("value", [v for v in BAD if v is not None], ids=repr)
@pytest.mark.parametrize("name", ["noise_multiplier", "delta", "sampling_prob", "steps", "expected_batch_size"])
def test_30_bad_numbers_are_refused_by_name(name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        plan(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("delta", 1), ("delta", 2.0), ("sampling_prob", 1.1), ("steps", 1.5), ("epsilon", -1)]
)
def test_30_numbers_beyond_their_range(name, value):
    change = {name: value} | ({"noise_multiplier": None} if name == "epsilon" else {})
    with pytest.raises((ValueError, TypeError), match=name):
        plan(**change)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "1"], ids=repr)
def test_30_bad_clip_norms(value):
    with pytest.raises((ValueError, TypeError), match="clip_norm"):
        cw.FixedThreshold(value)
    with pytest.raises((ValueError, TypeError), match="clip_norm"):
        cw.clipped_sum(nn.Linear(6, 1), lambda m, b: m(b[0])[:, 0], (X,), cw.PSAC(), value)


def test_30_noise_itself_refuses():
    for sigma, bound in ((0.0, 1.0), (math.nan, 1.0), (1.0, 0.0), (1.0, math.inf), (-1.0, 1.0)):
        with pytest.raises(ValueError, match="must be a finite number above 0"):
            NoiseSource().add_({"w": torch.zeros(1)}, sensitivity=bound, noise_multiplier=sigma, sequence=1, stream="s")
    with pytest.raises(errors.CannotCertify, match="tails of the noise"):
        run(noise_multiplier=0.05, delta=1e-5, accountant="rdp")
