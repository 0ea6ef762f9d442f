"""Rows 20 to 24: sampling."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from small_runs import X, Y, losses, run, weights
from torch.utils.data import DataLoader, TensorDataset

import clipwise as cw
from clipwise import errors
from clipwise.sampling import PoissonSampler


@pytest.mark.parametrize("threshold", [cw.FixedThreshold(), cw.QuantileThreshold()], ids=repr)
def test_20_an_empty_batch_is_noise_and_charged(threshold):
    def never(model, batch):
        raise AssertionError("called on an empty batch")

    training = run(loss_fn=never, preflight=False, sampling_prob=1e-12, threshold=threshold, rule=cw.Abadi())
    for batch in training.batches((X, Y)):
        before = weights(training)
        assert batch.data is None
        training.step(batch)
        assert not torch.equal(before, weights(training))
    assert training.ledger.charges == training.plan.steps


def test_20_an_empty_batch_in_an_own_loop():
    training = run(sampling_prob=1e-12, preflight=False)
    batch = next(iter(training.batches((X, Y))))
    assert training.microbatches(batch) == []
    training.release()
    assert training.ledger.charges == 1


def test_21_a_large_batch_is_split_and_never_dropped():
    rows = []

    def count(model, batch):
        rows.append(len(batch[0]))
        return losses(model, batch)

    training = run(loss_fn=count, sampling_prob=1.0, expected_batch_size=48, microbatch=7, preflight=False)
    training.step(next(iter(training.batches((X, Y)))))
    assert rows == [7] * 7  # 49 rows, one of them padding


def test_22_only_one_use_poisson_batches_step():
    training = run()
    loader = DataLoader(TensorDataset(X, Y), batch_size=12, shuffle=True)
    with pytest.raises(TypeError, match="takes the dataset, not a DataLoader"):
        training.batches(loader)
    with pytest.raises(errors.WrongBatch, match="shuffled or weighted loader"):
        training.step(next(iter(loader)))
    batches = training.batches((X, Y))
    first = next(batches)
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(errors.WrongBatch):
            duplicate(first)
    with pytest.raises(errors.WrongBatch, match="not stepped"):
        next(batches)  # skipped, perhaps because it was empty
    training.step(first)
    with pytest.raises(errors.WrongBatch):
        training.step(first)
    with pytest.raises(errors.WrongBatch):
        run().step(next(run().batches((X, Y))))  # of another run


def test_22b_coins_are_secret_and_never_torchs(tmp_path):
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        drawn.append(PoissonSampler(0.5).draw(1000).tolist())
    assert drawn[0] != drawn[1]
    training = run(ledger=tmp_path / "run.ledger")
    state = torch.get_rng_state()
    training.step(next(iter(training.batches((X, Y)))))
    assert torch.equal(state, torch.get_rng_state())
    cw.save_checkpoint(training, tmp_path / "run.checkpoint")
    content = cw.checkpoint.read_checkpoint(tmp_path / "run.checkpoint")
    assert set(content) == {"model", "optimizer", "threshold", "plan", "ledger"}
    for file in tmp_path.iterdir():
        assert training._noise._key not in file.read_bytes()
        assert b'batch_size"' not in file.read_bytes().replace(b"expected_batch_size", b"")


def test_22c_there_is_no_hard_cap():
    """A capped batch has another privacy cost: there is no option for it, and an oversized one is refused."""
    training = run(sampling="asserted", expected_batch_size=0.1)
    with pytest.raises(errors.WrongBatch, match="far larger than expected"):
        training.step((X.repeat(3, 1), Y.repeat(3)))
    assert not any("max" in name or "trunc" in name for name in cw.Plan.__dataclass_fields__)


def test_23_coins_resolve_tiny_probabilities():
    """Coins have 53 bits, and all of them count: next to q, the last bit decides."""

    class Given:
        def __init__(self, coins):
            self.coins = np.array(coins)

        def random(self, size):
            return self.coins[:size]

    for q in (1e-7, 0.001, 0.3, 0.7, 1 / 3):
        sampler = PoissonSampler(q)
        coins = sampler._coins.random(10**5)
        assert len(np.unique((coins * 2**53).astype(np.int64) % 2**20)) > 10**4  # the low bits are alive
        sampler._coins = Given([np.nextafter(q, 0), q, np.nextafter(q, 1), q - 2**-40, q + 2**-40])
        assert sampler.draw(5).tolist() == [0, 3]


def test_24_workers_do_not_change_the_draw():
    """Coins are flipped in the main process: workers only load."""
    training = run()
    chosen = []
    for batch in training.batches(TensorDataset(X, Y), num_workers=2):
        chosen.append(0 if batch.data is None else len(batch.data[0]))
        training.step(batch)
    assert len(chosen) == training.plan.steps
    assert len({PoissonSampler(0.5).draw(64).tobytes() for _ in range(20)}) == 20
