"""Made-up records for models of Transformers: text that looks like text, of unequal lengths where they can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..engine.probes import made_record

_ONES, _ZEROS = ("attention_mask", "decoder_attention_mask"), ("token_type_ids",)
_PARTS = (1.0, 0.5, 0.7, 1.0, 0.4)


def text_probes(like: Any, collate: Callable[[list[Any]], Any]) -> list[Any] | None:
    """Five records of the structure of `like`; none of its values. None where they are not known by name."""
    if not isinstance(like, Mapping) or not any(name in like for name in ("input_ids", *_ONES)):
        return None
    for shorter in (True, False):
        records = [_made(like, number, part if shorter else 1.0) for number, part in enumerate(_PARTS)]
        try:
            collate([dict(record) for record in records])
        except Exception:
            continue  # this collate function does not pad
        return records
    return None


def _made(like: Mapping[str, Any], number: int, part: float) -> dict[str, Any]:
    length = len(like["input_ids"]) if "input_ids" in like else 0
    kept = max(2, int(part * length)) if isinstance(like.get("input_ids"), list) else length
    return {name: _column(name, value, number, length, kept, part) for name, value in like.items()}


def _column(name: str, value: Any, number: int, length: int, kept: int, part: float) -> Any:
    if not isinstance(value, (list, Tensor)) or len(value) != length:
        return made_record(value, number)
    if isinstance(value, Tensor) and value.is_floating_point():
        return made_record(value, number)
    place = torch.arange(kept)
    if name in _ONES:  # a tensor keeps its length, and is masked at its end
        made = (place < max(2, int(part * length))).long()
    elif name in _ZEROS:
        made = torch.zeros(kept, dtype=torch.int64)
    elif name == "labels":
        made = torch.where(place % 3 == 2, -100, (place + number) % 2)
    else:
        made = (place * (number + 2) + number) % 2 + (place % 3)
    return made.tolist() if isinstance(value, list) else made.to(value.dtype)
