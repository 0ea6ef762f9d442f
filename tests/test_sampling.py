from __future__ import annotations

import copy
import dataclasses
import math
import os
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import clipwise as cw
from clipwise import sampling
from clipwise.batch import padded_slice
from clipwise.errors import BatchShape, WrongBatch
from clipwise.sampling import Coins, PoissonSampler, poisson_batches


class Numbers(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return torch.tensor([float(i)])


def batches(dataset, q, steps, **options):
    return list(poisson_batches(dataset, PoissonSampler(q), steps, **options))


def test_every_record_joins_with_probability_q_independently():
    sampler = PoissonSampler(0.3)
    joined = np.zeros((2000, 50))
    for row in joined:
        row[sampler.draw(50)] = 1
    assert np.all(np.abs(joined.mean(0) - 0.3) < 6 * math.sqrt(0.21 / 2000))
    sizes = joined.sum(1)
    assert abs(sizes.var() - 50 * 0.21) < 6 * 50 * 0.21 * math.sqrt(2 / 2000)
    correlation = np.corrcoef(joined.T) - np.eye(50)
    assert np.abs(correlation).max() < 7 / math.sqrt(2000)


def test_coins_resolve_tiny_probabilities():
    """Float32 coins would be off by 19% at q = 1e-7; 53 bits are exact to nine digits."""
    sampler = PoissonSampler(1e-7)
    assert float(sampler._coins.random(10_000).min()) % 2**-24 != 0
    joined = sum(len(sampler.draw(5_000_000)) for _ in range(40))
    assert 2 <= joined <= 50  # 20 on average


def test_samplers_are_independent_of_torch_and_of_each_other():
    def draw(sampler):
        torch.manual_seed(0)
        np.random.seed(0)
        return tuple(sampler.draw(200))

    one = PoissonSampler(0.5)
    others = [PoissonSampler(0.5), copy.deepcopy(one), pickle.loads(pickle.dumps(one))]
    assert len({draw(s) for s in (one, *others)}) == 4
    assert draw(PoissonSampler(0.5, seed=3)) == draw(PoissonSampler(0.5, seed=3))


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_dataset_are_collated_and_empty_ones_are_not(workers):
    def collate(records):
        assert records
        return torch.stack(records)

    found = batches(Numbers(4), 0.2, 60, collate_fn=collate, num_workers=workers)
    assert len(found) == 60
    empty = [b for b in found if b._size == 0]
    assert empty
    assert all(b.data is None for b in empty)
    for batch in found:
        if batch._size:
            assert batch.data.shape == (batch._size, 1)
            assert len(set(batch.data.flatten().tolist())) == batch._size


def test_tensors_and_tensor_datasets_are_taken():
    x, y = torch.arange(10.0), torch.arange(10)
    for dataset in ((x, y), TensorDataset(x, y)):
        (batch,) = batches(dataset, 1.0, 1)
        assert torch.equal(batch.data[0], x)
        assert torch.equal(batch.data[1], y)
    (batch,) = batches(x, 1.0, 1)
    assert torch.equal(batch.data, x)
    (batch,) = batches((x.numpy(), y.numpy()), 1.0, 1)
    assert torch.equal(batch.data[0], x)
    (batch,) = batches([x] * 20, 1.0, 1)  # a list is a list of records
    assert batch.data.shape == (20, 10)


@pytest.mark.parametrize(
    ("columns", "say"),
    [
        ([torch.zeros(10), torch.zeros(10)], "2 records. For columns give a tuple"),
        ([np.zeros((10, 3)), np.zeros(10)], "2 records. For columns give a tuple"),
        ((torch.zeros(10), torch.zeros(9)), "as many rows as each other"),
        ({"x": torch.zeros(10), "y": torch.zeros(10)}, "mapping of columns"),
    ],
)
def test_columns_that_would_pass_for_records_are_refused(columns, say):
    with pytest.raises(TypeError, match=say):
        batches(columns, 1.0, 1)


def test_a_dataset_that_inherits_from_torchs_own_keeps_its_indexing():
    class Agreed(TensorDataset):
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return tuple(x[i + 5] for x in self.tensors)

    for workers in (0, 1):
        (batch,) = batches(Agreed(torch.arange(10.0), torch.arange(10)), 1.0, 1, num_workers=workers)
        assert batch.data[1].tolist() == [5, 6, 7]


def test_the_data_of_a_batch_cannot_be_replaced_and_a_batch_is_no_pair():
    (batch,) = batches((torch.arange(7.0),), 1.0, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.data = batch.data[0] * 2
    with pytest.raises(WrongBatch, match=r"stepped whole: training.step\(batch\)"):
        list(batch)


def test_a_batch_cannot_be_copied():
    (batch,) = batches((torch.arange(7.0),), 1.0, 1)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(WrongBatch, match="two samples"):
            attempt(batch)


def test_rows_of_lists_and_arrays_are_split_with_the_tensors():
    data = {"x": torch.arange(4), "w": np.arange(4), "s": ["a", "b", "c", "d"], "k": 2.0, "n": None}
    part, _ = padded_slice(data, 2, 4, 2, 4)
    assert part["x"].tolist() == part["w"].tolist() == [2, 3]
    assert part["s"] == ["c", "d"]
    assert part["k"] == 2.0
    with pytest.raises(BatchShape, match="cannot be split"):
        padded_slice({"x": torch.arange(4), "o": object()}, 2, 4, 2, 4)
    with pytest.raises(BatchShape, match="cannot be split"):
        padded_slice({"x": torch.arange(4), "s": ["a", "b"]}, 2, 4, 2, 4)


def test_loaders_and_iterables_are_refused():
    with pytest.raises(TypeError, match="not a DataLoader"):
        batches(DataLoader(Numbers(4), shuffle=True), 0.5, 1)
    with pytest.raises(TypeError, match="map-style"):
        batches(iter([1, 2]), 0.5, 1)


def test_collate_that_drops_or_merges_rows_is_refused():
    with pytest.raises(BatchShape, match="another number of rows"):
        batches(Numbers(4), 1.0, 1, collate_fn=lambda r: torch.stack(r).sum(0, keepdim=True))
    with pytest.raises(BatchShape, match="first axes"):
        batches(Numbers(4), 1.0, 1, collate_fn=lambda r: (torch.stack(r), torch.ones(2)))


def test_a_batch_does_not_print_its_size_or_content():
    (batch,) = batches((torch.arange(7.0),), 1.0, 1)
    assert "7" not in repr(batch)


def test_padding_repeats_a_row_and_masks_it():
    data = {"x": torch.arange(10).reshape(5, 2), "name": "public"}
    part, mask = padded_slice(data, 3, 5, 4, 5)
    assert part["x"].tolist() == [[6, 7], [8, 9], [8, 9], [8, 9]]
    assert mask.tolist() == [True, True, False, False]
    assert part["name"] == "public"


@pytest.mark.parametrize("q", [0.0, -0.1, 1.1, float("nan")])
def test_bad_probabilities_are_refused(q):
    with pytest.raises(ValueError, match="sampling_prob"):
        PoissonSampler(q)


def test_public_name():
    assert cw.PoissonBatch is not None


@pytest.mark.parametrize("share", [(0, 1), (1, 3)])
def test_coins_of_many_records_are_flipped_in_pieces(monkeypatch, share):
    whole = PoissonSampler(0.3, seed=5, share=share).draw(1000)
    monkeypatch.setattr(sampling, "_PIECE", 7)
    assert PoissonSampler(0.3, seed=5, share=share).draw(1000).tolist() == whole.tolist()
    assert len(PoissonSampler(0.3).draw(0)) == 0


def test_a_child_process_has_coins_of_its_own():
    coins, (read, write) = Coins(), os.pipe()
    coins.uniform()
    if not (child := os.fork()):
        os.write(write, repr(coins.uniform()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert float(os.read(read, 100)) != coins.uniform()


class Named(TensorDataset):
    """May index in its own way, so its records are taken one by one."""


def test_a_kind_of_tensor_data_set_gives_tuples_as_the_preflight_does():
    data = Named(torch.randn(20, 2), torch.zeros(20))
    for workers in (0, 1):
        batch = next(poisson_batches(data, PoissonSampler(1.0), 1, num_workers=workers))
        assert type(batch.data) is tuple
        assert type(sampling.collate_for(data, None)([data[0], data[1]])) is tuple
