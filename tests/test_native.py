"""Native code against float64 loops in numpy, at every level that this CPU has; and without it, the same."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from ways import by, forget

import clipwise as cw
from clipwise import chacha, chacha_cpu, native
from clipwise.engine import contributions
from clipwise.engine.contributions import Outer
from clipwise.engine.reduce import reduce_uses
from clipwise.noise import NoiseSource

sys.path.append(str(Path(__file__).parents[1]))
import hatch_build

LEVELS = ["avx512", "avx2", "base"]
sizes, sides = st.integers(1, 5), st.integers(1, 200)


@pytest.fixture(autouse=True, scope="module")
def _built():
    """Skipped without a compiler, failed where there is one and nothing was built."""
    with by("native"):
        pass


@pytest.fixture(params=LEVELS)
def level(request, monkeypatch):
    """One of the builds, where this CPU can run it."""
    mine = native.level()
    if LEVELS.index(request.param) < LEVELS.index(mine):
        pytest.skip(f"this CPU has {mine}")
    monkeypatch.setattr(native, "level", lambda: request.param)
    forget()
    yield request.param
    forget()


def numbers(*shape, seed=0, scale=1.0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape) * scale).float()


def laid_out(x, seed):
    """The same numbers otherwise in memory: axes in another order, rows apart, from the middle of a line."""
    order = np.random.default_rng(seed).permutation(x.dim())
    stored = x.permute(*order.tolist())
    wider = torch.full((stored.numel() * 2 + 3,), float("nan"))[3:].as_strided(
        stored.shape, [2 * s for s in stored.contiguous().stride()]
    )
    wider.copy_(stored)
    return wider.permute(*np.argsort(order).tolist())


def test_what_the_compiler_could_build_is_there(level):
    """`make setup` builds it; where this fails, the package was not installed after a change of a C file."""
    assert native.library("gram") is not None
    assert native.library("products") is not None
    assert native.library("noise") is not None
    assert native.has_gram()
    assert native.has_products()
    assert chacha_cpu.is_native()


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), sizes, st.integers(0, 290), st.integers(1, 70), st.integers(1, 700), st.integers(0, 9))
def test_gram_sums(b, g, t, p, d, seed):
    b, t = (b, t) if g * t * d < 50_000 else (1, min(t, 150))
    left, right = numbers(b, g, t, p, seed=seed), numbers(b, g, t, d, seed=seed + 1)
    total, squares = native.gram_sums(laid_out(left, seed), laid_out(right, seed + 1))
    inner = [(x.double() @ x.double().mT) for x in (left, right)]
    most = (inner[0].abs() * inner[1].abs()).sum((2, 3))
    assert bool(((total - (inner[0] * inner[1]).sum((2, 3))).abs() <= 1e-6 * most).all())
    for found, whole in zip(squares, inner, strict=True):
        torch.testing.assert_close(found, whole.diagonal(dim1=2, dim2=3), rtol=2e-6, atol=1e-30)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 4), sizes, st.integers(0, 520), st.integers(1, 300), st.integers(1, 140), st.integers(0, 9))
def test_gradients_of_examples(b, g, t, p, d, seed):
    b, g = (b, g) if t * p * d < 10**6 else (2, 1)
    left, right = numbers(b, g, t, p, seed=seed), numbers(b, g, t, d, seed=seed + 1)
    made, squares = native.example_gradients(laid_out(left, seed), laid_out(right, seed + 1))
    known = left.double().mT @ right.double()
    most = left.double().abs().mT @ right.double().abs()
    assert made.shape == known.shape
    assert bool(((made - known).abs() <= 1e-5 * most + 1e-30).all())
    torch.testing.assert_close(squares, made.double().square().sum((1, 2, 3)), rtol=1e-12, atol=0)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 40), st.integers(1, 3), st.integers(0, 40), st.integers(1, 200), st.integers(1, 200), st.booleans()
)
def test_weighted_sums(b, g, t, p, d, weigh_left):
    left, right = numbers(b, g, t, p, seed=p), numbers(b, g, t, d, seed=d)
    weights, keep = numbers(b, seed=b).abs(), numbers(b, seed=b + 1) > -1
    known = torch.einsum("b,bgtp,bgtd->gpd", (weights * keep).double(), left.double(), right.double())
    most = torch.einsum("b,bgtp,bgtd->gpd", weights.double(), left.double().abs(), right.double().abs())
    left[~keep], right[~keep] = torch.nan, torch.inf
    found = native.weighted_sum(laid_out(left, p), laid_out(right, d), weights, keep, weigh_left)
    assert bool(((found - known).abs() <= 1e-5 * most + 1e-30).all())


SHAPES = [(3, 2, 150, 35, 530), (2, 1, 260, 7, 16), (2, 1, 600, 4, 8), (1, 1, 257, 5, 28), (3, 1, 300, 260, 144)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_level_gives_the_numbers_of_float64(level, shape):
    """The properties above run at this CPU's own level; this one at all. Views end where their memory does."""
    b, g, t, p, d = shape
    left, right = numbers(b, g, t, p), numbers(b, g, t, d, seed=1)
    inner = [(x.double() @ x.double().mT) for x in (left, right)]
    total, squares = native.gram_sums(left, right)
    torch.testing.assert_close(total, (inner[0] * inner[1]).sum((2, 3)), rtol=1e-5, atol=0)
    torch.testing.assert_close(squares[1], inner[1].diagonal(dim1=2, dim2=3), rtol=1e-5, atol=0)
    known = left.double().mT @ right.double()
    weights = torch.tensor([0.5, 0.0, 2.0])[:b]
    weighted = torch.einsum("b,bgpd->gpd", weights.double(), known)
    for turned in (False, True):
        one, other = (x.mT.contiguous().mT if turned else x for x in (left, right))
        made, of_squares = native.example_gradients(one, other)
        torch.testing.assert_close(made.double(), known, rtol=0, atol=1e-3)
        torch.testing.assert_close(of_squares, known.square().sum((1, 2, 3)), rtol=1e-5, atol=0)
        for weigh_left in (False, True):
            found = native.weighted_sum(one, other, weights, weights != 0, weigh_left)
            torch.testing.assert_close(found.double(), weighted, rtol=0, atol=1e-3)
    target = np.zeros(10_000)
    native.add_noise([bytes(range(32))], [5], [target], 1.5)
    np.testing.assert_allclose(target, 1.5 * chacha.gaussians(bytes(range(32)), 5, 10_000).numpy(), atol=1e-13)


