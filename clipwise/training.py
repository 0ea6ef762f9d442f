"""privatize() and PrivateTraining: the private step, composed of engine, rule, ledger, noise and optimizer."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ._check import count, one_of
from ._types import Engine, LossFn
from .batch import batch_size, padded_slice
from .clipping import clip, engine_gradients, trainable, with_rounding
from .engine import Gradients, OpRule, Tape
from .engine.preflight import Probe, preflight_dataset
from .errors import ParameterMismatch, UnsupportedOp, WrongBatch, WrongOrder
from .ledger import Ledger
from .noise import Mode, NoiseSource
from .plan import Plan
from .sampling import Collate, PoissonBatch, PoissonSampler, as_dataset, poisson_batches


@dataclass(eq=False)
class Microbatch:
    """A physical slice of a batch, padded to a fixed size; `mask` marks the real rows. Secret."""

    data: Any = field(repr=False)
    mask: Tensor = field(repr=False)


class _StepGuard:
    """Stands before optimizer.step(): only a release may pass, so that no un-noised gradient ever does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.open = False
        optimizer.register_step_pre_hook(self)
        _GUARDS[optimizer] = self

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self.open:
            raise WrongOrder(
                "optimizer.step() was called outside training.step() or training.release(): its gradients would be "
                "neither clipped nor noised. Leave the optimizer to clipwise; step a learning-rate scheduler yourself."
            )


_GUARDS: weakref.WeakKeyDictionary[torch.optim.Optimizer, _StepGuard] = weakref.WeakKeyDictionary()


