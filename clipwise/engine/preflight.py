"""The preflight: is the user's own model per-example, and is it recorded right? Asked before anything is sampled.

Probe records are made from the structure of one record (shapes and dtypes; the values are made up), or
given by the user as public. Private values are never looked at: a stop that depends on them would be a
release. Each record alone, through the user's own collate function, must give the same loss and the same
gradient as inside a batch. That catches batch norm, routing, contrastive losses, T-major layouts, wrong
op rules, and padding, packing or mixing in the collate function.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import default_collate

from .._types import LossFn
from ..batch import check_size, map_tensors
from ..errors import ClipwiseError, CrossExampleOp, UnsupportedOp
from .ops import OpRule
from .tape import Tape, check_losses

Collate = Callable[[list[Any]], Any]
_PROBES = 3
_DROPOUTS = frozenset(
    (F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout)
)


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


class _NoDropout(TorchFunctionMode):
    """Dropout off, everything else as it is: a batch norm in training mode must stay visible."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
            kwargs = {**dict(zip(names, args, strict=False)), **kwargs, "dropout_p": 0.0}
            args = ()
        return func(*args, **kwargs)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """RNG state and buffers are restored; a buffer that the forward pass changes is refused."""
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    try:
        with torch.random.fork_rng(), torch.enable_grad(), _NoDropout():
            yield
        changed = [name for name, b in model.named_buffers() if not _same(b, buffers.get(name))]
    finally:
        with torch.no_grad():
            for name, b in model.named_buffers():
                if name in buffers and b.shape == buffers[name].shape:
                    b.copy_(buffers[name])
    if changed:
        raise CrossExampleOp(
            f"Buffer(s) {', '.join(changed[:5])} are changed by the forward pass: they gather statistics of the data "
            "that are never noised, and would be published with the model. Turn that off (for example with "
            "track_running_stats=False)."
        )


def _same(x: Tensor, y: Tensor | None) -> bool:
    return y is not None and x.shape == y.shape and torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))


