"""Poisson sampling: every example joins every batch by its own secret coin.

Coins have 53 bits and come from a ChaCha20 generator with a fresh 256-bit key from the operating
system, never from torch's. A batch that `batches` yields can be stepped once, and no other object can,
so that a shuffled loader cannot be accounted as Poisson by accident.
"""

from __future__ import annotations

import hashlib
import os
import random
import secrets
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset, default_collate

from ._check import count, probability
from .batch import check_size, map_tensors
from .chacha import Keystream
from .errors import WrongBatch


class Dataset(Protocol):
    """A map-style dataset: a length and items by number."""

    def __len__(self) -> int:
        """How many records there are."""

    def __getitem__(self, index: int) -> Any:
        """One record."""


Collate = Callable[[list[Any]], Any]
_COLUMNS = (torch.Tensor, np.ndarray)
_PIECE = 2**20  # records whose coins are flipped at once


@dataclass(frozen=True, eq=False, repr=False)
class PoissonBatch:
    """One Poisson batch, to be used once. `.data` is the collated batch, None when no example was drawn.

    Its size is secret, and it cannot be copied: the same sample stepped twice is not two samples. Nor may its data be
    changed: what is done to a batch belongs into the collate function or loss_fn, where the preflight sees it. Another
    tensor, and ops in place, are noticed; what goes past torch's own count (`x.data`, `x.numpy()`) is not.
    """

    data: Any
    _size: int
    _drawn: list[tuple[Any, Any]] = field(init=False)

    def __post_init__(self) -> None:
        """Remember what it holds."""
        object.__setattr__(self, "_drawn", list(_held(self.data)))

    def as_drawn(self) -> PoissonBatch:
        """This batch, unless something was put into it or changed in place."""
        now = list(_held(self.data))
        same = len(now) == len(self._drawn)
        if not same or any(a is not b or m != n for (a, m), (b, n) in zip(now, self._drawn, strict=True)):
            raise WrongBatch(
                "The batch was changed since batches() gave it. What is done to a batch belongs into the collate "
                "function or loss_fn, where the preflight sees it."
            )
        return self

    def __copy__(self) -> PoissonBatch:
        raise WrongBatch("A Poisson batch cannot be copied: the same sample stepped twice is not two samples.")

    def __deepcopy__(self, memo: dict[int, Any]) -> PoissonBatch:
        return self.__copy__()

    def __reduce__(self) -> tuple[Any, ...]:
        raise WrongBatch("A Poisson batch cannot be pickled: the same sample stepped twice is not two samples.")

    def __repr__(self) -> str:
        return "PoissonBatch()"

    def __iter__(self) -> Iterator[Any]:
        raise WrongBatch(
            "A Poisson batch is stepped whole: training.step(batch). loss_fn(model, data) receives its data; for a "
            "loop of your own see training.microbatches(batch)."
        )


def _held(data: Any) -> Iterator[tuple[Any, Any]]:
    """All that a batch holds, part by part: an object that stays, and what changes if it is changed in place."""
    if isinstance(data, (Mapping, list, tuple)):
        yield type(data), len(data)
        for key in data if isinstance(data, Mapping) else ():
            yield None, key
        for item in data.values() if isinstance(data, Mapping) else data:
            yield from _held(item)
    elif is_dataclass(data) and not isinstance(data, type):
        for name in data.__dataclass_fields__:
            yield from _held(getattr(data, name))
    else:
        yield data, _mark(data)


def _mark(leaf: Any) -> int | None:
    """Changes with what a tensor or an array holds; None where nobody counts."""
    if isinstance(leaf, torch.Tensor):
        return None if leaf.is_inference() else leaf._version
    counted = isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject
    return zlib.crc32(leaf.tobytes()) if counted else None