def test_what_has_no_numbers_in_memory_is_refused():
    zero = torch._efficientzerotensor((2, 1, 3, 4))
    assert not native.gram_sums(zero, zero)[0].any()
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(2, 1, 3, 4))
    for bad in (fake, torch.zeros(2, 1, 3, 4).double(), torch.zeros(2, 1, 3, 4, device="meta")):
        for run in (native.gram_sums, native.example_gradients):
            with pytest.raises(TypeError, match="Native code reads"):
                run(bad, bad)
    good = torch.zeros(2, 1, 3, 4)
    for other in (good[:1], good[:, :, :2], good.expand(2, 2, 3, 4)):
        for run in (native.gram_sums, native.example_gradients):
            with pytest.raises(ValueError, match="sides of one product"):
                run(good, other)
    with pytest.raises(ValueError, match="contiguous"):
        native.add_noise([bytes(32)], [0], [np.zeros(4, dtype=np.float16)], 1.0)
    with pytest.raises(ValueError, match="contiguous"):
        native.add_noise([bytes(32)], [0], [np.zeros(8)[::2]], 1.0)


def test_nothing_of_nobody():
    assert native.gram_sums(torch.zeros(0, 1, 3, 4), torch.zeros(0, 1, 3, 5))[0].shape == (0, 1)
    assert native.example_gradients(torch.zeros(0, 1, 3, 4), torch.zeros(0, 1, 3, 5))[0].shape == (0, 1, 4, 5)
    nobody = torch.zeros(0)
    found = native.weighted_sum(torch.zeros(0, 1, 3, 4), torch.zeros(0, 1, 3, 5), nobody, nobody > 0, True)
    assert torch.equal(found, torch.zeros(1, 4, 5))
    reduced = reduce_uses([Outer(torch.zeros(0, 1, 9, 4), torch.zeros(0, 1, 9, 5))], (4, 5), "w", {})
    assert reduced.squared_norms().shape == (0,)
    noised = NoiseSource().add_({"w": torch.zeros(0)}, sensitivity=1.0, noise_multiplier=1.0, sequence=1, stream="g")
    assert noised["w"].shape == (0,)


