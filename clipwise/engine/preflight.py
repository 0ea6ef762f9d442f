"""The preflight: is the user's own model per-example, and is it recorded right? Asked before anything is sampled.

Probe records are made from the structure of one record (shapes and dtypes; the values are made up), or
given by the user as public. Private values are never looked at: a stop that depends on them would be a
release. Each record alone, through the user's own collate function, must give the same loss and the same
gradient as inside a batch. That catches batch norm, routing, contrastive losses, T-major layouts, wrong
op rules, and padding, packing or mixing in the collate function.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import default_collate

from .._types import LossFn
from ..batch import map_tensors, tensors
from ..errors import ClipwiseError, CrossExampleOp, UnsupportedOp
from .compare import PreflightReport as PreflightReport
from .compare import Rig, by_itself, written
from .copies import Collate, as_double, collated_by, copy_of, double, move, quiet, still, untouched
from .integers import check_integers
from .op_rule import OpRule
from .probes import MadeUp, lengths, made_record
from .quiet import HIGH, LOW
from .reduce import Paths
from .state import (
    CODE,
    Untouched,
    Writes,
    beside_parameters,
    differing,
    left_behind,
)

_PROBES, _SHORT = 5, 128


@dataclass(frozen=True)
class Probe:
    """Where probe records come from: given and public, private by the user's wish, or (default) made up."""

    records: Sequence[Any] | None = None
    private: bool = False


def preflight(
    model: nn.Module,
    loss_fn: LossFn,
    records: Sequence[Any],
    *,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    engine: str = "bookkeeping",
    op_rules: Mapping[Any, OpRule] | None = None,
    paths: Paths | None = None,
) -> PreflightReport:
    """Check `model` and `loss_fn` on a few public records; raise if one record's gradient depends on another.

    The check runs on a float64 copy, as the model is and with its weights moved a little (a gate that starts at
    zero hides what lies behind it); where no copy can be made or used, on the model itself, with less precision.

    >>> model = nn.Linear(2, 1)
    >>> report = preflight(model, lambda m, x: m(x)[:, 0], [torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])])
    >>> report.unused, report.worst_norm_error < 1e-4
    ((), True)
    """
    if len(records) < 2:
        raise ValueError("The preflight needs at least two records: one cannot show that examples do not mix.")
    how: dict[str, Any] = {"collate_fn": collate_fn, "device": device, "engine": engine}
    return _checked(model, loss_fn, records, "usual", op_rules=op_rules, paths=paths, **how)


def _checked(
    model: nn.Module,
    loss_fn: LossFn,
    records: Sequence[Any],
    kind: Literal["usual", "unlike", "unequal"],
    *,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    engine: str = "bookkeeping",
    op_rules: Mapping[Any, OpRule] | None = None,
    paths: Paths | None = None,
) -> PreflightReport:
    """Records that are `unlike` differ in size by so much that one look, for gross differences, is enough."""
    collated = collated_by(collate_fn, device)

    def check(
        subject: nn.Module, cast: Callable[[Any], Any], tolerance: float, known: Paths, level: float = HIGH
    ) -> PreflightReport:
        tolerance = max(tolerance, 1e-3) if kind == "unlike" else tolerance
        rig = Rig(subject, loss_fn, lambda chosen: cast(collated(chosen)), engine, op_rules, known, tolerance)
        with untouched(subject, level):
            report = rig.compared(records)
        if kind == "usual" and level == HIGH and engine != "vmap" and tolerance < 1:
            with untouched(subject, None):
                rig.by_chance(records)
        return report

    fresh = loss_fn if isinstance(loss_fn, CODE) or kind != "usual" else copy_of(loss_fn)

    def writes(made: Callable[[], nn.Module | None], cast: Callable[[Any], Any]) -> Writes | None:
        if kind != "usual" or fresh is None:
            return None
        return _check_memory(made, fresh, lambda chosen: cast(collated(chosen)), records)

    paths = {} if paths is None else paths
    on_gpu = any(p.device.type == "cuda" for p in model.parameters())
    known: Paths = {} if on_gpu else paths  # tensor cores have other paths than float64
    if (copied := double(model)) is not None:
        try:
            report = check(copied, as_double, 1e-5, known)
            copied = None  # at most one such copy at a time
            report = replace(report, writes=writes(lambda: double(model), as_double))
            if kind == "unlike":
                return report
            if (moved := double(model)) is not None:
                move(moved)
                check(moved, as_double, 1e-5, known, LOW)
            if on_gpu and engine != "vmap":
                fixing = Rig(model, loss_fn, collated, engine, op_rules, paths, 1.0)
                with untouched(model, HIGH):
                    fixing.gradients(collated(records), len(records))
            return report
        except CrossExampleOp:
            raise
        except Exception:
            pass  # a loss that keeps its own model, or float32 written into the code: check the model itself
    twin = copy_of(model) if kind != "unlike" else None
    if kind == "unlike" and _unsteady(model, loss_fn, collated, records):
        rig = Rig(model, loss_fn, collated, engine, op_rules, paths, 1e-3)
        with untouched(model, HIGH):
            return rig.beside_others(records)
    check(model, lambda data: data, 1.0, paths, LOW)  # for what it refuses, and to fix the paths
    exact = {name: replace(path, wide=True) for name, path in paths.items()}
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    tolerance = 5e-2 if half else 1e-4
    report = check(model, lambda data: data, tolerance, exact)
    if twin is not None:
        try:
            report = replace(report, writes=writes(lambda: copy_of(twin), lambda data: data))
            move(twin)
            check(twin, lambda data: data, 10 * tolerance, exact, LOW)
        except CrossExampleOp:
            raise
        except Exception:
            pass  # a loss that keeps its own model
    return report


