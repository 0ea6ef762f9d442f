"""A batch beside its records one by one: losses, gradients, and what the forward pass writes into the model."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .._types import LossFn
from ..errors import CrossExampleOp, UnsupportedOp
from .fallback import vmap_gradients
from .gradients import Gradients, check_losses
from .op_rule import OpRule
from .products import exact_products
from .reduce import Paths, Reduced
from .state import Writes, differing, kept_state, restore_state
from .tape import Tape

_SIZES, _AGAIN = (2, 8), 16  # other sizes of batches; how often one is made again where something is drawn
_MANY = 10  # a tenth of a batch is somebody, and one can lie three standard deviations out


@dataclass(frozen=True)
class PreflightReport:
    """What was found: the worst relative errors, and the parameters that no probe's loss depends on."""

    worst_loss_error: float
    worst_norm_error: float
    unused: tuple[str, ...]
    writes: Writes | None = None  # None: not known


def _drawn() -> tuple[Any, ...]:
    """Where the generators stand that are not held still."""
    arrays = np.random.get_state(legacy=False)
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]
    return random.getstate(), repr(arrays), [bytes(state.numpy()) for state in states]


@dataclass(frozen=True)
class Rig:
    """One model under test: compares a batch with its records one by one."""

    model: nn.Module
    loss_fn: LossFn
    collated: Callable[[Sequence[Any]], Any]
    engine: str
    op_rules: Mapping[Any, OpRule] | None
    paths: Paths
    tolerance: float

    def gradients(self, batch: Any, size: int) -> Gradients:
        """Of every record of a batch, by the engine."""
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
        """Each record alone gives the loss and gradient that it has in the batch, or it raises."""
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        began = _drawn()
        batch, before = self.collated(records), kept_state(self.model)
        gradients = self.gradients(batch, len(records))
        again = 0 if began == _drawn() else _AGAIN
        losses, norms = gradients.losses, gradients.norms([(name,) for name in parameters])
        if not (torch.isfinite(losses).all() and torch.isfinite(norms).all()):
            raise _not_finite()
        floor = 0.01 * float(norms.square().sum(1).sqrt().median()) + 1e-9  # a vanishing gradient has no digits
        worst_loss = worst_norm = 0.0
        one_hot = torch.eye(len(records), dtype=torch.float64)
        for i, record in enumerate(records):
            alone = self.collated([record])
            restore_state(self.model, before)
            loss, own = by_itself(self.model, self.loss_fn, alone, parameters)
            truth = torch.stack([g.double().norm() for g in own.values()]).to(norms)
            apart = torch.stack([_apart(g, gradients.reduced[name], one_hot[i]) for name, g in own.items()]).to(norms)
            errors = torch.maximum((norms[i] - truth).abs(), apart) / (float(truth.square().sum().sqrt()) + floor)
            if not (torch.isfinite(loss) and torch.isfinite(truth).all()):
                raise _not_finite()
            loss_error = float((losses[i] - loss).abs() / (loss.abs() + losses.abs().mean() + 1e-6))
            norm_error = float(torch.nan_to_num(errors, nan=torch.inf).max())
            if not (loss_error <= self.tolerance and norm_error <= self.tolerance):
                name = list(parameters)[int(torch.nan_to_num(errors, nan=torch.inf).argmax())]
                raise self._mixing(batch, alone, i, name, loss_error, norm_error)
            worst_loss, worst_norm = max(worst_loss, loss_error), max(worst_norm, norm_error)
        restore_state(self.model, before)
        if self.engine != "vmap":  # which never runs a batch as one
            self._check_sizes(records, losses, again)
        self._check_buffers(records)
        return PreflightReport(worst_loss, worst_norm, tuple(gradients.unused))

    def together(self, records: Sequence[Any]) -> None:
        """One look: the losses, and a weighted sum of the gradients, are those of the records one by one.

        A record that gives no finite number (a mean over labels that are all ignored) must give none in both.
        """
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        batch, before = self.collated(records), kept_state(self.model)
        gradients = self.gradients(batch, len(records))
        losses, weights = gradients.losses.detach(), torch.linspace(1, 2, len(records), dtype=torch.float64)
        truth = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
        typical = float(losses[torch.isfinite(losses)].abs().sum()) / len(losses)
        keep, worst, place = torch.zeros(len(records), dtype=torch.bool), -1.0, 0
        for i, record in enumerate(records):
            restore_state(self.model, before)
            loss, own = by_itself(self.model, self.loss_fn, self.collated([record]), parameters)
            keep[i] = bool(torch.isfinite(loss)) and all(bool(torch.isfinite(g).all()) for g in own.values())
            for name, grad in own.items() if keep[i] else ():
                truth[name].add_(grad, alpha=float(weights[i]))
            error = float((losses[i] - loss).abs() / (loss.abs() + typical + 1e-6))
            if not math.isfinite(error):
                error = 0.0 if torch.isfinite(losses[i]) == torch.isfinite(loss) else math.inf
            worst, place = max((worst, place), (error, i))
        restore_state(self.model, before)
        if not keep.any():
            raise _not_finite()
        whole = math.sqrt(sum(float(g.square().sum()) for g in truth.values()))
        apart = {name: float(_apart(g, gradients.reduced[name], weights, keep)) for name, g in truth.items()}
        name = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
        error = apart[name] / (whole + 1e-9)
        if not (worst <= self.tolerance and error <= self.tolerance):
            raise self._mixing(batch, self.collated([records[place]]), place, name, worst, error)

    def beside_others(self, records: Sequence[Any]) -> PreflightReport:
        """Each record gives the same loss in batches of one size, whoever is beside it, or it raises.

        Rounding is the same in all of them: for models whose gradients follow the last digits of their input.
        """
        before, worst = kept_state(self.model), 0.0
        for i, record in enumerate(records):
            batches = [self.collated([record, other]) for j, other in enumerate(records) if j != i]
            first: Tensor | None = None
            for batch in batches:
                loss = self.loss_fn(self.model, batch).detach()[0]
                restore_state(self.model, before)
                if not torch.isfinite(loss):
                    raise _not_finite()
                first = loss if first is None else first
                apart = float((loss - first).abs() / (first.abs() + 1e-6))
                if not apart <= self.tolerance:
                    raise self._mixing(batch, self.collated([record]), 0, "", apart, 0.0)
                worst = max(worst, apart)
        return PreflightReport(worst, math.inf, ())

    def _check_buffers(self, records: Sequence[Any]) -> None:
        """A buffer may change, like a step counter, but not in a way that depends on the records."""
        before, after = kept_state(self.model), []
        for chosen in (records[:2], records[-2:]) if len(records) > 2 else ([records[0]] * 2, [records[1]] * 2):
            self.loss_fn(self.model, self.collated(chosen))
            after.append(kept_state(self.model).tensors)
            restore_state(self.model, before)
        if changed := differing(*after):
            raise written(changed)

    def _check_sizes(self, records: Sequence[Any], losses: Tensor, again: int) -> None:
        """Batches of other sizes give the same losses, and so do more of them where something was drawn."""
        before, count = kept_state(self.model), len(records)
        tried = [[i % count for i in range(size)] for size in (*_SIZES, *(count for _ in range(again)))]
        for chosen in [*tried, [0] + _MANY * [1], [1] + _MANY * [0]]:  # one beside many that are alike stands out
            batch = self.collated([records[i] for i in chosen])
            found = self.loss_fn(self.model, batch).detach()
            restore_state(self.model, before)
            errors = (found - losses[chosen]).abs() / (losses.abs()[chosen] + losses.abs().mean() + 1e-6)
            worst = int(torch.nan_to_num(errors, nan=torch.inf).argmax())
            if not errors[worst] <= self.tolerance:
                alone = self.collated([records[chosen[worst]]])
                raise self._mixing(batch, alone, worst, "", float(errors[worst]), 0.0)

    def by_chance(self, records: Sequence[Any]) -> None:
        """With the same random numbers a record has the same loss, whoever the others are, or it raises.

        Numbers that differ from row to row, as in training: a permutation of rows that chance makes is seen here alone.
        """
        before, drawn = kept_state(self.model), False
        first = list(range(len(records)))
        other = [i if i % 2 == 0 else (i + 1) % len(records) for i in first]
        for seed in range(_AGAIN):
            found = []
            for chosen in (first, other):
                torch.manual_seed(seed)
                np.random.seed(seed)
                random.seed(seed)
                began = _drawn()
                losses = self.loss_fn(self.model, self.collated([records[i] for i in chosen])).detach()
                drawn = drawn or began != _drawn()
                restore_state(self.model, before)
                found.append(losses[::2].nan_to_num())
            apart = (found[0] - found[1]).abs() / (found[0].abs() + found[0].abs().mean() + 1e-6)
            if not float(apart.max()) <= self.tolerance:
                raise CrossExampleOp(
                    "With the same random numbers, a record has another loss when other records of its batch are "
                    f"replaced (relative difference {float(apart.max()):.2g}). Clipping then bounds nobody's "
                    "influence. Usual causes: mixing by chance (mixup, random negatives, swaps), in the loss, the "
                    "model or the collate_fn; or random numbers whose count depends on the data."
                )
            if not drawn:
                return

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


def by_itself(
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


def _apart(truth: Tensor, reduced: Reduced | None, weights: Tensor, keep: Tensor | None = None) -> Tensor:
    """‖the engine's own weighted sum over the rows, or those to keep, − the truth‖."""
    if reduced is None:
        return truth.double().square().sum().sqrt()
    weights = weights.to(truth.device)
    with exact_products(truth.device):
        kept = torch.ones_like(weights, dtype=torch.bool) if keep is None else keep.to(truth.device)
        found = reduced.weighted_sum(weights, kept)
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


def written(changed: Sequence[str]) -> CrossExampleOp:
    """The refusal of what changes with the data."""
    return CrossExampleOp(
        f"The forward pass writes into the model, by what the data is: {', '.join(changed[:5])}. That is never noised, "
        "would be published with the model, and can change what later batches compute. Turn it off (for example with "
        "track_running_stats=False)."
    )