def test_a_library_of_another_text_is_not_used(monkeypatch, tmp_path):
    """Of an older file, say, whose structures were others."""
    for path in native.folder().iterdir():
        if path.suffix in (".so", ".c"):
            shutil.copy(path, tmp_path)
    monkeypatch.setattr(native, "folder", lambda: tmp_path)
    forget()
    try:
        assert native.library("gram") is not None
        native.library.cache_clear()
        (tmp_path / "gram.c").write_text((tmp_path / "gram.c").read_text() + "\n")
        assert native.library("gram") is None
    finally:
        monkeypatch.undo()
        forget()


def test_noise_is_the_same_to_the_last_bit_on_every_cpu(monkeypatch):
    found = []
    for name in LEVELS[LEVELS.index(native.level()) :]:
        monkeypatch.setattr(native, "level", lambda name=name: name)
        forget()
        if native.library("noise") is not None:
            found.append(np.zeros(100_000))
            native.add_noise([bytes(range(32))], [0], [found[-1]], 1.0)
    forget()
    assert found
    assert all(np.array_equal(found[0], other) for other in found)


def pairs(words, scale):
    """What noise.c makes of words [16, 256]."""
    numbers, words = np.empty((4, 2, 256)), np.ascontiguousarray(words, dtype=np.uint32)
    native.library("noise").clipwise_pairs(
        ctypes.c_void_p(words.ctypes.data), ctypes.c_double(scale), ctypes.c_void_p(numbers.ctypes.data)
    )
    return numbers


def test_pairs_of_any_words(level):
    """Also where logarithm and angle begin and end, change their branch, or lose digits."""
    ends = [0, 1, 2**30 - 1, 2**30, 2**31 - 1, 2**31, 2**31 + 1, 3 * 2**30 + 1, 2**32 - 2, 2**32 - 1, 0xB504F333]
    generator = np.random.default_rng(0)
    words = generator.integers(0, 2**32, (16, 256), dtype=np.uint32)
    for w in range(16):
        chosen = generator.random(256) < 0.5
        words[w, chosen] = generator.choice(ends, chosen.sum())
    found = pairs(words, 1.0)
    for k in range(4):
        high, middle, low, angle = torch.from_numpy(words[4 * k : 4 * k + 4].astype(np.int64))
        known = np.stack(chacha.pair((high, middle, low), angle))
        near_zero = (high >= 2**32 - 2).numpy()  # u is 1 but for its last digits, and its logarithm has only those
        np.testing.assert_allclose(found[k][:, ~near_zero], known[:, ~near_zero], rtol=0, atol=2e-14)
        np.testing.assert_allclose(found[k][:, near_zero], known[:, near_zero], rtol=0, atol=1e-9)
    np.testing.assert_allclose(pairs(np.zeros((16, 256)), 2.0)[:, 0], 2 * chacha.REACH, rtol=1e-15)


@pytest.mark.parametrize("count", [1, 2, 7, 33])
def test_an_example_is_the_same_to_the_last_bit_whoever_is_beside_it(count):
    left, right = numbers(40, 1, 70, 9, scale=1e3), numbers(40, 1, 70, 27, seed=1)
    right[:, :, 35:] = -right[:, :, :35]
    left[:, :, 35:] = left[:, :, :35]  # what is left is rounding
    whole = native.gram_sums(left, right)[0], native.example_gradients(left, right)[0]
    part = native.gram_sums(left[3 : 3 + count], right[3 : 3 + count])[0]
    assert torch.equal(part, whole[0][3 : 3 + count])
    assert torch.equal(native.example_gradients(left[3 : 3 + count], right[3 : 3 + count])[0], whole[1][3 : 3 + count])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_nothing(monkeypatch, threads):
    left, right, weights = numbers(9, 2, 150, 140), numbers(9, 2, 150, 300, seed=1), torch.rand(9)

    def all_of_it():
        target = np.zeros(50_000, dtype=np.float32)
        native.add_noise([bytes(32)] * 3, [0, 9, 70_000], [target[:7], target[7:20_000], target[20_000:]], 1.0)
        summed = native.weighted_sum(left, right, weights, torch.ones(9, dtype=torch.bool), True)
        return [
            *native.gram_sums(left, right),
            *native.example_gradients(left, right),
            summed,
            torch.from_numpy(target),
        ]

    before = all_of_it()
    monkeypatch.setattr(native, "threads", lambda: threads)
    assert all(torch.equal(a, b) for a, b in zip(before, all_of_it(), strict=True))


