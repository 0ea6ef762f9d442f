"""GLUE: sentences and pairs of them as tokens of MiniLM, in the published layouts; the public dev set tests."""

from __future__ import annotations

import csv
import gzip
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import encoder
from .datasets import Data, find

LENGTH = 64  # tokens; with both ends marked
_SAME = {"content": "sentence"}  # what some copies call a column


@dataclass(frozen=True)
class Task:
    """Files of a task, their columns, and the words that are its labels, in order."""

    train: str
    dev: str
    texts: tuple[str, ...]
    label: str
    labels: tuple[str, ...] = ("0", "1")


TASKS = {
    "sst2": Task("train.tsv", "dev.tsv", ("sentence",), "label"),
    "qnli": Task("train.tsv", "dev.tsv", ("question", "sentence"), "label", ("entailment", "not_entailment")),
    "qqp": Task("train.tsv", "dev.tsv", ("question1", "question2"), "is_duplicate"),
    "mnli": Task(
        "train.tsv",
        "dev_matched.tsv",
        ("sentence1", "sentence2"),
        "gold_label",
        ("entailment", "neutral", "contradiction"),
    ),
}


def _file(name: str, file: str) -> Path:
    """Plain, or gzipped where that is what is there."""
    try:
        return find(name, f"{file}.gz") / f"{file}.gz"
    except FileNotFoundError:
        return find(name, file) / file


def rows_of(path: Path, task: Task) -> list[tuple[tuple[str, ...], int]]:
    """Texts and labels; GLUE's own files have lines without a label, which are left out."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    table = csv.DictReader(io.StringIO(raw.decode("utf-8")), delimiter="\t", quoting=csv.QUOTE_NONE)
    table.fieldnames = [_SAME.get(name, name) for name in table.fieldnames or ()]
    if missing := {*task.texts, task.label} - set(table.fieldnames):
        raise ValueError(f"{path} has no column {', '.join(sorted(missing))}.")
    return [
        (tuple(row[c] or "" for c in task.texts), task.labels.index(row[task.label]))
        for row in table
        if row[task.label] in task.labels
    ]


def tokens_of(texts: Sequence[tuple[str, ...]], length: int = LENGTH) -> torch.Tensor:
    """[n, length], padded with 0; the encoder has one kind of token: only the marks tell the two of a pair apart."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(find("minilm", "tokenizer.json") / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    given = [t[0] if len(t) == 1 else t for t in texts]
    return torch.tensor([found.ids for found in tokenizer.encode_batch(given)])


def glue(name: str, length: int = LENGTH) -> Data:
    """One task; sentences that are trained on have at most `length` tokens."""
    task = TASKS[name]
    parts = []
    for file, longest in ((task.train, length), (task.dev, LENGTH)):
        texts, labels = zip(*rows_of(_file(name, file), task), strict=True)
        parts.append((tokens_of(texts, longest), torch.tensor(labels)))
    return Data(parts[0], parts[1], len(task.labels))


def last_layer(name: str, length: int = 24) -> Data:
    """One task as what MiniLM's last layer sees of it: the layers before are frozen, so a CPU runs them only once."""
    data = glue(name, length)
    model = encoder.classifier(data.classes)
    train, test = ((encoder.before_last(model, x), y) for x, y in (data.train, data.test))
    return Data(train, test, data.classes)
