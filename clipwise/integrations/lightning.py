"""PrivateFit: a Lightning callback under which `trainer.fit` is private. Two lines of a script change.

    training_step returns one loss per example (reduction="none") instead of their mean
    trainer = Trainer(callbacks=[private]); trainer.fit(module, private.loader(dataset))

The module is not wrapped: while a fit runs, its training_step is the private step around its own, and its optimizer is
stepped by clipwise alone. `self.log` is refused while training: what a module could log there is made of private
records. Other ways out, such as printing or a logger of one's own, are not seen. ε and the clip norm are logged.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..errors import LedgerError, MissingExtra, ParameterMismatch, PlanMismatch, PrivateData, UnsupportedOp, WrongOrder
from ..plan import Plan
from ..privatize import privatize
from ..sampling import Collate, PoissonBatch
from ..thresholds import State
from ..training import PrivateTraining

try:
    from lightning.pytorch import Callback
except ImportError:
    try:
        from pytorch_lightning import Callback
    except ImportError as error:
        raise MissingExtra("PrivateFit needs lightning: pip install 'clipwise[lightning]'.") from error

_PATCHED = ("training_step", "transfer_batch_to_device", "log", "log_dict")
_HOOKS = {  # of a module: why they cannot be its own
    "on_before_batch_transfer": "changes batches after they were checked",
    "on_after_batch_transfer": "changes batches after they were checked",
    "optimizer_step": "is not called: clipwise steps the optimizer",
    "on_before_optimizer_step": "is not called: clipwise steps the optimizer",
    "configure_gradient_clipping": "is not called: plan.rule clips every example",
}


class PrivateFit(Callback):
    """Makes `trainer.fit` (ε, δ)-differentially private for the data set given to `loader`.

    Guarantee: that of `clipwise.privatize`, one example the unit. Validation, test and prediction are refused unless
    you declare their records public.

    Args:
        plan: every public number of the run.
        ledger: a path, so that the record of what is spent survives, and checkpoints can be resumed.
        eval_is_public: whether the records of validation, test and prediction may be looked at for free.
        options: everything else that `clipwise.privatize` takes: microbatch, compile, probe, noise, seed, …
    """

    def __init__(
        self, plan: Plan, *, ledger: str | Path | None = None, eval_is_public: bool = False, **options: Any
    ) -> None:
        """Only stores; fit checks."""
        if not isinstance(plan, Plan):
            raise TypeError(f"plan must be a clipwise.Plan, got {type(plan).__name__}.")
        self.plan, self.eval_is_public = plan, eval_is_public
        self.training: PrivateTraining | None = None
        self._options = {"ledger": ledger, **options}
        self._resumed: dict[str, Any] | None = None
        self._logging = False

    def loader(self, dataset: Any, *, collate_fn: Collate | None = None, num_workers: int = 0) -> PoissonLoader:
        """What `trainer.fit` takes as training data: Poisson batches of the plan, 1/q of them an epoch."""
        return PoissonLoader(self, dataset, collate_fn, num_workers)

    # -- fit ----------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Before Lightning looks at the module."""
        if stage == "fit":
            _check(trainer, pl_module)
            pl_module.automatic_optimization = False  # and stays so: trainer.global_step is read by it afterwards

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Optimizers exist now: make the run, and stand before training_step."""
        if len(trainer.optimizers) != 1:
            raise ParameterMismatch(
                f"PrivateFit needs one optimizer, configure_optimizers gave {len(trainer.optimizers)}."
            )
        for config in trainer.lr_scheduler_configs:
            if isinstance(config.scheduler, ReduceLROnPlateau):
                raise UnsupportedOp("ReduceLROnPlateau follows a score; use a schedule that is fixed beforehand.")
        if self.training is not None:
            self.training.ledger.close()
        training = privatize(pl_module, trainer.optimizers[0], self.plan, _own_losses, **self._options)
        try:
            self._check_ledger(training)
        except BaseException:
            training.ledger.close()
            raise
        self.training = training
        pl_module.training_step = _private_step(self, trainer)
        pl_module.transfer_batch_to_device = _transfer(pl_module)
        for name in ("log", "log_dict"):
            setattr(pl_module, name, _guarded(self, trainer, pl_module, name))

    def _check_ledger(self, training: PrivateTraining) -> None:
        """What was spent goes on; weights without their ledger, or a ledger without its weights, do not."""
        resumed, ledger = self._resumed, training.ledger
        if resumed is None:
            if ledger.charges:
                raise ParameterMismatch(
                    f"{ledger.path} is the ledger of a run that has spent epsilon={training.epsilon:.4g} already. Go "
                    "on with trainer.fit(..., ckpt_path=…), or give this run a ledger of its own."
                )
            return
        if resumed["plan"] != self.plan.digest:
            raise PlanMismatch("The checkpoint belongs to another plan. Resume with the plan that it was saved under.")
        if resumed["ledger"] is None or not ledger.holds(resumed["ledger"]):
            raise LedgerError(
                "The ledger is older than the checkpoint, is another one, or lived in memory: going on would forget "
                "what was spent. Give PrivateFit the ledger that the run wrote."
            )
        if self.plan.release is not None:
            training._restore_threshold(State(**resumed["threshold"]))

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The module is its own again."""
        for name in _PATCHED:
            pl_module.__dict__.pop(name, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Also after a failure."""
        self.teardown(trainer, pl_module, "fit")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *others: Any) -> None:
        """Log what is released, step the schedule, and stop when the plan is spent."""
        assert self.training is not None
        charges = self.training.ledger.charges
        if charges % max(trainer.log_every_n_steps, 1) == 0 or charges == self.plan.steps:  # ε takes a moment
            shown = {"epsilon": self.training.epsilon, "clip_norm": self.training.clip_norm}
            self._logging = True
            try:
                pl_module.log_dict(shown, on_step=True, on_epoch=False, prog_bar=True)
            finally:
                self._logging = False
        _step_schedules(trainer, "step", charges)
        if charges >= self.plan.steps:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Schedules that go by epochs."""
        _step_schedules(trainer, "epoch", trainer.current_epoch + 1)

    # -- what Lightning saves -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Goes into Lightning's checkpoints; the ledger stays its own file."""
        if self.training is None:
            return {}
        ledger = self.training.ledger
        return {
            "plan": self.plan.digest,
            "ledger": ledger.position if ledger.persistent else None,
            "threshold": asdict(self.training.threshold_state),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Looked at when the ledger is open."""
        self._resumed = dict(state_dict) or None

    # -- looking at data ----------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Only on public records."""
        self._check_public("Validation")

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        """Only on public records."""
        self._check_public("Testing")

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        """Only on public records."""
        self._check_public("Prediction")

    def _check_public(self, what: str) -> None:
        if not self.eval_is_public:
            raise PrivateData(
                f"{what} looks at records, and what it shows is not covered by the guarantee. If they are public, say "
                "PrivateFit(eval_is_public=True); if not, clipwise.private_score pays for the look."
            )


class PoissonLoader:
    """Training data for `trainer.fit`: every epoch goes on with the batches of the one plan."""

    def __init__(self, private: PrivateFit, dataset: Any, collate_fn: Collate | None, num_workers: int) -> None:
        """Made by `PrivateFit.loader`."""
        self._private, self.dataset = private, dataset
        self._collate, self._workers = collate_fn, num_workers
        self._batches: tuple[PrivateTraining, Iterator[PoissonBatch]] | None = None

    def __len__(self) -> int:
        """Batches of an epoch: as many as it takes to see every record once, on average."""
        return max(1, min(round(1 / self._private.plan.sampling_prob), self._private.plan.steps))

    def __iter__(self) -> Iterator[PoissonBatch]:
        """One epoch."""
        training = self._private.training
        if training is None:
            raise WrongOrder("private.loader(dataset) is for trainer.fit with callbacks=[private].")
        if self._batches is None or self._batches[0] is not training:
            device = next(training.model.parameters()).device
            batches = training.batches(self.dataset, collate_fn=self._collate, device=device, num_workers=self._workers)
            self._batches = training, batches
        batches = self._batches[1]
        for _ in range(len(self)):
            batch = next(batches, None)
            if batch is None:
                return
            yield batch


def _own_losses(module: nn.Module, batch: Any) -> Tensor:
    """The module's own training_step: one loss per example, or a dictionary with them."""
    own: Any = type(module).training_step  # type: ignore[attr-defined]
    before = {name: module.__dict__.get(name) for name in ("log", "log_dict")}
    module.__dict__.update(dict.fromkeys(before, _no_log))  # also in the copies that the preflight makes
    try:
        found = own(module, batch, 0) if len(inspect.signature(own).parameters) > 2 else own(module, batch)
    finally:
        for name, value in before.items():
            module.__dict__.pop(name, None)
            if value is not None:
                module.__dict__[name] = value
    losses: Tensor = found["loss"] if isinstance(found, Mapping) else found
    return losses


def _no_log(*given: Any, **named: Any) -> None:
    raise PrivateData(
        f"The module logs {given[0] if given else 'values'!r} while training, which is made of private records and "
        "would leave without noise. Take self.log out of training_step and of the hooks around it; epsilon and "
        "clip_norm are logged for you."
    )


def _guarded(private: PrivateFit, trainer: Any, module: Any, name: str) -> Any:
    """self.log, which is for validation, testing and clipwise while a private fit runs."""
    own = getattr(type(module), name)

    def log(*given: Any, **named: Any) -> None:
        if trainer.training and not private._logging:
            _no_log(*given, **named)
        own(module, *given, **named)

    return log


def _private_step(private: PrivateFit, trainer: Any) -> Any:
    """In place of the module's training_step; a function, so that copies of the module do not copy the run."""

    def training_step(batch: Any, *others: Any) -> None:
        assert private.training is not None
        counted = trainer.strategy._lightning_optimizers[0]  # counts trainer.global_step
        counted._on_before_step()
        private.training.step(batch)
        counted._on_after_step()

    return training_step


def _transfer(module: Any) -> Any:
    own = type(module).transfer_batch_to_device

    def transfer_batch_to_device(batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch if isinstance(batch, PoissonBatch) else own(module, batch, device, dataloader_idx)

    return transfer_batch_to_device


def _step_schedules(trainer: Any, interval: str, number: int) -> None:
    for config in trainer.lr_scheduler_configs:
        if config.interval == interval and number % config.frequency == 0:
            config.scheduler.step()


def _check(trainer: Any, module: Any) -> None:
    """Refuse, by name, what would break the guarantee or would be left aside without a word."""
    from_lightning = next(kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule")
    for name, why in _HOOKS.items():
        if getattr(type(module), name) is not getattr(from_lightning, name):
            raise UnsupportedOp(f"{type(module).__name__}.{name} {why}. Do it in training_step.")
    wrong = {
        "gradient_clip_val": (trainer.gradient_clip_val, "does nothing here: plan.rule clips every example"),
        "accumulate_grad_batches": (
            trainer.accumulate_grad_batches not in (None, 1),
            "splits batches by itself; PrivateFit(microbatch=…) does that",
        ),
        "precision": (trainer.precision not in ("32-true", "bf16-mixed"), "is not known here; use 'bf16-mixed'"),
        "devices": (trainer.world_size > 1, "needs several processes; see clipwise.integrations.distributed"),
        "overfit_batches": (trainer.overfit_batches, "uses the same batches again, and the account assumes new ones"),
    }
    for name, (set_, why) in wrong.items():
        if set_:
            raise UnsupportedOp(f"Trainer({name}=…) {why}. Leave it out.")
