"""Made-up records for models of Transformers: none of one's own values, of unequal lengths where they can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.probes import MadeUp, made_record
from ..engine.state import kept_state, restore_state

_ONES, _ZEROS = ("attention_mask", "decoder_attention_mask"), ("token_type_ids",)
_PARTS = (1.0, 0.5, 0.7, 0.9, 0.4)
_KINDS: tuple[tuple[type, ...], ...] = ((list, Tensor), (list,), ())  # what is cut: all sequences, lists only, nothing


def made_records(model: nn.Module, losses: Callable[[list[Any]], Tensor], like: Any) -> list[Any] | None:
    """Five records of the structure of `like`, as unequal as collate function and model take them; None if unknown.

    Every column that is a sequence varies in length, columns of one length together.
    """
    if not isinstance(like, Mapping):
        return None
    before = kept_state(model)
    for cut in _KINDS:
        records = MadeUp(_record(like, number, cut) for number in range(len(_PARTS)))
        try:
            with torch.random.fork_rng(), torch.no_grad():
                fine = bool(torch.isfinite(losses(records)).all())
        except Exception:
            continue  # this collate function does not pad, or this model takes one length only
        finally:
            restore_state(model, before)
        if fine:
            return records
    return None


def _record(like: Mapping[str, Any], number: int, cut: tuple[type, ...]) -> dict[str, Any]:
    lengths = sorted({len(v) for v in like.values() if _is_sequence(v)})
    return {name: _column(name, value, number, lengths, cut) for name, value in like.items()}


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0)


def _column(name: str, value: Any, number: int, lengths: list[int], cut: tuple[type, ...]) -> Any:
    if isinstance(value, str):
        return ""
    if not _is_sequence(value):
        return made_record(value, number)
    length = len(value)
    part = _PARTS[(number + lengths.index(length)) % len(_PARTS)]
    short = max(2, int(part * length))
    kept = short if isinstance(value, cut) and length > 2 else length
    whole = isinstance(value, Tensor) and (value.dim() > 1 or value.is_floating_point())
    if whole or (isinstance(value, list) and not (value and isinstance(value[0], int))):
        return made_record(value, number, (length, kept))
    place = torch.arange(kept)
    if name in _ONES:  # where nothing is cut, the end is masked
        made = (place < min(short, kept)).long()
    elif name in _ZEROS:
        made = torch.zeros(kept, dtype=torch.int64)
    elif name == "labels":
        made = torch.where(place % 3 == 2, -100, (place + number) % 2)
    else:
        made = (place * (number + 2) + number) % 2 + (place % 3)
    return made.tolist() if isinstance(value, list) else made.to(value.dtype)