class PrivateTraining:
    """A training run under a plan. Made by `privatize`; see there for the guarantee."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        loss_fn: LossFn | None,
        *,
        ledger: Ledger,
        noise: NoiseSource,
        sampler: PoissonSampler,
        settings: _Settings,
    ) -> None:
        """Only stores; `privatize` checks."""
        self.model, self.optimizer, self.plan, self.loss_fn = model, optimizer, plan, loss_fn
        self.ledger = ledger
        self._noise, self._sampler, self._settings = noise, sampler, settings
        self._names = list(trainable(model))
        self._groups = plan.rule.groups(self._names)
        self._guard = _GUARDS.get(optimizer) or _StepGuard(optimizer)
        self._sums: dict[str, Tensor] | None = None
        self._batch: PoissonBatch | None = None
        self._parts_left = 0
        self._recording: tuple[Tape, Tensor] | None = None
        self._checked = settings.preflight is False

    # -- public numbers -----------------------------------------------------------------------------

    @property
    def epsilon(self) -> float:
        """ε spent so far, never understated."""
        return self.ledger.spent

    @property
    def clip_norm(self) -> float:
        """C of the next step."""
        return self.plan.threshold.clip_norm

    @property
    def sensitivity(self) -> float:
        """The bound on one example's influence on a step's sum, rounding included. Public."""
        bound = self.plan.rule.sensitivity(self.clip_norm, len(self._groups))
        dtypes = {p.dtype for p in trainable(self.model).values()}
        return with_rounding(bound, dtypes, 1.5 * self.plan.expected_batch_size + 64)

    def statement(self) -> dict[str, Any]:
        """What can be promised about the run so far, and what cannot."""
        asserted = self.ledger.head["assertions"]
        return {
            **self.plan.statement(),
            "spent_epsilon": self.epsilon,
            "steps_charged": self.ledger.charges,
            "asserted_by_user": asserted,
            "certified": not asserted,
            "notes": list(self.ledger.notes),
            "ledger": repr(self.ledger),
        }

    # -- the step -----------------------------------------------------------------------------------

    def batches(
        self,
        dataset: Any,
        *,
        collate_fn: Collate | None = None,
        device: torch.device | str | None = None,
        num_workers: int = 0,
    ) -> Iterator[PoissonBatch]:
        """One-use Poisson batches for every step that the plan has left; the model is checked first (preflight)."""
        if self._settings.sampling == "asserted":
            raise WrongBatch("sampling='asserted' means that you bring your own batches; step them directly.")
        if not self._checked:
            self._preflight(dataset, collate_fn, device)
        left = self.plan.steps - self.ledger.charges
        if left <= 0:
            return iter(())
        return poisson_batches(
            dataset, self._sampler, left, self, collate_fn=collate_fn, device=device, num_workers=num_workers
        )

    def _preflight(self, dataset: Any, collate_fn: Collate | None, device: Any) -> None:
        if self.loss_fn is not None:
            private = self._settings.preflight == "private"
            if private:
                self.ledger.note("preflight looked at private records: outside the guarantee")
            probe = Probe(records=self._settings.probe, private=private)
            records = as_dataset(dataset)
            if len(records):
                preflight_dataset(self.model, self.loss_fn, records, probe, collate_fn, device, self._settings.op_rules)
        self._checked = True

    def step(self, batch: PoissonBatch) -> None:
        """Clip, charge, noise, and step the optimizer. Returns None: nothing private leaks out of it."""
        if self.loss_fn is None:
            raise WrongOrder("privatize() was given no loss_fn: use record(), backward() and release().")
        settings = self._settings
        parts = self.microbatches(batch)
        try:
            for part in parts:
                self._add(
                    engine_gradients(
                        self.model, self.loss_fn, part.data, len(part.mask), settings.engine, settings.op_rules
                    ),
                    part.mask,
                )
        except BaseException:
            self._sums = None  # nothing was released, nothing is charged
            raise
        self.release()

    def microbatches(self, batch: PoissonBatch) -> list[Microbatch]:
        """Begin a batch: reserve its charge, and split it. An empty batch has no microbatches, only a release."""
        if self._sums is not None:
            raise WrongOrder("The batch before this one was not released; call training.release() once per batch.")
        batch = self._accepted(batch)
        self._check_parameters()
        self.ledger.reserve()
        batch.used = True
        rows = self._settings.microbatch or max(batch.size, 1)
        starts = range(0, batch.size, rows)
        parts = [Microbatch(*padded_slice(batch.data, s, min(s + rows, batch.size), rows)) for s in starts]
        self._batch, self._sums, self._parts_left = batch, {}, len(parts)
        return parts

    def _accepted(self, batch: Any) -> PoissonBatch:
        if self._settings.sampling == "asserted" and not isinstance(batch, PoissonBatch):
            return PoissonBatch(batch, 0 if batch is None else batch_size(batch), self)
        if not isinstance(batch, PoissonBatch) or batch.owner is not self:
            raise WrongBatch(
                f"step() takes only batches from training.batches(dataset), got {type(batch).__name__}. A shuffled or "
                "weighted loader has another privacy cost, which would be reported wrongly. If your sampler really is "
                "Poisson, vouch for it with privatize(..., sampling='asserted')."
            )
        if batch.used:
            raise WrongBatch(
                "This batch was stepped before. A batch used twice is not a Poisson sample: draw a new one."
            )
        return batch

    @contextmanager
    def record(self, part: Microbatch) -> Iterator[Any]:
        """Record the forward pass of one microbatch; yields its data."""
        if self._settings.engine != "bookkeeping":
            raise WrongOrder("record() needs engine='bookkeeping'; engine='vmap' needs a loss_fn and step().")
        if self._sums is None or self._recording is not None or self._parts_left == 0:
            raise WrongOrder(
                "Begin with `for part in training.microbatches(batch)`, and call backward() after record()."
            )
        tape = Tape(self.model, part.data, len(part.mask), self._settings.op_rules)
        with torch.enable_grad(), tape:
            yield part.data
        self._recording = (tape, part.mask)

    def backward(self, losses: Tensor) -> None:
        """Clip and add the recorded microbatch. Nothing is released, and no `p.grad` is touched."""
        if self._recording is None:
            raise WrongOrder("backward() without record(): run the forward pass inside `with training.record(part)`.")
        (tape, mask), self._recording = self._recording, None
        self._add(tape.backward(losses), mask)

    def _add(self, gradients: Gradients, mask: Tensor) -> None:
        assert self._sums is not None
        sums, _ = clip(gradients, self.plan.rule, self.clip_norm, self._groups, mask)
        for name, value in sums.items():
            self._sums[name] = self._sums[name].add_(value) if name in self._sums else value
        self._parts_left -= 1

    def release(self) -> None:
        """Once per batch: charge durably, then noise, divide, write `p.grad`, and step the optimizer."""
        if self._sums is None or self._recording is not None:
            raise WrongOrder("release() without a recorded batch, or before backward(); one release per batch.")
        if self._parts_left:
            raise WrongOrder(f"release() with {self._parts_left} microbatches not recorded: use all of them, or none.")
        parameters = self._check_parameters()
        sums, self._sums, self._batch = self._sums, None, None
        for name, p in parameters.items():
            sums.setdefault(name, torch.zeros(p.shape, device=p.device, dtype=p.dtype))
        noised = self._noise.add(
            sums,
            sequence=self.ledger.commit(),
            sensitivity=self.sensitivity,
            noise_multiplier=self.plan.gradient_noise_multiplier,
            stream="gradient",
        )
        for name, p in parameters.items():
            p.grad = noised[name].div_(self.plan.expected_batch_size).to(p.dtype)
        self._guard.open = True
        try:
            self.optimizer.step()
        finally:
            self._guard.open = False
            self.optimizer.zero_grad(set_to_none=True)

    def _check_parameters(self) -> dict[str, nn.Parameter]:
        parameters = trainable(self.model)
        if list(parameters) != self._names:
            changed = sorted(set(parameters) ^ set(self._names))
            raise ParameterMismatch(
                f"The trainable parameters changed since privatize(): {', '.join(changed)}. Freeze or unfreeze before "
                "privatize(), or begin a new run with the same ledger plan."
            )
        check_optimizer(self.optimizer, parameters)
        return parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivateTraining:
        """A copy trains its own weights with its own noise and coins, and charges the same ledger."""
        model, optimizer = copy.deepcopy((self.model, self.optimizer), memo)
        noise, sampler = copy.deepcopy((self._noise, self._sampler))
        return PrivateTraining(
            model,
            optimizer,
            self.plan,
            self.loss_fn,
            ledger=self.ledger,
            noise=noise,
            sampler=sampler,
            settings=self._settings,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Never a second run by pickle: it would hold a second ledger."""
        raise WrongOrder("A PrivateTraining cannot be pickled. Save model.state_dict(), and keep the ledger file.")