def test_what_is_left_out_changes_nobody_elses_rounding():
    left, right, weights = numbers(40, 1, 9, 30), numbers(40, 1, 9, 50, seed=1), torch.rand(40)
    keep = torch.arange(40) % 7 != 3
    found = native.weighted_sum(left, right, weights, keep, False)
    left[~keep], right[~keep] = 0.0, 0.0
    assert torch.equal(found, native.weighted_sum(left, right, weights, torch.ones_like(keep), False))


@pytest.mark.parametrize("name", ["gram", "products", "noise"])
@pytest.mark.parametrize("kind", LEVELS)
def test_nothing_is_read_or_written_beyond_its_memory(kind, name, tmp_path):
    """Under the compiler's sanitizers, on arrays of just their size."""
    if LEVELS.index(kind) < LEVELS.index(native.level()):
        pytest.skip("not on this CPU")
    driver, program = Path(__file__).with_name("native_driver.c"), tmp_path / "driver"
    sanitizers = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror"]
    part = [f"-D{name.upper()}", f'-DPART="{native.folder() / f"{name}.c"}"', *hatch_build.LEVELS[kind]]
    options = ["-std=gnu11", "-O1", "-g", "-Wno-unknown-pragmas", "-Wno-unused-parameter", *sanitizers, *part]
    compiler = next(filter(shutil.which, hatch_build.COMPILERS))
    command = [compiler, *options, driver, "-o", program, "-lm"]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode and "asan" in made.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert made.returncode == 0, made.stderr
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_two_threads_at_once():
    left, right = numbers(20, 1, 64, 100), numbers(20, 1, 64, 90, seed=1)
    known, found = native.gram_sums(left, right)[0], []
    several = [threading.Thread(target=lambda: found.append(native.gram_sums(left, right)[0])) for _ in range(4)]
    for one in several:
        one.start()
    for one in several:
        one.join()
    assert len(found) == 4
    assert all(torch.equal(known, x) for x in found)


def test_a_fork_works_alone():
    """OpenMP's other threads do not live in it."""
    left, right = numbers(20, 1, 64, 100), numbers(20, 1, 64, 90, seed=1)
    known = native.gram_sums(left, right)[0]
    if not (child := os.fork()):
        signal.alarm(20)  # it would wait for ever
        same = native.threads() == 1 and bool((native.gram_sums(left, right)[0].numpy() == known.numpy()).all())
        os._exit(0 if same else 7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_none_where_it_is_switched_off():
    with by("without"):
        assert not any([native.has_gram(), native.has_products(), chacha_cpu.is_native()])
        assert not contributions.is_native(torch.zeros(2, 1, 3, 4))


def test_a_file_that_is_no_library_is_not_used(monkeypatch, tmp_path):
    (tmp_path / f"gram_{native.level()}.so").write_bytes(b"not a library")
    monkeypatch.setattr(native, "folder", lambda: tmp_path)
    forget()
    try:
        assert not any([native.has_gram(), native.has_products(), chacha_cpu.is_native()])
    finally:
        forget()


MODELS = {
    "text": lambda: torch.nn.Sequential(
        torch.nn.Embedding(20, 24), torch.nn.TransformerEncoderLayer(24, 3, 40, 0.0, batch_first=True)
    ),
    "images": lambda: torch.nn.Sequential(
        torch.nn.Unflatten(1, (1, 8, 8)),
        torch.nn.Conv2d(1, 6, 3, 2, padding=1),
        torch.nn.Tanh(),
        torch.nn.Conv2d(6, 4, 2, dilation=2, groups=2),
        torch.nn.Flatten(),
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_whole_models_with_and_without(name):
    torch.manual_seed(0)
    model, data = MODELS[name](), torch.randint(0, 20, (9, 64))
    data = data if name == "text" else data.float()

    def sums():
        return cw.clipped_sum(model, lambda m, x: m(x).square().flatten(1).sum(1), data, cw.Abadi(), 0.3)

    found = sums()
    with by("without"):
        known = sums()
    torch.testing.assert_close(found.norms, known.norms, rtol=2e-3, atol=0)
    for key, value in found.grads.items():
        torch.testing.assert_close(value, known.grads[key], rtol=1e-2, atol=1e-5)