def _unsteady(
    model: nn.Module, loss_fn: LossFn, collated: Callable[[Sequence[Any]], Any], records: Sequence[Any]
) -> bool:
    """Whether the last digits of float32 in large records are seen in a loss or gradient: then they show nothing."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for record in records:
        found = []
        for nudge in (1.0, 1 + 2.0**-22):
            with untouched(model, HIGH):
                loss, grads = by_itself(model, loss_fn, _times(collated([record]), nudge), parameters)
            found.append([loss, *grads.values()])
        apart, whole = (
            math.sqrt(sum(float((x - f * y).double().square().sum()) for x, y in zip(*found, strict=True)))
            for f in (1, 0)
        )
        if not apart <= 1e-3 * whole:
            return True
    return False


def _times(data: Any, factor: float) -> Any:
    return map_tensors(data, lambda x: x * factor if x.is_floating_point() else x)


def _check_memory(
    made: Callable[[], nn.Module | None],
    loss_fn: LossFn,
    collated: Callable[[Sequence[Any]], Any],
    records: Sequence[Any],
) -> Writes | None:
    """Nothing of a batch may stay in the model, or in a loss that is an object: a later one would depend on it.

    A plain number may, if nothing comes of it (the last loss, kept for a look). Given back is
    what may be written to, since it is the same whatever the data; None where no copy can be made.
    """
    first, second = (records[:2], records[2:4]) if len(records) > 3 else ([records[0]] * 2, [records[1]] * 2)
    after: list[dict[str, Any]] = []
    said: list[torch.Tensor] = []
    for chosen in (first, first, second):  # what differs between the first two is a clock, and not the data
        subject, loss = made(), loss_fn if isinstance(loss_fn, CODE) else copy_of(loss_fn)
        if subject is None or loss is None:
            return None
        before, held = left_behind(subject, loss), Untouched(partial(beside_parameters, subject))
        with quiet(HIGH):
            loss(subject, collated(chosen))
            touched = held.written()
            after.append(left_behind(subject, loss))
            said.append(loss(subject, collated(first)).detach().nan_to_num())
        del subject, held
    again = set(differing(after[0], after[1]))
    if changed := [name for name in differing(after[1], after[2]) if name not in again]:
        plain = all(isinstance(one.get(name, ""), str) for one in after for name in changed)
        if not plain or not torch.allclose(said[1], said[2], rtol=1e-5):
            raise written(changed)
    changing = frozenset(differing(before, after[2]))
    return Writes(changing, frozenset(touched) - changing)


def preflight_dataset(
    model: nn.Module,
    loss_fn: LossFn,
    dataset: Any,
    probe: Probe,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    options: Mapping[str, Any] | None = None,
) -> PreflightReport:
    """The preflight for a data set: made-up records of one record's structure, also with unequal lengths."""
    settings: dict[str, Any] = {"collate_fn": collate_fn, "device": device, **(options or {})}
    if probe.records is not None:
        report = preflight(model, loss_fn, list(probe.records), **settings)
        check_integers(model, loss_fn, list(probe.records), settings, isinstance(probe.records, MadeUp))
        return _warned(report)
    if probe.private:
        return _warned(preflight(model, loss_fn, [dataset[i] for i in range(min(_PROBES, len(dataset)))], **settings))
    like = dataset[0]
    records = [made_record(like, number) for number in range(_PROBES)]
    report = _on_made_up(model, loss_fn, records, settings)
    _tried(model, loss_fn, [made_record(like, n, unlike=True) for n in range(_PROBES)], settings, "unlike")
    for length in lengths(like):
        _unequal(model, loss_fn, like, length, settings)
    check_integers(model, loss_fn, records, settings)
    return _warned(report)


