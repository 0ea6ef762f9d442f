"""The preflight: is the user's own model per-example, and is it recorded right? Asked before anything is sampled.

Probe records are made from the structure of one record (shapes and dtypes; the values are made up), or
given by the user as public. Private values are never looked at: a stop that depends on them would be a
release. Each record alone, through the user's own collate function, must give the same loss and the same
gradient as inside a batch. That catches batch norm, routing, contrastive losses, T-major layouts, wrong
op rules, and padding, packing or mixing in the collate function.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from .._types import LossFn
from ..batch import check_size, map_tensors, tensors
from ..errors import ClipwiseError, CrossExampleOp, UnsupportedOp
from .fallback import vmap_gradients
from .gradients import Gradients, check_losses
from .op_rule import OpRule
from .probes import lengths, made_record
from .products import exact_products
from .quiet import Quiet
from .recompute import no_recompute
from .reduce import Paths, Reduced
from .state import kept_state, restore_state
from .tape import Tape

Collate = Callable[[list[Any]], Any]
_PROBES = 5


@dataclass(frozen=True)
class Probe:
    """Where probe records come from: given and public, private by the user's wish, or (default) made up."""

    records: Sequence[Any] | None = None
    private: bool = False


@dataclass(frozen=True)
class PreflightReport:
    """What was found: the worst relative errors, and the parameters that no probe's loss depends on."""

    worst_loss_error: float
    worst_norm_error: float
    unused: tuple[str, ...]


@contextmanager
def _untouched(model: nn.Module, level: float) -> Iterator[None]:
    """Randomness made repeatable; RNG state and buffers as they were afterwards."""
    buffers = kept_state(model)
    try:
        with torch.random.fork_rng(), torch.enable_grad(), Quiet(level), no_recompute():
            yield
    finally:
        restore_state(model, buffers)


def _differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    def same(x: Tensor, y: Tensor | None) -> bool:
        return y is not None and x.shape == y.shape and torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))

    return [name for name, x in one.items() if not same(x, other.get(name))]


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

    def collated(chosen: Sequence[Any]) -> Any:
        data = (collate_fn or default_collate)(list(chosen))
        check_size(data, len(chosen))
        return data if device is None else map_tensors(data, lambda x: x.to(device))

    def check(
        subject: nn.Module, cast: Callable[[Any], Any], tolerance: float, known: Paths, level: float = 0.98
    ) -> PreflightReport:
        rig = _Rig(subject, loss_fn, lambda chosen: cast(collated(chosen)), engine, op_rules, known, tolerance)
        with _untouched(subject, level):
            return rig.compared(records)

    paths = {} if paths is None else paths
    on_gpu = any(p.device.type == "cuda" for p in model.parameters())
    known: Paths = {} if on_gpu else paths  # tensor cores have other paths than float64
    if (copied := _double(model)) is not None:
        try:
            report = check(copied, _as_double, 1e-5, known)
            _move(copied)
            check(copied, _as_double, 1e-5, known, 0.02)
            if on_gpu and engine != "vmap":
                fixing = _Rig(model, loss_fn, collated, engine, op_rules, paths, 1.0)
                with _untouched(model, 0.98):
                    fixing.gradients(collated(records), len(records))
            return report
        except CrossExampleOp:
            raise
        except Exception:
            pass  # a loss that keeps its own model, or float32 written into the code: check the model itself
    check(model, lambda data: data, 1.0, paths, 0.02)  # for what it refuses, and to fix the paths
    exact = {name: replace(path, wide=True) for name, path in paths.items()}
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())
    return check(model, lambda data: data, 5e-2 if half else 1e-4, exact)


def _double(model: nn.Module) -> nn.Module | None:
    try:
        return copy.deepcopy(model).double()
    except Exception:
        return None


def _as_double(data: Any) -> Any:
    return map_tensors(data, lambda x: x.double() if x.is_floating_point() else x)


def _move(model: nn.Module) -> None:
    """Change every trained entry by a few percent, without a generator."""
    with torch.no_grad():
        for number, p in enumerate(q for q in model.parameters() if q.requires_grad):
            wave = torch.sin(torch.arange(p.numel(), device=p.device, dtype=p.dtype) * 1.7 + number)
            p.add_((0.05 * p.abs().mean() + 0.02) * wave.reshape(p.shape))


