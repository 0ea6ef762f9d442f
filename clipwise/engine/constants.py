"""Integers that mean something to a model, its loss or a collate function, such as the number of the padding token.

Three places say so: names (`padding_idx`, `pad_token_id`) on the model's modules, their configuration, the loss and the
collate function's tokenizer; the ops that take such an integer (embedding, cross entropy); and comparisons of integer
tensors for being equal, while made-up records go through.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..batch import tensors

LARGEST = 2**20  # an integer beyond it is no token: some models and collate functions make as many places as it says
_SAME = frozenset({"eq", "ne", "not_equal", "isin"})
_GIVEN = {"embedding": (2, "padding_idx"), "embedding_bag": (10, "padding_idx")}
_GIVEN |= {"cross_entropy": (4, "ignore_index"), "nll_loss": (4, "ignore_index")}
_IGNORED = -100  # what both of them leave out if they are not told
_NAME = re.compile(r"_?(pad|padding|eos|bos|sep|cls|mask|unk|blank|ignore)(_token)?_(id|idx|index)|pad", re.IGNORECASE)


class Watch(TorchFunctionMode):
    """Which integers the data is compared with, in the order in which they are met."""

    def __init__(self) -> None:
        """Nothing is found yet."""
        super().__init__()
        self.found: dict[int, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See one op."""
        kwargs = kwargs or {}
        self.found.update(dict.fromkeys(_meant(getattr(func, "__name__", "").strip("_"), args, kwargs)))
        return func(*args, **kwargs)


def _meant(name: str, args: Any, kwargs: dict[str, Any]) -> Iterator[int]:
    """The integers that an op gives a meaning to."""
    sides = [*args, *kwargs.values()]
    if name in _SAME and any(isinstance(x, Tensor) and _is_integer(x) for x in sides[:2]):
        for side in sides[:2]:
            yield from integers(side, 64 if name == "isin" and side is sides[1] else 1)
    elif name in _GIVEN and any(map(_is_integer, tensors(sides))):
        place, key = _GIVEN[name]
        given = args[place] if len(args) > place else kwargs.get(key, _IGNORED if key == "ignore_index" else None)
        table = next((x for x in tensors(sides) if x.is_floating_point()), None)
        for n in integers(given):
            yield n + len(table) if key == "padding_idx" and n < 0 and table is not None else n


def _is_integer(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def integers(x: Any, most: int = 1) -> list[int]:
    """A constant as integers; none where it holds other things, more than `most`, or such as are no tokens."""
    if isinstance(x, Tensor):
        if not _is_integer(x) or x.numel() > most or x.device.type == "meta":
            return []
        try:
            x = x.flatten().tolist()
        except RuntimeError:
            return []  # under vmap
    found = x if isinstance(x, (list, tuple)) and len(x) <= most else [x]
    whole = [int(n) for n in found if isinstance(n, (int, np.integer)) and not isinstance(n, bool)]
    return [n for n in whole if abs(n) <= LARGEST]


def named(model: nn.Module, loss_fn: Any, collate: Any) -> Iterator[int]:
    """Integers that are kept under names such as `pad_token_id`."""
    owners: dict[int, Any] = {}
    for x in (*model.modules(), loss_fn, collate):
        kept = _attributes(x)
        for owner in (x, *(kept.get(name) for name in ("config", "tokenizer", "processing_class"))):
            owners[id(owner)] = owner
    for owner in owners.values():
        for name, value in _attributes(owner).items():
            if _NAME.fullmatch(name):
                yield from integers(value)
        if hasattr(type(owner), "pad_token_id"):  # tokenizers make it of other attributes
            try:
                yield from integers(owner.pad_token_id)
            except Exception:
                continue


def _attributes(x: Any) -> dict[str, Any]:
    """What an object keeps, without running any code of its own."""
    try:
        return dict(vars(x))
    except TypeError:
        return {}
