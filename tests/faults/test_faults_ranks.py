"""Rows that speak of ranks, without processes: tests/test_distributed.py has the real ones."""

from __future__ import annotations

import pytest
import torch

from clipwise.errors import RankFailed
from clipwise.integrations.distributed import _Together
from clipwise.noise import BLOCK, NoiseSource
from clipwise.sampling import PoissonSampler


def test_24_ranks_draw_from_shares_that_do_not_meet():
    drawn = [set(PoissonSampler(1.0, share=(rank, 3)).draw(100).tolist()) for rank in range(3)]
    assert sum(map(len, drawn)) == 100
    assert set.union(*drawn) == set(range(100))


def test_25_a_rank_with_a_part_gets_the_noise_of_the_whole():
    source, options = NoiseSource(seed=1), {"sensitivity": 1.0, "noise_multiplier": 1.0, "sequence": 1, "stream": "g"}
    whole = source.add_({"w": torch.zeros(2 * BLOCK)}, **options)["w"]
    for start in (0, 5, BLOCK - 1, BLOCK, BLOCK + 7):
        part = source.add_({"w": torch.zeros(9)}, **options, offsets={"w": start})["w"]
        assert torch.equal(part, whole[start : start + 9])


def test_31_a_rank_waits_for_the_charge_of_the_first():
    follower = object.__new__(_Together)
    follower.share, order = (1, 2), []

    def told(numbers):
        order.append("told")
        return [1, 7] if not numbers[0] and len(order) == 1 else [0, 0]

    follower._told = told
    assert follower.charge(lambda: order.append("counted") or 7) == 7
    assert order == ["told", "counted"]
    with pytest.raises(RankFailed):  # the first rank could not charge: nobody goes on
        follower.charge(lambda: order.append("counted") or 8)
    assert order == ["told", "counted", "told"]


def test_31_ranks_that_count_differently_stop():
    follower = object.__new__(_Together)
    follower.share, follower._told = (1, 2), lambda numbers: [1, 7]
    with pytest.raises(RankFailed, match="other charges"):
        follower.charge(lambda: 6)
