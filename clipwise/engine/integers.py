"""Records that hold an integer with a meaning (a padding token, a label that is ignored) must not mix either.

Made-up records hold 0 and 1. What padding does is seen only where there is some: in a run at the end, of other
lengths in other records, in a run at the beginning, alone in places, and nowhere.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._types import LossFn
from ..errors import CrossExampleOp
from .compare import Rig
from .constants import Watch, named
from .copies import as_double, collated_by, double, move, untouched
from .probes import map_integers, with_integer
from .quiet import HIGH

_RECORDS, _MOST, _COLUMNS = 5, 8, 8


@dataclass
class _Look:
    """A model, or a copy of it, and what it compares integers with."""

    rig: Rig
    watch: Watch = field(default_factory=Watch)

    def goes_through(self, records: Sequence[Any]) -> bool:
        """Whether such records do at all; where they do, they must not mix."""
        try:
            with untouched(self.rig.model, HIGH), self.watch:
                self.rig.loss_fn(self.rig.model, self.rig.collated(records))
            with untouched(self.rig.model, HIGH):
                self.rig.together(records)
        except CrossExampleOp:
            raise
        except Exception:
            return False  # no such token, a model that asks for as many end tokens in every record, …
        return True

    def check(self, records: Sequence[Any], value: int, columns: Sequence[int], together: bool) -> None:
        """Records with the integer in all their integer tensors, and in each one alone: not all may take it."""
        for only in (*([None] if together else ()), *(columns if len(columns) > 1 or not together else ())):
            try:
                chosen = [with_integer(record, value, number, only) for number, record in enumerate(records)]
                if not self.goes_through(chosen):  # all at once, or then beside the one without, and by themselves
                    for pair in ((0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (2, 3)):
                        self.goes_through([chosen[i] for i in pair])
            except CrossExampleOp as error:
                raise CrossExampleOp(
                    f"{error} Seen with records that hold the integer {value}, which model, loss or collate "
                    "function compares with or names: at the end, at the beginning, or between others. Mask it instead "
                    "of cutting it off for all records at once, or, if every record holds it on one side alone (words, "
                    "then padding), say so with a few public ones that do: privatize(..., probe=[record, record])."
                ) from error
            except ValueError:
                continue  # a type of integers that does not hold it


def check_integers(
    model: nn.Module, loss_fn: LossFn, records: Sequence[Any], settings: dict[str, Any], made_up: bool = True
) -> None:
    """Raise CrossExampleOp if records mix once they hold an integer that means something; warn of too many to try.

    An integer that a tensor of public records holds is where they have it, and is not put elsewhere in that tensor. On
    a GPU nothing is tried: an index out of range would end the process there.
    """
    if any(p.device.type != "cpu" for p in model.parameters()):
        return
    held = [set() if made_up else _held(records, column) for column in range(len(_columns(records[0])))]
    records = [records[i % len(records)] for i in range(_RECORDS)]
    look = _look(model, loss_fn, records, settings) if held else None
    if look is None:
        return
    sizes = [x.numel() for x in _columns(records[0])]
    order = sorted(range(len(sizes)), key=lambda column: -sizes[column])[:_COLUMNS]
    known = list(dict.fromkeys((*named(model, loss_fn, settings.get("collate_fn")), *look.watch.found)))
    for value in known[:_MOST]:
        open_ones = [column for column in order if value not in held[column]]
        look.check(records, value, open_ones, together=not any(value in those for those in held))
    if left := known[_MOST:]:
        shown = ", ".join(map(str, left[:8])) + (", …" if len(left) > 8 else "")
        warnings.warn(
            f"The preflight has tried records that hold {', '.join(map(str, known[:_MOST]))}, but not {shown}, which "
            "model, loss or collate function also compare with, or name. Pass a few public records that hold them, "
            "privatize(..., probe=[record, record, record]).",
            stacklevel=6,
        )


def _columns(record: Any) -> list[Tensor]:
    """The integer tensors, numbers and lists of a record."""
    found: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        found.append(x)
        return x

    map_integers(record, keep)
    return found


def _held(records: Sequence[Any], column: int) -> set[int]:
    """All integers in one tensor of public records."""
    return {int(n) for record in records for x in _columns(record)[column : column + 1] for n in x.unique().tolist()}


def _look(model: nn.Module, loss_fn: LossFn, records: Sequence[Any], settings: dict[str, Any]) -> _Look | None:
    """At a float64 copy whose gates that start at zero are open or, where that does not run, at the model itself."""
    collated = collated_by(settings.get("collate_fn"), settings.get("device"))
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())

    def rig(subject: nn.Module, cast: Callable[[Any], Any], tolerance: float) -> Rig:
        engine, op_rules = settings.get("engine", "bookkeeping"), settings.get("op_rules")
        return Rig(subject, loss_fn, lambda chosen: cast(collated(chosen)), engine, op_rules, {}, tolerance)

    copied = double(model)
    if copied is not None:
        move(copied, zeros=True)
        if (look := _fine(rig(copied, as_double, 1e-5), records)) is not None:
            return look
    return _fine(rig(model, lambda data: data, 5e-2 if half else 1e-3), records)


def _fine(rig: Rig, records: Sequence[Any]) -> _Look | None:
    """A look through which the records go as they are, which has passed already at closer quarters."""
    look = _Look(rig)
    try:
        return look if look.goes_through(records) else None
    except CrossExampleOp:
        return None