@dataclass(frozen=True)
class _Rig:
    """One model under test: compares a batch with its records one by one."""

    model: nn.Module
    loss_fn: LossFn
    collated: Callable[[Sequence[Any]], Any]
    engine: str
    op_rules: Mapping[Any, OpRule] | None
    paths: Paths
    tolerance: float

    def gradients(self, batch: Any, size: int) -> Gradients:
        if self.engine == "vmap":
            return vmap_gradients(self.model, self.loss_fn, batch, size)
        tape = Tape(self.model, batch, size, self.op_rules, self.paths)
        try:
            with tape:
                losses = self.loss_fn(self.model, batch)
        except CrossExampleOp as error:
            raise CrossExampleOp(f"{error}{_suspects(self.model)}") from error
        return tape.backward(losses)

    def compared(self, records: Sequence[Any]) -> PreflightReport:
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        batch, before = self.collated(records), kept_state(self.model)
        gradients = self.gradients(batch, len(records))
        losses, norms = gradients.losses, gradients.norms([(name,) for name in parameters])
        if not (torch.isfinite(losses).all() and torch.isfinite(norms).all()):
            raise _not_finite()
        floor = 0.01 * float(norms.square().sum(1).sqrt().median()) + 1e-9  # a vanishing gradient has no digits
        worst_loss = worst_norm = 0.0
        for i, record in enumerate(records):
            alone = self.collated([record])
            restore_state(self.model, before)
            loss, own = _alone(self.model, self.loss_fn, alone, parameters)
            truth = torch.stack([g.double().norm() for g in own.values()]).to(norms)
            apart = torch.stack([_apart(g, gradients.reduced[name], i) for name, g in own.items()]).to(norms)
            errors = torch.maximum((norms[i] - truth).abs(), apart) / (float(truth.square().sum().sqrt()) + floor)
            if not (torch.isfinite(loss) and torch.isfinite(truth).all()):
                raise _not_finite()
            loss_error = float((losses[i] - loss).abs() / (loss.abs() + losses.abs().mean() + 1e-6))
            norm_error = float(torch.nan_to_num(errors, nan=torch.inf).max())
            if not (loss_error <= self.tolerance and norm_error <= self.tolerance):
                name = list(parameters)[int(torch.nan_to_num(errors, nan=torch.inf).argmax())]
                raise self._mixing(batch, alone, i, name, loss_error, norm_error)
            worst_loss, worst_norm = max(worst_loss, loss_error), max(worst_norm, norm_error)
        self._check_buffers(records)
        return PreflightReport(worst_loss, worst_norm, tuple(gradients.unused))

    def _check_buffers(self, records: Sequence[Any]) -> None:
        """A buffer may change, like a step counter, but not in a way that depends on the records."""
        before = kept_state(self.model)
        after = []
        for chosen in ([records[0]] * 2, [records[1]] * 2):
            with torch.no_grad():
                self.loss_fn(self.model, self.collated(chosen))
            after.append(kept_state(self.model).tensors)
            restore_state(self.model, before)
        if changed := _differing(*after):
            raise CrossExampleOp(
                f"The forward pass writes into the model, by what the data is: {', '.join(changed[:5])}. That is never "
                "noised, and would be published with the model. Turn it off (for example with "
                "track_running_stats=False)."
            )

    def _mixing(
        self, batch: Any, alone: Any, row: int, name: str, loss_error: float, norm_error: float
    ) -> CrossExampleOp:
        module = _first_difference(self.model, self.loss_fn, batch, alone, row)
        if module is not None:
            where = f"The first module whose output for one record depends on the others is {module}."
        elif loss_error > self.tolerance:
            where = "No module's output differs, so the examples meet in loss_fn or in the collate function."
        else:
            where = f"Outputs agree but the gradient of {name} does not: is the batch axis first in every op it enters?"
        return CrossExampleOp(
            f"A record gives another loss or gradient inside a batch than alone (relative difference of the loss "
            f"{loss_error:.2g}, of the gradient {norm_error:.2g}). {where} Clipping then bounds nobody's influence. "
            "Usual causes: batch norm, a collate_fn that mixes or pads to the longest, losses across the batch, "
            "randomness of unusual kinds."
        )


def _not_finite() -> UnsupportedOp:
    return UnsupportedOp(
        "The preflight's records gave a loss or gradient that is not finite, so nothing can be compared. Made-up "
        "values do not suit this model: pass a few public records, privatize(..., probe=[…])."
    )


def _suspects(model: nn.Module) -> str:
    """Modules that normalise by the batch, by name."""
    found = [f"{name!r} ({type(m).__name__})" for name, m in model.named_modules() if hasattr(m, "running_mean")]
    return f" It stands in {', '.join(found[:3])}." if found else ""