def preflight_batch(model: nn.Module, loss_fn: LossFn, batch: Any, options: Mapping[str, Any]) -> PreflightReport:
    """The preflight where only a collated batch is known: records with the shapes of its rows, stacked again."""
    like = map_tensors(batch, lambda x: x[0])
    records = [made_record(like, number) for number in range(_PROBES)]

    def stacked(chosen: list[Any]) -> Any:
        columns = iter(zip(*(tensors(record) for record in chosen), strict=True))
        return map_tensors(like, lambda x: torch.stack(next(columns)))

    settings: dict[str, Any] = {"collate_fn": stacked, **options}
    report = _on_made_up(model, loss_fn, records, settings)
    _tried(model, loss_fn, [made_record(like, n, unlike=True) for n in range(_PROBES)], settings, "unlike")
    check_integers(model, loss_fn, records, settings)
    return _warned(report)


def _on_made_up(model: nn.Module, loss_fn: LossFn, records: Sequence[Any], settings: dict[str, Any]) -> PreflightReport:
    try:
        return preflight(model, loss_fn, records, **settings)
    except ClipwiseError:
        raise
    except Exception as error:
        raise UnsupportedOp(
            "The preflight called loss_fn(model, batch) on made-up records of the shape of yours, and it failed: "
            f"{error!r}. loss_fn takes the model and a collated batch, and returns one loss per example. Where made-up "
            "values do not suit it, pass a few public records, privatize(..., probe=[record, record, record]); "
            "preflight=False goes without the check."
        ) from error


def _unequal(model: nn.Module, loss_fn: LossFn, like: Any, length: int, settings: dict[str, Any]) -> None:
    """Records of unequal length, where model and collate function take them: padding must not change a record.

    First axes of that length, or all; shorter ones, or longer ones where the model does not take the shorter.
    """
    shorter = [length, max(length // 2, 1), max(2 * length // 3, 1)]
    longer = [length, length + max(length // 2, 2), length + max(length, 3)]
    for every in (False, True):
        for cut in (shorter, longer) if length > 2 else (longer,):
            records = [made_record(like, number, (length, other), every) for number, other in enumerate(cut)]
            if _tried(model, loss_fn, records, settings, "unequal"):
                break
        if length <= _SHORT:  # beyond the multiples of 64 or 128 to which some collate functions pad
            records = [made_record(like, number, (length, length + 130 * number), every) for number in range(2)]
            _tried(model, loss_fn, records, settings, "unequal")


def _tried(
    model: nn.Module,
    loss_fn: LossFn,
    records: list[Any],
    settings: dict[str, Any],
    kind: Literal["unlike", "unequal"],
) -> bool:
    """Whether such records go through at all; where they do, they must not mix."""
    try:
        with still():
            (settings["collate_fn"] or default_collate)(list(records))
        _checked(model, loss_fn, records, kind, **{**settings, "paths": None})
    except CrossExampleOp:
        raise
    except Exception:
        return False  # collate function or model refuse them
    return True


def nobody(collate: Collate, like: Any, device: torch.device | str | None) -> Any:
    """A batch of one made-up record, for a process that has no example while others work."""
    return map_tensors(collate([made_record(like, 0)]), lambda x: x.to(device or x.device))


def _warned(report: PreflightReport) -> PreflightReport:
    if report.unused:
        warnings.warn(
            f"No probe record's loss depends on {', '.join(report.unused[:5])}: they get noise and no gradient. "
            "Freeze them with requires_grad_(False) if that is not meant.",
            stacklevel=4,
        )
    return report
