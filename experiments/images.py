"""Data sets of JPEG files, in their published layouts, made square and small: imagenette and CelebA."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .datasets import Data, Part, find

IMAGENETTE_SIDE, CELEBA_SIDE = 96, 64


def square(path: Path, side: int) -> np.ndarray:
    """The middle of an image as bytes [3, side, side]."""
    from PIL import Image

    with Image.open(path) as opened:
        image = opened.convert("RGB")
    edge = min(image.size)
    left, top = (image.width - edge) // 2, (image.height - edge) // 2
    small = image.resize((side, side), Image.Resampling.BILINEAR, (left, top, left + edge, top + edge))
    return np.asarray(small).transpose(2, 0, 1)


def read(paths: Sequence[Path], side: int) -> Tensor:
    """Pixels in [-1, 1]: no statistic of the data."""
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda path: square(path, side), paths))
    return torch.from_numpy(np.stack(found)).float() / 127.5 - 1


def imagenette(side: int = IMAGENETTE_SIDE) -> Data:
    """{train,val}/<class>/*.JPEG: ten classes of ImageNet."""
    folder = find("imagenette", "train", "val")
    classes = sorted(p.name for p in (folder / "train").iterdir() if p.is_dir())

    def part(name: str) -> Part:
        paths = [
            (path, label) for label, c in enumerate(classes) for path in sorted((folder / name / c).glob("*.JPEG"))
        ]
        return read([p for p, _ in paths], side), torch.tensor([label for _, label in paths])

    return Data(part("train"), part("val"), len(classes))


def celeba(attribute: str | None = None) -> Data:
    """img_align_celeba/*.jpg, and text files: one row of -1 and 1 per image; 0, 1 or 2 for train, validation, test.

    One attribute makes two classes; all of them make as many bits.
    """
    files = ("list_attr_celeba.txt", "list_eval_partition.txt", "img_align_celeba")
    folder = find("celeba", *files)
    _, names, *lines = (folder / files[0]).read_text().splitlines()
    bits = {line.split()[0]: [int(int(v) > 0) for v in line.split()[1:]] for line in lines}
    parts = dict(line.split() for line in (folder / files[1]).read_text().splitlines())

    def part(number: str) -> Part:
        chosen = [name for name in bits if parts[name] == number]
        labels = torch.tensor([bits[n] for n in chosen])
        wanted = labels.float() if attribute is None else labels[:, names.split().index(attribute)]
        return read([folder / files[2] / n for n in chosen], CELEBA_SIDE), wanted

    return Data(part("0"), part("2"), len(names.split()) if attribute is None else 2)