def preflight(
    model: nn.Module,
    loss_fn: LossFn,
    records: Sequence[Any],
    *,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    op_rules: Mapping[Any, OpRule] | None = None,
) -> PreflightReport:
    """Check `model` and `loss_fn` on a few public records; raise if one record's gradient depends on another.

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

    with _untouched(model):
        return _compared(model, loss_fn, collated, records, op_rules)


def _compared(
    model: nn.Module, loss_fn: LossFn, collated: Callable[[Sequence[Any]], Any], records: Sequence[Any], op_rules: Any
) -> PreflightReport:
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    batch = collated(records)
    tape = Tape(model, batch, len(records), op_rules)
    with tape:
        losses = loss_fn(model, batch)
    gradients = tape.backward(losses)
    norms = gradients.norms([(name,) for name in parameters])
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in parameters.values())
    tolerance = 5e-2 if half or torch.is_autocast_enabled() else 2e-3
    floor = 0.01 * float(norms.square().sum(1).sqrt().median()) + 1e-9  # a vanishing gradient has no digits to compare
    worst_loss = worst_norm = 0.0
    for i, record in enumerate(records):
        alone = collated([record])
        loss, truth = _alone(model, loss_fn, alone, parameters)
        loss_error = float((losses[i].detach() - loss).abs() / (loss.abs() + losses.detach().abs().mean() + 1e-6))
        scale = float(truth.square().sum().sqrt()) + floor
        errors = (norms[i] - truth).abs() / scale
        # An upper bound may lie above the truth where terms cancel; what matters is that it is not below.
        norm_error = float(errors.max())
        if not (loss_error <= tolerance and norm_error <= tolerance):
            name = list(parameters)[int(torch.nan_to_num(errors, nan=torch.inf).argmax())]
            raise _mixing(model, loss_fn, batch, alone, i, name, loss_error, norm_error)
        worst_loss, worst_norm = max(worst_loss, loss_error), max(worst_norm, norm_error)
    return PreflightReport(worst_loss, worst_norm, tuple(gradients.unused))


def _alone(
    model: nn.Module, loss_fn: LossFn, data: Any, parameters: Mapping[str, nn.Parameter]
) -> tuple[Tensor, Tensor]:
    """Loss and per-parameter gradient norms of one record by plain autograd: no tape, no rule."""
    losses = loss_fn(model, data)
    check_losses(losses, 1)
    values = list(parameters.values())
    if not losses.requires_grad:
        return losses[0].detach(), torch.zeros(len(values), dtype=torch.float64)
    grads = torch.autograd.grad(losses[0], values, allow_unused=True)
    norms = [0.0 if g is None else float(g.detach().double().norm()) for g in grads]
    return losses[0].detach(), torch.tensor(norms, dtype=torch.float64, device=losses.device)


def _mixing(
    model: nn.Module, loss_fn: LossFn, batch: Any, alone: Any, row: int, name: str, loss_error: float, norm_error: float
) -> CrossExampleOp:
    module = _first_difference(model, loss_fn, batch, alone, row)
    if module is not None:
        where = f"The first module whose output for one record depends on the others is {module}."
    elif loss_error > 1e-2:
        where = "No module's output differs, so the examples meet in loss_fn or in the collate function."
    else:
        where = f"Outputs agree but the gradient of {name} does not: is the batch axis first in every op it enters?"
    return CrossExampleOp(
        f"A record gives another loss or gradient inside a batch than alone (relative difference of the loss "
        f"{loss_error:.2g}, of the gradient {norm_error:.2g}). {where} Clipping then bounds nobody's influence. Usual "
        "causes: batch norm, padding to the longest with pooling over it, mixup, losses across the batch, randomness "
        "other than dropout."
    )


def _first_difference(model: nn.Module, loss_fn: LossFn, batch: Any, alone: Any, row: int) -> str | None:
    together, single = (_outputs(model, loss_fn, data) for data in (batch, alone))
    for (name, kind, many), (_, _, one) in zip(together, single, strict=False):
        if many.dim() == 0 or one.dim() != many.dim() or one.shape[0] == 0 or many.shape[0] % one.shape[0]:
            continue
        length = one.shape[0]
        part = many[row * length : (row + 1) * length]
        if part.shape != one.shape or not torch.allclose(part.float(), one.float(), rtol=1e-2, atol=1e-4):
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


# -- made-up records --------------------------------------------------------------------------------


def _values(shape: Sequence[int], kind: torch.dtype, number: int) -> Tensor:
    """Made-up values without a generator: smooth for floats, 0 and 1 for integers (always a valid class or token)."""
    total = int(np.prod(shape)) if len(shape) else 1
    steps = torch.arange(total, dtype=torch.float64)
    wave = torch.sin(steps * (1.3 + 0.7 * number) + 0.9 * number + 0.4)
    if kind.is_floating_point or kind.is_complex:
        return wave.to(kind).reshape(tuple(shape))
    if kind == torch.uint8:
        return ((wave + 1) * 127).to(kind).reshape(tuple(shape))
    return (wave > 0).to(kind).reshape(tuple(shape))


def made_record(like: Any, number: int, keep: tuple[int, int] | None = None) -> Any:
    """A record of the structure of `like`; keep=(length, shorter) cuts first axes of that length."""
    if isinstance(like, Tensor):
        shape = list(like.shape)
        if keep is not None and shape and shape[0] == keep[0]:
            shape[0] = keep[1]
        return _values(shape, like.dtype, number).to(like.device)
    if isinstance(like, np.ndarray):
        return made_record(torch.as_tensor(like), number, keep).numpy()
    if isinstance(like, bool):
        return bool(number % 2)
    if isinstance(like, (int, np.integer)):
        return type(like)(number % 2)
    if isinstance(like, (float, np.floating)):
        return type(like)(0.5 * number + 0.1)
    if isinstance(like, Mapping):
        return {key: made_record(item, number, keep) for key, item in like.items()}
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*(made_record(item, number, keep) for item in like))
    if isinstance(like, (list, tuple)):
        if keep is not None and len(like) == keep[0]:
            like = like[: keep[1]]
        return type(like)(made_record(item, number, keep) for item in like)
    if like is None:
        return None
    raise UnsupportedOp(
        f"The preflight cannot make up a {type(like).__name__}. Pass a few public records, "
        "privatize(..., probe=[record, record, record]), or preflight=False to go without the check."
    )


def _lengths(like: Any) -> set[int]:
    """First axes that could be sequence lengths."""
    if isinstance(like, (Tensor, np.ndarray)):
        return {like.shape[0]} if like.ndim and like.shape[0] > 2 else set()
    items = like.values() if isinstance(like, Mapping) else like if isinstance(like, (list, tuple)) else ()
    own = {len(like)} if isinstance(like, list) and len(like) > 2 else set()
    return own.union(*(_lengths(item) for item in items))


def preflight_dataset(
    model: nn.Module,
    loss_fn: LossFn,
    dataset: Any,
    probe: Probe,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    op_rules: Mapping[Any, OpRule] | None = None,
) -> PreflightReport:
    """The preflight for a data set: made-up records of one record's structure, also with unequal lengths."""
    settings: dict[str, Any] = {"collate_fn": collate_fn, "device": device, "op_rules": op_rules}
    if probe.records is not None:
        return _warned(preflight(model, loss_fn, list(probe.records), **settings))
    if probe.private:
        return _warned(preflight(model, loss_fn, [dataset[i] for i in range(_PROBES)], **settings))
    like = dataset[0]
    records = [made_record(like, number) for number in range(_PROBES)]
    try:
        report = preflight(model, loss_fn, records, **settings)
    except ClipwiseError:
        raise
    except Exception as error:
        raise UnsupportedOp(
            f"The preflight ran loss_fn on made-up records of the shape of yours and it failed: {error!r}. Pass a few "
            "public records, privatize(..., probe=[record, record, record]), or preflight=False to go without."
        ) from error
    for length in _lengths(like):
        _unequal(model, loss_fn, like, length, settings)
    return _warned(report)


def _unequal(model: nn.Module, loss_fn: LossFn, like: Any, length: int, settings: dict[str, Any]) -> None:
    """Records of unequal length, where model and collate function take them: padding must not change a record."""
    cut = [length, max(length // 2, 1), max(2 * length // 3, 1)]
    records = [made_record(like, number, (length, shorter)) for number, shorter in enumerate(cut)]
    try:
        preflight(model, loss_fn, records, **settings)
    except CrossExampleOp:
        raise
    except Exception:
        return  # this axis is not a length: collate or model refuse it


def _warned(report: PreflightReport) -> PreflightReport:
    if report.unused:
        warnings.warn(
            f"No probe record's loss depends on {', '.join(report.unused[:5])}: they get noise and no gradient. "
            "Freeze them with requires_grad_(False) if that is not meant.",
            stacklevel=4,
        )
    return report