def _alone(
    model: nn.Module, loss_fn: LossFn, data: Any, parameters: Mapping[str, nn.Parameter]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradient of one record by plain autograd: no tape, no rule."""
    losses = loss_fn(model, data)
    check_losses(losses, 1)
    values = list(parameters.values())
    found: Sequence[Tensor | None] = [None] * len(values)
    if losses.requires_grad:
        found = torch.autograd.grad(losses[0], values, allow_unused=True)
    grads = (torch.zeros_like(p) if g is None else g.detach() for p, g in zip(values, found, strict=True))
    return losses[0].detach(), dict(zip(parameters, grads, strict=True))


def _apart(truth: Tensor, reduced: Reduced | None, row: int) -> Tensor:
    """‖the engine's own gradient of one row − the truth‖."""
    if reduced is None:
        return truth.double().square().sum().sqrt()
    size = len(reduced.squared_norms())
    one_hot = torch.zeros(size, dtype=torch.float64, device=truth.device)
    one_hot[row] = 1.0
    with exact_products(truth.device):
        found = reduced.weighted_sum(one_hot, torch.ones(size, dtype=torch.bool, device=truth.device))
    difference: Tensor = torch.linalg.vector_norm(found.double() - truth.double())
    return difference


def _first_difference(model: nn.Module, loss_fn: LossFn, batch: Any, alone: Any, row: int) -> str | None:
    together, single = (_outputs(model, loss_fn, data) for data in (batch, alone))
    for (name, kind, many), (_, _, one) in zip(together, single, strict=False):
        if many.dim() == 0 or one.dim() != many.dim() or one.shape[0] == 0 or many.shape[0] % one.shape[0]:
            continue
        length = one.shape[0]
        part = many[row * length : (row + 1) * length]
        if part.shape != one.shape or not torch.allclose(part.float(), one.float(), rtol=1e-4, atol=1e-6):
            return f"{name!r} ({kind})"
    return None


def _outputs(model: nn.Module, loss_fn: LossFn, data: Any) -> list[tuple[str, str, Tensor]]:
    seen: list[tuple[str, str, Tensor]] = []

    def watch(name: str, module: nn.Module) -> Any:
        def hook(_module: nn.Module, _args: Any, out: Any) -> None:
            if isinstance(out, Tensor):
                seen.append((name, type(module).__name__, out.detach().clone()))

        return module.register_forward_hook(hook)

    handles = [watch(name or "model", module) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            loss_fn(model, data)
    finally:
        for handle in handles:
            handle.remove()
    return seen


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
        return _warned(preflight(model, loss_fn, list(probe.records), **settings))
    if probe.private:
        return _warned(preflight(model, loss_fn, [dataset[i] for i in range(min(_PROBES, len(dataset)))], **settings))
    like = dataset[0]
    report = _on_made_up(model, loss_fn, [made_record(like, number) for number in range(_PROBES)], settings)
    for length in lengths(like):
        _unequal(model, loss_fn, like, length, settings)
    return _warned(report)


def preflight_batch(model: nn.Module, loss_fn: LossFn, batch: Any, options: Mapping[str, Any]) -> PreflightReport:
    """The preflight where only a collated batch is known: records with the shapes of its rows, stacked again."""
    like = map_tensors(batch, lambda x: x[0])
    records = [made_record(like, number) for number in range(_PROBES)]

    def stacked(chosen: list[Any]) -> Any:
        columns = iter(zip(*(tensors(record) for record in chosen), strict=True))
        return map_tensors(like, lambda x: torch.stack(next(columns)))

    return _warned(_on_made_up(model, loss_fn, records, {"collate_fn": stacked, **options}))


def _on_made_up(model: nn.Module, loss_fn: LossFn, records: Sequence[Any], settings: dict[str, Any]) -> PreflightReport:
    try:
        return preflight(model, loss_fn, records, **settings)
    except ClipwiseError:
        raise
    except Exception as error:
        raise UnsupportedOp(
            f"The preflight ran loss_fn on made-up records of the shape of yours and it failed: {error!r}. Pass a few "
            "public records, privatize(..., probe=[record, record, record]), or preflight=False to go without."
        ) from error


def _unequal(model: nn.Module, loss_fn: LossFn, like: Any, length: int, settings: dict[str, Any]) -> None:
    """Records of unequal length, where model and collate function take them: padding must not change a record."""
    cut = [length, max(length // 2, 1), max(2 * length // 3, 1)] if length > 2 else [length, length + 2, length + 3]
    records = [made_record(like, number, (length, shorter)) for number, shorter in enumerate(cut)]
    try:
        preflight(model, loss_fn, records, **{**settings, "paths": None})
    except CrossExampleOp:
        raise
    except Exception:
        return  # this axis is not a length: collate or model refuse it


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
