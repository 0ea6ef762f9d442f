"""The generator, by its reference in plain torch ops; the kernel is compared with it in benchmarks/noise.py."""

from __future__ import annotations

import math
import threading

import numpy as np
import pytest
import torch
from scipy import stats

from clipwise import chacha

KEY = bytes(range(32))


def words(key, counter, nonce=(0, 0, 0), rounds=20):
    tail = tuple(torch.tensor([w]) for w in (counter, *nonce))
    return [int(w) for w in chacha.block_words(key, tail, rounds)]


def test_block_of_rfc_8439_section_2_3_2():
    expected = (
        "e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3 "
        "466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"
    )
    assert words(KEY, 1, (0x09000000, 0x4A000000, 0)) == [int(w, 16) for w in expected.split()]


def test_zero_key_of_rfc_8439_appendix_a_1():
    stream = b"".join(w.to_bytes(4, "little") for w in words(bytes(32), 0))
    assert stream.hex().startswith("76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7")
    stream = b"".join(w.to_bytes(4, "little") for w in words(bytes(32), 1))
    assert stream.hex().startswith("9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed")


def test_openssl_makes_the_same_words():
    ours = words(KEY, 0) + words(KEY, 1)
    assert chacha.Keystream(KEY).words(16).tolist() == [ours[i] | ours[i + 1] << 32 for i in range(0, 32, 2)]
    assert chacha.Keystream(KEY, 1).words(8).tolist() == [ours[i] | ours[i + 1] << 32 for i in range(16, 32, 2)]


@pytest.mark.parametrize("reads", [(1024,), (64, 960), (100, 28, 1, 895), (0, 512, 512)])
def test_a_keystream_goes_on_where_the_lower_counter_word_begins_anew(reads):
    """OpenSSL's call ends after 2^32 blocks; a long run flips more coins than that."""
    last = 2**32 - 8
    blocks = [words(KEY, b % 2**32, (b // 2**32, 0, 0)) for b in range(last, last + 16)]
    stream = chacha.Keystream(KEY, last)
    found = b"".join(stream.bytes(count).tobytes() for count in reads)
    assert found == b"".join(w.to_bytes(4, "little") for block in blocks for w in block)


def test_two_threads_never_get_the_same_words():
    stream, found = chacha.Keystream(KEY), []

    def read():
        for _ in range(50):
            found.append(stream.bytes(4096).tobytes())

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    whole = chacha.Keystream(KEY).bytes(100 * 4096).tobytes()
    assert set(found) == {whole[i : i + 4096] for i in range(0, len(whole), 4096)}


def test_memory_of_the_caller_is_used():
    mine = np.zeros(200 + chacha.ROOM, dtype=np.uint8)
    found = chacha.Keystream(KEY).bytes(200, mine)
    assert found.base is mine
    assert found.tobytes() == chacha.Keystream(KEY).bytes(200).tobytes()


def test_uniform_numbers_have_53_bits():
    uniform = chacha.Keystream(KEY).random(100_000)
    assert 0 <= uniform.min() < 1e-3 < 1 - 1e-3 < uniform.max() < 1
    assert stats.kstest(uniform, "uniform").pvalue > 1e-4
    stream = chacha.Keystream(KEY)
    stream.bytes = lambda count: np.full(count, 255, dtype=np.uint8)
    assert stream.random(1)[0] == 1 - 2.0**-53


def test_numbers_are_gaussian():
    z = chacha.gaussians(KEY, 0, 1_000_000).numpy()
    assert abs(z.mean()) < 4e-3
    assert z.std() == pytest.approx(1, abs=2e-3)
    assert stats.kurtosis(z) == pytest.approx(0, abs=0.03)
    assert stats.kstest(z[:200_000], "norm").pvalue > 1e-4
    for k in (2, 3, 4):
        expected = 2 * len(z) * stats.norm.sf(k)
        assert abs((np.abs(z) > k).sum() - expected) < 5 * math.sqrt(expected)


def test_elements_are_uncorrelated_within_and_between_chunks():
    z = chacha.gaussians(KEY, 0, 512 * 1024)
    for lag in (1, 2, 255, 256, 257, 1024, 2048):
        assert abs(float((z[lag:] * z[:-lag]).mean())) < 5 / math.sqrt(len(z))
    other = chacha.gaussians(bytes(31) + b"\1", 0, len(z))
    assert abs(float((z * other).mean())) < 5 / math.sqrt(len(z))


@pytest.mark.parametrize(("offset", "length"), [(0, 1), (2047, 2), (2048, 2048), (5000, 777), (3, 0)])
def test_any_part_agrees_with_the_whole(offset, length):
    whole = chacha.gaussians(KEY, 0, 8000)
    assert torch.equal(chacha.gaussians(KEY, offset, length), whole[offset : offset + length])


def test_tails_reach_as_far_as_is_said():
    lowest, zero = torch.tensor([0]), torch.tensor([0])
    far, _ = chacha.pair((lowest, lowest, lowest), zero)
    assert float(far) == pytest.approx(chacha.REACH, rel=1e-12)
    assert chacha.REACH > 11.5
    ones = torch.tensor([0xFFFFFFFF])
    near, _ = chacha.pair((ones, ones, ones), zero)
    assert 0 <= float(near) < 1e-4
    assert all(bool(x.isfinite().all()) for x in chacha.pair((ones, lowest, lowest), ones))


def test_high_blocks_use_the_second_counter_word():
    far = chacha.CHUNK * 2**25  # block 2^33
    assert not torch.equal(chacha.gaussians(KEY, far, 100), chacha.gaussians(KEY, 0, 100))
    assert torch.isfinite(chacha.gaussians(KEY, far, 100)).all()


def test_keys_have_32_bytes():
    with pytest.raises(ValueError, match="32 bytes"):
        chacha.key_words(b"short")
