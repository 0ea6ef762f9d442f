"""PrivateTraining: the private step, composed of engine, rule, ledger, noise and optimizer."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ._types import LossFn, largest_batch
from .batch import batch_size, padded_slice
from .clipping import check_optimizer, clip, engine_gradients, trainable, with_rounding, zeros_like
from .engine import Paths, Tape
from .engine.compiled import Compiled
from .engine.preflight import Probe, nobody, preflight_batch, preflight_dataset
from .engine.state import Writes
from .errors import ParameterMismatch, RankFailed, WrongBatch, WrongOrder
from .guard import GUARDS, Seen, StepGuard, Turn, belongs_to, check_newest
from .ledger import Ledger
from .noise import NoiseSource
from .parts import Memory, Microbatch, Settings, Step
from .plan import Plan
from .ranks import Alone, Ranks
from .rules import steepness_of
from .sampling import Collate, PoissonBatch, PoissonSampler, as_dataset, collate_for, fingerprint, poisson_batches
from .statement import run_statement
from .thresholds import Facts, State


class PrivateTraining:
    """A training run under a plan. Made by `privatize`; see there for the guarantee."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        loss_fn: LossFn | None,
        ledger: Ledger,
        noise: NoiseSource,
        sampler: PoissonSampler,
        settings: Settings,
        ranks: Ranks | None = None,
    ) -> None:
        """Only stores; `privatize` checks."""
        self._ranks: Ranks = Alone() if ranks is None else ranks
        self._model, self._optimizer, self._plan, self._loss_fn = model, optimizer, plan, loss_fn
        self._ledger, self._noise, self._sampler, self._settings = ledger, noise, sampler, settings
        self._names = list(trainable(model))
        self._groups = plan.rule.groups(self._names)
        self._guard = GUARDS.get(optimizer) or StepGuard(optimizer, ledger)
        self._guard.ledger = ledger
        belongs_to(model, ledger)
        self._issued: weakref.WeakSet[PoissonBatch] = weakref.WeakSet()
        self._outstanding: PoissonBatch | None = None
        self._seen: Seen | None = None  # the model as the preflight saw it
        self._step: Step | None = None
        self._turn = Turn()
        self._writes: Writes | None = None  # what forward passes may write to, as the preflight saw
        self._paths: Paths = {}
        self._compiled = self._as_compiled()
        self._checked: tuple[Any, ...] | None = None  # what the preflight was given, once it has run
        self._nobody: Any = None  # made-up rows, for a rank that has none while others work
        self._threshold = plan.threshold.init(self._facts(trainable(model)))

    @property
    def model(self) -> nn.Module:
        """The model, unwrapped."""
        return self._model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer; it belongs to the run and cannot be swapped."""
        return self._optimizer

    @property
    def plan(self) -> Plan:
        """Every public number of the run."""
        return self._plan

    @property
    def ledger(self) -> Ledger:
        """The record of what is spent."""
        return self._ledger

    @property
    def epsilon(self) -> float:
        """ε spent so far, never understated."""
        return self._ledger.spent

    @property
    def clip_norm(self) -> float:
        """C of the next step; made of released values alone, so it may be shown."""
        return self._threshold.clip_norm

    @property
    def threshold_state(self) -> State:
        """What the threshold remembers, for checkpoints. Public."""
        return self._threshold

    def _restore_threshold(self, state: State) -> None:
        """From a checkpoint of this run; nobody else sets C, or it could come from private values."""
        if (state.range > 0) != (self._threshold.range > 0):
            raise ValueError(f"{state!r} does not belong to {self._plan.threshold!r}.")
        self._threshold = state

    @property
    def warm_up(self) -> float:
        """Seconds that compile=True has spent on compiling so far."""
        return 0.0 if self._compiled is None else sum(self._compiled.warm_up)

    def _facts(self, parameters: dict[str, nn.Parameter]) -> Facts:
        return self._plan.facts(self._ledger.charges, sum(p.numel() for p in parameters.values()))

    @property
    def sensitivity(self) -> float:
        """The bound on one example's influence on a step's sum, rounding included. Public."""
        return self._bound(trainable(self._model))

    def _bound(self, parameters: dict[str, nn.Parameter]) -> float:
        bound, rule = self._plan.rule.sensitivity(self.clip_norm, len(self._groups)), self._plan.rule
        return with_rounding(bound, parameters.values(), self._largest_batch, steepness_of(rule))

    @property
    def _largest_batch(self) -> float:
        return largest_batch(self._plan.expected_batch_size)

    def statement(self) -> dict[str, Any]:
        """What can be promised about the run so far, and what cannot."""
        if self._ranks.share[0]:
            raise WrongOrder("The ledger is on the first rank: take the statement there.")
        return run_statement(self._plan, self._ledger, self._noise, self._model)

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
        records = as_dataset(dataset)
        collate = collate_for(dataset, collate_fn)
        self._ranks.same("the data set (its order too)", f"{len(records)} {fingerprint(records, self._ranks.share[1])}")
        if self._ranks.in_step:
            self._seen = Seen.of(self._model, wrapped=True)
            self._ranks.as_checked(collate_fn, self._seen.flags)
            like = records[0] if self._settings.probe is None else self._settings.probe[0]
            self._nobody = nobody(collate, like, device)
        elif self._settings.preflight and self._loss_fn is not None and len(records):
            self._checked = (records, collate, device)
            self._preflight(*self._checked)
        left = self._plan.steps - self._ledger.charges
        if left <= 0:
            warnings.warn(
                "The plan has no steps left: batches() yields nothing. One loop runs the whole plan.", stacklevel=2
            )
            return iter(())
        drawn = poisson_batches(
            dataset, self._sampler, left, collate_fn=collate_fn, device=device, num_workers=num_workers
        )
        return self._issue(drawn)

    def _preflight(self, records: Any, collate: Collate, device: Any) -> None:
        probe = Probe(records=self._settings.probe, private=self._settings.preflight == "private")
        assert self._loss_fn is not None
        found = preflight_dataset(self._model, self._loss_fn, records, probe, collate, device, self._engine())
        self._writes = found.writes
        if self._compiled is not None:
            like = records[0] if self._settings.probe is None else self._settings.probe[0]
            self._compiled.prepare(collate, like, self._settings.microbatch or 1, device)
        self._seen = Seen.of(self._model)

    def _engine(self) -> dict[str, Any]:
        return {"engine": self._settings.engine, "op_rules": self._settings.op_rules, "paths": self._paths}

    def _issue(self, drawn: Iterator[PoissonBatch]) -> Iterator[PoissonBatch]:
        while True:
            if self._outstanding is not None and self._outstanding in self._issued:
                raise WrongBatch(
                    "The batch before this one was not stepped. Which batches are skipped can depend on the data (an "
                    "empty one, a large one), and the account assumes that all are used. Step every batch, or stop."
                )
            try:
                batch = next(drawn, None)
            except BaseException:  # in the data set or the collate function
                self._ledger.reserve()
                self._charge_failure()
                self._ranks.agree(False)
                raise
            if batch is None:
                return
            self._issued.add(batch)
            self._outstanding = batch
            yield batch

    def _accepted(self, batch: Any) -> PoissonBatch:
        if self._settings.sampling == "asserted" and not isinstance(batch, PoissonBatch):
            batch = PoissonBatch(batch, 0 if batch is None else batch_size(batch))
            self._issued.add(batch)
            new = self._seen is None or self._seen.changed(self._model)
            if batch._size and self._settings.preflight and self._loss_fn is not None and new:
                self._writes = preflight_batch(self._model, self._loss_fn, batch.data, self._engine()).writes
                self._seen = Seen.of(self._model)
        elif self._checked is not None and self._seen is not None and self._seen.changed(self._model):
            self._compiled = self._as_compiled()  # other hooks or modules than those that were checked
            self._preflight(*self._checked)
        if not isinstance(batch, PoissonBatch) or batch not in self._issued:
            raise WrongBatch(
                f"step() takes only batches from this run's training.batches(dataset), each once; got "
                f"{type(batch).__name__}. A shuffled or weighted loader, or a batch stepped before, has another "
                "privacy cost, which would be reported wrongly. If your sampler really is Poisson, vouch for it with "
                "privatize(..., sampling='asserted')."
            )
        return batch.as_drawn()

    def step(self, batch: PoissonBatch) -> None:
        """Clip, charge, noise, and step the optimizer. Returns None: nothing private leaks out of it."""
        if self._loss_fn is None:
            raise WrongOrder("privatize() was given no loss_fn: use record(), backward() and release().")
        for part in self.microbatches(batch):
            assert self._step is not None
            given = (part.data, part.mask, self._step.threshold.clip_norm)
            with self._charged_if_it_fails():
                if self._compiled is None:
                    self._add(*self._clipped(*given), part)
                else:
                    self._add(*self._compiled(*given, keep=len(self._step.parts) > 1), part)
        self.release()

    def _as_compiled(self) -> Compiled | None:
        return Compiled(self._model, self._clipped, lambda: self._writes) if self._settings.compile else None

    def _clipped(self, data: Any, mask: Tensor, clip_norm: Any) -> tuple[dict[str, Tensor], Tensor]:
        """The clipped sum of one microbatch and its norms: the function that compile=True compiles."""
        assert self._loss_fn is not None
        found = engine_gradients(self._model, self._loss_fn, data, len(mask), **self._engine())
        return clip(found, self._plan.rule, clip_norm, self._groups, mask)

    def microbatches(self, batch: PoissonBatch) -> list[Microbatch]:
        """Begin a batch: reserve its charge, and split it. An empty batch has no microbatches, only a release."""
        with self._turn.taken():  # first: what is asked below must still hold when the batch begins
            batch = self._accepted(batch)
            parameters = self._check_parameters()
            memory = None if self._writes is None else Memory(self._model, self._writes)
            step = Step(self._threshold, self._bound(parameters), batch._size, [], memory=memory)
            self._ledger.reserve()
            self._issued.discard(batch)
            self._outstanding, self._step = None, step
        with self._charged_if_it_fails():
            size, rows = batch._size, self._settings.microbatch or max(batch._size, 1)
            for start in range(0, size, rows):
                part = padded_slice(batch.data, start, min(start + rows, size), rows, size)
                self._step.parts.append(Microbatch(*part))
            for _ in range(self._ranks.rounds(len(self._step.parts)) - len(self._step.parts)):
                self._step.parts.append(Microbatch(self._nobody, torch.zeros(1, dtype=torch.bool)))
        return list(self._step.parts)

    @contextmanager
    def _charged_if_it_fails(self) -> Iterator[None]:
        """A failure on private data is seen by whoever sees the run: charge it, and put it on record."""
        try:
            yield
        except BaseException:
            self._step = None
            self._turn.leave()
            self._charge_failure()
            self._ranks.agree(False)
            raise

    def _charge_failure(self) -> None:
        failed = "a step failed on private data and was charged; that it failed is outside the guarantee"
        self._ledger.commit(remark=failed)

    @contextmanager
    def record(self, part: Microbatch) -> Iterator[Any]:
        """Record the forward pass of one microbatch; yields its data."""
        if self._settings.engine != "bookkeeping":
            raise WrongOrder("record() needs engine='bookkeeping'; engine='vmap' needs a loss_fn and step().")
        step = self._step
        if step is None or step.recording is not None or not any(p is part for p in step.parts):
            raise WrongOrder("Begin with `for part in training.microbatches(batch)`; record each part once, backward.")
        tape = Tape(self._model, part.data, len(part.mask), self._settings.op_rules, self._paths)
        with self._charged_if_it_fails(), torch.enable_grad(), tape:
            yield part.data
        step.recording = (tape, part)

    def backward(self, losses: Tensor) -> None:
        """Clip and add the recorded microbatch. Nothing is released, and no `p.grad` is touched."""
        if self._step is None or self._step.recording is None:
            raise WrongOrder("backward() without record(): run the forward pass inside `with training.record(part)`.")
        (tape, part), self._step.recording = self._step.recording, None
        with self._charged_if_it_fails():
            found, clip_norm = tape.backward(losses), self._step.threshold.clip_norm
            self._add(*clip(found, self._plan.rule, clip_norm, self._groups, part.mask), part)

    def _add(self, sums: dict[str, Tensor], norms: Tensor, part: Microbatch) -> None:
        assert self._step is not None
        step = self._step
        if step.memory is not None:
            step.memory.check()
        step.sums = {name: step.sums[name].add_(v) if name in step.sums else v for name, v in sums.items()}
        seen = self._plan.threshold.observe(step.threshold, norms[:, 0], part.mask.to(norms.device))
        step.observed = seen if step.observed is None or seen is None else step.observed + seen
        step.parts = [p for p in step.parts if p is not part]

    def release(self) -> None:
        """Once per batch: charge durably, then noise, divide, write `p.grad`, and step the optimizer."""
        step = self._step
        if step is None or step.recording is not None:
            raise WrongOrder("release() without a recorded batch, or before backward(); one release per batch.")
        if step.parts:
            raise WrongOrder("release() with microbatches that were not recorded: use all of them.")
        with self._charged_if_it_fails():
            parameters = self._check_parameters()
        step.sums = {name: step.sums[name] if name in step.sums else zeros_like(p) for name, p in parameters.items()}
        self._gather(step)
        self._step = None
        try:
            number = self._ranks.charge(self._ledger.commit)
            noised, released = step.noised(self._plan, self._noise, number, self._ranks.offsets)
            self._threshold = self._plan.threshold.update(step.threshold, released, self._facts(parameters))
            # Gradients get memory of their own: a compiled step puts its next, bare sums where these lie.
            for name, p in parameters.items():
                p.grad = self._ranks.as_gradient(p, (noised[name] / self._plan.expected_batch_size).to(p.dtype))
            self._guard.open = True
            self._optimizer.step()
        finally:
            self._guard.open = False
            self._optimizer.zero_grad(set_to_none=True)
            self._seen = self._seen and Seen.of(self._model, self._seen.wrapped)  # what a pass itself changes stays
            self._turn.leave()

    def _gather(self, step: Step) -> None:
        """The sums of all ranks. If one of them failed, each charges the step and stops."""
        try:
            if not self._ranks.agree(True):
                raise RankFailed("Another rank failed in this step: it is charged, and nothing of it is released.")
            if self._ranks.examples(step.size) > self._largest_batch:
                raise WrongBatch(
                    f"Batches are far larger than expected_batch_size={self._plan.expected_batch_size:g}, which bounds "
                    "how much a sum can round. Declare expected_batch_size = sampling_prob · size of the data."
                )
            step.sums = self._ranks.total(step.sums)
            if (release := self._plan.release) is not None:
                seen = torch.zeros(release.size, dtype=torch.float64) if step.observed is None else step.observed
                assert seen.shape[-1:] == (release.size,)
                step.observed = self._ranks.observed(seen)
        except BaseException:
            self._step = None
            self._turn.leave()
            self._charge_failure()
            raise

    def _check_parameters(self) -> dict[str, nn.Parameter]:
        parameters = trainable(self._model)
        if list(parameters) != self._names:
            changed = sorted(set(parameters) ^ set(self._names))
            raise ParameterMismatch(
                f"The trainable parameters changed since privatize(): {', '.join(changed)}. Freeze or unfreeze before "
                "privatize()."
            )
        if self._seen is not None:
            self._seen.check_modes()
        check_newest(self._model, self._guard, self._ledger)
        check_optimizer(self._optimizer, self._model)
        return parameters

    def __deepcopy__(self, memo: dict[int, Any]) -> PrivateTraining:
        """A copy trains its own weights with its own noise and coins, and charges the same ledger."""
        if self._ranks.share[1] > 1:
            raise WrongOrder("A run on several processes cannot be copied: a copy would charge no ledger on disk.")
        model, optimizer = copy.deepcopy((self._model, self._optimizer), memo)
        noise, sampler = copy.deepcopy((self._noise, self._sampler))
        twin = PrivateTraining(
            model, optimizer, self._plan, self._loss_fn, self._ledger, noise, sampler, self._settings
        )
        twin._threshold = self._threshold
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        """Never a second run by pickle: it would hold a second ledger."""
        raise WrongOrder("A PrivateTraining cannot be pickled. Use save_checkpoint(), and keep the ledger file.")
