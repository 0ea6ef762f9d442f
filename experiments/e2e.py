"""E2E NLG (A table 4): facts about a restaurant in, a sentence out, by a small decoder trained from scratch.

    facts … · sentence … ·      one row of words; only the sentence's words are to be predicted

A record's own name and neighbour are replaced by marks, in facts and sentence, which looks at nothing but that record.
The vocabulary is that of the development set, which is declared public and trains nothing.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor, nn

from .datasets import Data, Part, find, folders
from .overlap import bleu, rouge_l

LENGTH = 100
PAD, UNKNOWN, SAY, END = range(4)
_FILES = ("trainset.csv.gz", "devset.csv.gz", "testset_w_refs.csv.gz")
_WORD = re.compile(r"[\w£]+|[^\w\s]")
_MARKS = {"name": "xname", "near": "xnear"}


def words_of(facts: str, text: str) -> list[str]:
    """Words of `text` in lower case, names replaced by marks.

    >>> words_of("name[The Eagle], food[English]", "The Eagle is English.")
    ['xname', 'is', 'english', '.']
    """
    for key, mark in _MARKS.items():
        if found := re.search(rf"\b{key}\[([^\]]*)\]", facts):
            text = text.replace(found[1], mark)
    return _WORD.findall(text.lower())


def _pairs(file: str) -> list[tuple[list[str], list[str], str]]:
    """(words of the facts, words of the sentence, the facts themselves)."""
    raw = gzip.decompress((find("e2e", *_FILES) / file).read_bytes()).decode("utf-8")
    rows = csv.DictReader(io.StringIO(raw))
    return [(words_of(r["mr"], r["mr"]), words_of(r["mr"], r["ref"]), r["mr"]) for r in rows]


@lru_cache(maxsize=1)
def _vocabulary(where: tuple[Path, ...]) -> dict[str, int]:
    """Public."""
    seen = {word for facts, text, _ in _pairs(_FILES[1]) for word in (*facts, *text)}
    return {word: number for number, word in enumerate(sorted(seen), END + 1)}


def vocabulary() -> dict[str, int]:
    """Words of the development set, numbered."""
    return _vocabulary(tuple(folders()))


def _rows(pairs: list[tuple[list[str], list[str], str]]) -> Part:
    """Words, and what is to be predicted at each place: 0 for nothing."""
    known = vocabulary()
    x, y = torch.zeros(len(pairs), LENGTH, dtype=torch.long), torch.zeros(len(pairs), LENGTH, dtype=torch.long)
    for i, (facts, text, _) in enumerate(pairs):
        start = [known.get(w, UNKNOWN) for w in facts][: LENGTH // 2]
        row = [*start, SAY, *(known.get(w, UNKNOWN) for w in text), END][: LENGTH + 1]
        x[i, : len(row) - 1] = torch.tensor(row[:-1])
        y[i, len(start) : len(row) - 1] = torch.tensor(row[len(start) + 1 :])
    return x, y


def load() -> Data:
    """The classes are the words."""
    train, test = (_rows(_pairs(_FILES[k])) for k in (0, 2))
    return Data(train, test, END + 1 + len(vocabulary()))


@torch.no_grad()
def written(model: nn.Module, prompts: list[list[int]], device: str, most: int = 50) -> list[list[int]]:
    """The likeliest next word, again and again; prompts of one length go together."""
    model.eval()
    found: dict[int, list[int]] = {}
    for length in {len(p) for p in prompts}:
        which = [i for i, p in enumerate(prompts) if len(p) == length]
        x: Tensor = torch.tensor([prompts[i] for i in which], device=device)
        for _ in range(min(most, LENGTH - length)):
            x = torch.cat([x, model(x)[:, -1].argmax(-1, keepdim=True)], dim=1)
        for i, row in zip(which, x[:, length:].tolist(), strict=True):
            found[i] = row[: row.index(END)] if END in row else row
    return [found[i] for i in range(len(prompts))]


def scores(model: nn.Module, device: str) -> dict[str, float]:
    """BLEU and ROUGE-L on the test set: one text for every set of facts, all its sentences as references."""
    known = vocabulary()
    names = {number: word for word, number in known.items()}
    references: dict[str, list[list[str]]] = {}
    prompts: dict[str, list[int]] = {}
    for facts, text, key in _pairs(_FILES[2]):
        references.setdefault(key, []).append(text)
        prompts[key] = [*[known.get(w, UNKNOWN) for w in facts][: LENGTH // 2], SAY]
    made = [[names.get(w, "?") for w in text] for text in written(model, list(prompts.values()), device)]
    refs = [references[key] for key in prompts]
    return {"bleu": round(bleu(made, refs), 2), "rouge_l": round(rouge_l(made, refs), 2)}