class Coins:
    """Secret uniform numbers with 53 bits, from a fresh key of the operating system.

    >>> 0 <= Coins().uniform() < 1
    True
    """

    def __init__(self) -> None:
        """Draw a key."""
        self._renew()

    def _renew(self) -> None:
        self._coins = Keystream(secrets.token_bytes(32))
        self._process = os.getpid()  # last: another thread must not take the old key for this process's

    def uniform(self) -> float:
        """In [0, 1)."""
        if os.getpid() != self._process:
            self._renew()
        return float(self._coins.random(1)[0])


class PoissonSampler:
    """Secret coins: each of `size` records joins with probability q, independently, at every draw.

    >>> [len(PoissonSampler(1.0).draw(5)) for _ in range(2)]
    [5, 5]
    """

    def __init__(self, sampling_prob: float, seed: int | None = None, share: tuple[int, int] = (0, 1)) -> None:
        """`seed` is for repeatable runs that are NOT PRIVATE. share=(rank, ranks) draws from every ranks-th record."""
        self.sampling_prob = probability(sampling_prob=sampling_prob)
        if self.sampling_prob < 1e-12:
            raise ValueError(f"sampling_prob={sampling_prob!r} is below 1e-12: coins of 53 bits are too coarse for it.")
        self._seed, self._share = seed, share
        self._renew()

    def _renew(self) -> None:
        key = secrets.randbits(256) if self._seed is None else int(self._seed) + (self._share[0] << 128)
        self._coins = Keystream(key.to_bytes(32, "little"))
        self._process = os.getpid()  # last, as above

    def draw(self, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The indices of one batch, possibly none."""
        if os.getpid() != self._process and self._seed is None:
            self._renew()
        mine = np.arange(size)[slice(self._share[0], None, self._share[1])]
        pieces = (mine[i : i + _PIECE] for i in range(0, len(mine), _PIECE))  # so that memory holds few coins at a time
        drawn = [piece[self._coins.random(len(piece)) < self.sampling_prob] for piece in pieces]
        return np.concatenate([mine[:0], *drawn])

    def __deepcopy__(self, memo: dict[int, Any]) -> PoissonSampler:
        """A copy flips its own coins."""
        return PoissonSampler(self.sampling_prob, self._seed, self._share)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings, never the state."""
        return PoissonSampler, (self.sampling_prob, self._seed, self._share)


class _Rows:
    """A bare tensor as a data set: a record is a row, a batch a tensor."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.rows[index]


def as_dataset(dataset: Any) -> Dataset:
    """Accept a map-style dataset, a tensor, or a tuple of tensors or arrays with equal first axes."""
    if isinstance(dataset, torch.Tensor):
        return _Rows(dataset)
    if isinstance(dataset, (tuple, list)) and dataset and all(isinstance(x, _COLUMNS) and x.ndim for x in dataset):
        rows = {len(x) for x in dataset}
        if isinstance(dataset, tuple) and len(rows) == 1:
            return TensorDataset(*(torch.as_tensor(x) for x in dataset))
        if isinstance(dataset, tuple):
            raise TypeError("The columns of a data set must have as many rows as each other.")
        if len(rows) == 1 and 1 < len(dataset) <= 4 < max(rows):
            raise TypeError(
                "A list is a list of records, so this would be a data set of "
                f"{len(dataset)} records. For columns give a tuple, such as (x, y); for records a data set class."
            )
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise TypeError(
            "A mapping of columns is no data set. Give a tuple of tensors, such as (x, y), or a data set whose records "
            "are mappings."
        )
    if isinstance(dataset, DataLoader):
        raise TypeError(
            "batches() takes the dataset, not a DataLoader: a loader that shuffles cannot be accounted as Poisson. "
            "Pass loader.dataset, and collate_fn= and num_workers= as you gave them to the loader."
        )
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"batches() needs a map-style dataset (len and indexing), got {type(dataset).__name__}: Poisson sampling "
            "must be able to draw any record at any step."
        )
    return dataset  # type: ignore[no-any-return]


def collate_for(dataset: Any, collate_fn: Collate | None) -> Collate:
    """What makes a batch of records: the user's function, or torch's, which turns tuples into lists: not ours."""
    if collate_fn is None and isinstance(as_dataset(dataset), TensorDataset):
        return _collate_tuples
    return collate_fn or default_collate


def _collate_tuples(records: list[Any]) -> Any:
    return tuple(default_collate(records))


def _parts(record: Any) -> Iterator[bytes]:
    """A record as bytes, part by part; of what is unknown only the type."""
    if isinstance(record, torch.Tensor):
        flat = record.detach().cpu().contiguous().flatten()
        yield f"{record.dtype} {tuple(record.shape)}".encode() + flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(record, Mapping):
        for key, item in record.items():
            yield repr(key).encode()
            yield from _parts(item)
    elif isinstance(record, (list, tuple)):
        for item in record:
            yield from _parts(item)
    elif isinstance(record, (str, bytes, int, float, complex, bool, np.generic, type(None))):
        yield repr(record).encode()
    else:  # arrays, pictures
        yield type(record).__name__.encode() + (record.tobytes() if hasattr(record, "tobytes") else b"")


def fingerprint(records: Dataset, ranks: int) -> str:
    """Of a few records: ranks whose data sets are ordered differently would share records. Nothing for one rank."""
    if ranks == 1 or not len(records):
        return ""
    states = random.getstate(), np.random.get_state()
    found = hashlib.blake2b(digest_size=16)
    try:
        with torch.random.fork_rng(devices=[]):  # so that augmentation in the data set is the same on all
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            for i in sorted({0, 1 % len(records), len(records) // 2, len(records) - 1}):
                found.update(b"\0".join(_parts(records[i])))
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
    return found.hexdigest()


def draws(sampler: PoissonSampler, size: int, steps: int) -> Iterator[Sequence[int]]:
    """`steps` lists of indices."""
    count(steps=steps)
    for _ in range(steps):
        yield sampler.draw(size).tolist()


def poisson_batches(
    dataset: Any,
    sampler: PoissonSampler,
    steps: int,
    *,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    num_workers: int = 0,
) -> Iterator[PoissonBatch]:
    """Yield `steps` one-use batches. The collate function is never called with an empty list."""
    records = as_dataset(dataset)
    chosen = draws(sampler, len(records), steps)
    if type(records) in (TensorDataset, _Rows) and collate_fn is None:  # others may have an indexing of their own
        collated = _indexed(records, chosen)  # type: ignore[arg-type]
    else:
        collated = _loaded(records, chosen, collate_for(records, collate_fn), num_workers)
    for data, size in collated:
        if size:
            check_size(data, size)
            if device is not None:
                data = map_tensors(data, lambda x: x.to(device, non_blocking=True))
        yield PoissonBatch(data, size)


def _indexed(records: TensorDataset | _Rows, indices: Iterator[Sequence[int]]) -> Iterator[tuple[Any, int]]:
    for chosen in indices:
        rows = torch.tensor(chosen, dtype=torch.int64)
        if not chosen:
            yield None, 0
        elif isinstance(records, _Rows):
            yield records.rows[rows.to(records.rows.device)], len(chosen)
        else:
            yield tuple(x[rows.to(x.device)] for x in records.tensors), len(chosen)


def _loaded(
    records: Dataset, indices: Iterator[Sequence[int]], collate: Collate, num_workers: int
) -> Iterator[tuple[Any, int]]:
    if num_workers == 0:
        for chosen in indices:
            yield (collate([records[i] for i in chosen]) if chosen else None), len(chosen)
        return
    loader: DataLoader[Any] = DataLoader(
        records,  # type: ignore[arg-type]
        batch_sampler=indices,  # type: ignore[arg-type]
        collate_fn=_CollateOrNothing(collate),
        num_workers=num_workers,
    )
    yield from loader


@dataclass(frozen=True)
class _CollateOrNothing:
    """Collates in a worker process; an empty list of records never reaches the user's function."""

    collate: Collate

    def __call__(self, records: list[Any]) -> tuple[Any, int]:
        return (self.collate(records) if records else None), len(records)