@dataclass(frozen=True)
class _Settings:
    """Knobs that change speed or what is checked, never the guarantee."""

    microbatch: int | None
    engine: Engine
    preflight: bool | str
    probe: Any
    sampling: str
    op_rules: Mapping[Any, OpRule] | None


def check_optimizer(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """The optimizer holds exactly the trainable parameters, and no gradient waits in them."""
    held = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    known = {id(p) for p in parameters.values()}
    if foreign := [tuple(p.shape) for i, p in held.items() if i not in known]:
        raise ParameterMismatch(
            f"The optimizer holds {len(foreign)} trainable parameter(s) not of the model (shapes {foreign[:3]}). "
            "They would be trained without clipping and noise. Build the optimizer from model.parameters()."
        )
    if left_out := [name for name, p in parameters.items() if id(p) not in held]:
        raise ParameterMismatch(
            f"Parameter(s) {', '.join(left_out[:5])} are trainable but not in the optimizer: they would cost privacy "
            "without being trained. Freeze them with requires_grad_(False), or give them to the optimizer."
        )
    if waiting := [name for name, p in parameters.items() if p.grad is not None]:
        raise ParameterMismatch(
            f"Parameter(s) {', '.join(waiting[:5])} already hold a .grad, which is neither clipped nor noised. "
            "Call optimizer.zero_grad(set_to_none=True), and never loss.backward()."
        )


def _check_model(model: nn.Module) -> None:
    wrapped = {"DataParallel", "DistributedDataParallel", "OptimizedModule", "FullyShardedDataParallel"}
    for name, module in model.named_modules():
        if type(module).__name__ in wrapped or isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedOp(
                f"Module {name or 'model'!r} is a {type(module).__name__}: its ops cannot be recorded. "
                "Pass the plain module to privatize()."
            )
    if not trainable(model):
        raise ParameterMismatch("The model has no trainable parameter (requires_grad=True): there is nothing to train.")


def privatize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    loss_fn: LossFn | None = None,
    *,
    ledger: str | Path | Ledger | None = None,
    microbatch: int | None = None,
    compile: bool = False,
    engine: Engine = "bookkeeping",
    preflight: bool | Literal["private"] = True,
    probe: Any = None,
    sampling: Literal["poisson", "asserted"] = "poisson",
    noise: Mode = "secure",
    seed: int | None = None,
    op_rules: Mapping[Any, OpRule] | None = None,
) -> PrivateTraining:
    """Make a training run private. Neither model nor optimizer is wrapped.

    Guarantee: after any number of `step`s, the model's weights are (`training.epsilon`, plan.delta)-DP with
    respect to one example of the data set given to `batches`, provided that the model treats examples
    independently, which the preflight checks on made-up records before the first batch is drawn.

    Args:
        model: any module; trainable parameters are those with requires_grad.
        optimizer: any torch.optim optimizer over exactly those parameters.
        plan: every public number of the run.
        loss_fn: loss_fn(model, batch) → one loss per example, shape [b].
        ledger: a path, so that the record of what is spent survives; None keeps it in memory.
        microbatch: rows per physical slice; changes memory and speed only.
        compile: reserved; refused until it is supported.
        engine: "bookkeeping" (fast), or "vmap" (slow, accepts more).
        preflight: False skips the check; "private" runs it on private records, outside the guarantee.
        probe: a few public records for the preflight, instead of made-up ones.
        sampling: "asserted" lets you step your own batches; the ledger says that you vouched for them.
        noise: "fast" uses torch's generator: NOT CERTIFIED, and the ledger says so.
        seed: makes the run repeatable and NOT PRIVATE, and the ledger says so.
        op_rules: rules for ops that clipwise does not know.
    """
    one_of(("bookkeeping", "vmap"), engine=engine)
    one_of(("poisson", "asserted"), sampling=sampling)
    if compile:
        raise UnsupportedOp("compile=True is not supported yet; leave it out.")
    if microbatch is not None:
        count(microbatch=microbatch)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a clipwise.Plan, got {type(plan).__name__}.")
    _check_model(model)
    check_optimizer(optimizer, trainable(model))
    asserted = {"sampling": "asserted"} if sampling == "asserted" else {}
    asserted |= {"noise": "fast: NOT CERTIFIED"} if noise == "fast" else {}
    asserted |= {"seed": f"{seed}: NOT PRIVATE"} if seed is not None else {}
    source = NoiseSource(noise, seed)
    if not isinstance(ledger, Ledger):
        ledger = Ledger(plan, ledger, asserted)
    elif ledger.plan.digest != plan.digest or ledger.head["assertions"] != asserted:
        raise ParameterMismatch("The Ledger object was made for another plan or other assertions.")
    settings = _Settings(microbatch, engine, preflight, probe, sampling, op_rules)
    sampler = PoissonSampler(plan.sampling_prob, seed)
    return PrivateTraining(
        model, optimizer, plan, loss_fn, ledger=ledger, noise=source, sampler=sampler, settings=settings
    )
