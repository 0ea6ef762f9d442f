"""PrivateTrainer: `transformers.Trainer` with a plan. Arguments, callbacks, logging and saving stay what they are.

TrainingArguments ─► refused by name where they would break the guarantee
train() ─► privatize(model, optimizer, plan, one loss per example) ─► one step per Poisson batch
logs: ε, clip norm, learning rate. Never the training loss: it is private.
"""

from __future__ import annotations

import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..batch import map_tensors
from ..errors import MissingExtra, ParameterMismatch, PrivateData, UnsupportedOp
from ..plan import Plan
from ..privatize import privatize
from ..training import PrivateTraining

try:
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import TrainOutput, get_last_checkpoint
except ImportError as error:
    raise MissingExtra("PrivateTrainer needs transformers: pip install 'clipwise[transformers]'.") from error

from ..checkpoint import load_checkpoint, save_checkpoint
from ..evaluation import private_score
from .losses import Reduction, check_losses_of, head_of, losses_for, right
from .probes import made_records

CHECKPOINT, SCHEDULER = "clipwise.safetensors", "scheduler.json"
LossFn = Callable[[nn.Module, Mapping[str, Any]], Tensor]

# Argument → (the values that are fine, why others are not).
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "auto_find_batch_size": (lambda v: not v, "runs a batch again when memory is short: seen twice, charged once"),
    "fp16": (lambda v: not v, "scales losses over a batch; use bf16=True"),
    "deepspeed": (lambda v: not v, "shards gradients itself; see clipwise.integrations.distributed"),
    "fsdp": (lambda v: not v, "shards gradients itself; see clipwise.integrations.distributed"),
    "parallelism_config": (lambda v: v is None, "several processes: see clipwise.integrations.distributed"),
    "world_size": (lambda v: v == 1, "several processes: see clipwise.integrations.distributed"),
    "neftune_noise_alpha": (lambda v: v is None, "changes the embeddings by hooks that the plan does not know"),
    "use_liger_kernel": (lambda v: not v, "fuses losses over the batch, which hides the examples"),
    "include_num_input_tokens_seen": (lambda v: v in ("no", False), "logs how long private batches are"),
    "skip_memory_metrics": (lambda v: bool(v), "logs memory, which tells the size of private batches"),
    "debug": (lambda v: not v, "prints private activations"),
    "dataloader_drop_last": (lambda v: not v, "leaves batches out, and the account assumes that all are used"),
    "train_sampling_strategy": (lambda v: v == "random", "is not Poisson sampling, which the account assumes"),
    "data_seed": (lambda v: v is None, "would make the sampling known; batches come from secret coins"),
    "max_grad_norm": (lambda v: v in (None, 0, 0.0, 1.0), "does nothing here: plan.rule clips every example"),
    "optim": (
        lambda v: not any(word in str(getattr(v, "value", v)) for word in ("lomo", "layerwise")),
        "steps inside the backward pass, before anything is clipped or noised",
    ),
}


def plan_for(args: TrainingArguments, *, size: int, **others: Any) -> Plan:
    """The plan of a run with these arguments: batch, accumulation and epochs from them, ε and δ from you.

    `size` is the number of training records, declared public.
    """
    if args.max_steps > 0:
        numbers = {"sampling_prob": _batch(args) / size, "expected_batch_size": _batch(args), "steps": args.max_steps}
        return Plan(**numbers, **others)
    return Plan.for_dataset(size=size, batch_size=_batch(args), epochs=args.num_train_epochs, **others)


def _batch(args: TrainingArguments) -> int:
    return int(args.per_device_train_batch_size * args.gradient_accumulation_steps)


class PrivateTrainer(Trainer):
    """`transformers.Trainer` under (ε, δ)-differential privacy.

    Guarantee: that of `clipwise.privatize` for `train_dataset`, one example the unit. The training loss is never
    logged. Evaluation is refused unless you declare the evaluation records public, or pay for it (`private_accuracy`).

    Args:
        model: as for Trainer; adapters of `peft` too.
        args: as for Trainer. per_device_train_batch_size is the microbatch, times gradient_accumulation_steps the
            expected batch; torch_compile compiles the private step. What would break the guarantee is refused by name.
        plan: every public number; `plan_for(args, size=…, epsilon=…, delta=…)` makes one.
        losses: losses(model, batch) → [b]; without it, the loss of the model's own head.
        reduction: over the positions of one example, "mean" or "sum".
        ledger: a path; default: ledger.jsonl in args.output_dir.
        eval_is_public: whether eval_dataset, and what predict() is given, may be looked at for free.
        probe: a few public records for the preflight; default: made-up ones of the shape of yours.
        noise: as for privatize.
        seed: as for privatize: repeatable and NOT PRIVATE. `args.seed` sets weights and dropout only.
        trainer: everything else that Trainer takes.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        plan: Plan,
        losses: LossFn | None = None,
        reduction: Reduction = "mean",
        ledger: str | Path | None = None,
        eval_is_public: bool = False,
        probe: Any = None,
        noise: Any = "secure",
        seed: int | None = None,
        **trainer: Any,
    ) -> None:
        """Check everything that can be checked before the data is touched."""
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        _check(args, plan, eval_is_public, trainer)
        if type(self).compute_loss is not Trainer.compute_loss:
            raise UnsupportedOp("compute_loss gives one loss for the batch, and is not called. Pass losses=… instead.")
        if trainer.get("eval_dataset") is not None and trainer["eval_dataset"] is trainer.get("train_dataset"):
            raise PrivateData("eval_dataset is the train_dataset, which is private.")
        _warn_of_private_weights(model)
        compile, args.torch_compile = bool(args.torch_compile), False
        super().__init__(model, args, **trainer)
        args.torch_compile = compile
        self.control: Any = self.control
        self.plan, self.eval_is_public = plan, eval_is_public
        self.training: PrivateTraining | None = None
        self._own_losses = losses is None
        self._losses = losses or losses_for(self.model, reduction, float(args.label_smoothing_factor))
        self._ledger = Path(args.output_dir) / "ledger.jsonl" if ledger is None else Path(ledger)
        self._options = {"noise": noise, "seed": seed, "compile": compile}
        self._given_probe = probe

    # -- training -----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, **others: Any) -> TrainOutput:
        """All steps that the plan has left, or until a callback stops them."""
        if wrong := [name for name, value in others.items() if value is not None]:
            raise UnsupportedOp(f"train({wrong[0]}=…) is not supported: a search on private data must be paid for.")
        args, started = self.args, time.time()
        if args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(args.gradient_checkpointing_kwargs)
        self.model.train()
        training = self._begun(self._checkpoint(resume_from_checkpoint))
        self.is_in_train, steps_per_epoch = True, max(1, round(1 / self.plan.sampling_prob))
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        if args.eval_on_start:
            self._looked_at()
        dataset, collate = self._records()
        self.model.train()
        batches = training.batches(
            dataset, collate_fn=collate, device=args.device, num_workers=args.dataloader_num_workers
        )
        for batch in batches:
            if self.state.global_step % steps_per_epoch == 0:
                self.control = self.callback_handler.on_epoch_begin(args, self.state, self.control)
            self.control = self.callback_handler.on_step_begin(args, self.state, self.control)
            training.step(batch)
            self.control = self.callback_handler.on_optimizer_step(args, self.state, self.control)
            self._stepped(steps_per_epoch)
            if self.control.should_training_stop:
                break
        return self._ended(started)

    def _begun(self, checkpoint: Path | None) -> PrivateTraining:
        """Optimizer, scheduler and the private run, from the beginning or from a checkpoint."""
        if self.training is not None:
            self.training.ledger.close()
        self.create_optimizer()
        self.create_scheduler(num_training_steps=self.plan.steps)
        options: dict[str, Any] = {**self._options, "probe": self._probe()}
        training = privatize(
            self.model,
            self.optimizer,
            self.plan,
            self._autocast(self._losses),
            ledger=self._ledger,
            microbatch=self.args.per_device_train_batch_size,
            **options,
        )
        if checkpoint is None and training.ledger.charges:
            training.ledger.close()
            raise ParameterMismatch(
                f"{self._ledger} is the ledger of a run that has spent epsilon={training.epsilon:.4g} already. Go on "
                "with train(resume_from_checkpoint=True), or give this run its own output_dir."
            )
        epochs = math.ceil(self.plan.steps * self.plan.sampling_prob)
        steps_per_epoch = max(1, round(1 / self.plan.sampling_prob))
        self._init_training_state(self.plan.steps, steps_per_epoch, epochs, checkpoint and str(checkpoint), None)
        if checkpoint is not None:
            load_checkpoint(training, checkpoint / CHECKPOINT)
            self.lr_scheduler.__dict__.update(json.loads((checkpoint / SCHEDULER).read_text()))
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.training = training
        return training

    def _autocast(self, losses: LossFn) -> LossFn:
        if not self.args.bf16:
            return losses

        def cast(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
            with torch.autocast(self.args.device.type, torch.bfloat16):
                return losses(model, batch)

        return cast

    def _records(self) -> tuple[Any, Callable[[list[Any]], Any]]:
        """The records and what makes batches of them, without columns that the model does not take."""
        dataset: Any = self.train_dataset
        if dataset is None:
            raise ParameterMismatch("PrivateTrainer needs a train_dataset to train on.")
        if hasattr(dataset, "remove_columns"):  # of the package `datasets`
            return self._remove_unused_columns(dataset, description="training"), self.data_collator
        return dataset, self._get_collator_with_removed_columns(self.data_collator, description="training")

    def _probe(self) -> Any:
        dataset, collate = self._records()

        def batch(records: list[Any]) -> Any:
            return map_tensors(collate(list(records)), lambda x: x.to(self.args.device))

        found = self._given_probe
        if found is None and len(dataset):
            found = made_records(self.model, lambda records: self._losses(self.model, batch(records)), dataset[0])
        if self._own_losses and found:
            check_losses_of(self.model, batch(list(found[:1])))
        return found

    def _stepped(self, steps_per_epoch: int) -> None:
        """After a step: what Trainer does there, with released values only."""
        if not isinstance(self.lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            self.lr_scheduler.step()
        self.state.global_step += 1
        self.state.epoch = self.state.global_step / steps_per_epoch
        self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
        if self.state.global_step % steps_per_epoch == 0:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        if self.control.should_log:
            self.log(self.released())
        if self.control.should_evaluate:
            self._looked_at()
        if self.control.should_save:
            self._save_checkpoint(self.model, None)
            self.control = self.callback_handler.on_save(self.args, self.state, self.control)

    def released(self) -> dict[str, float]:
        """What may be shown while training."""
        assert self.training is not None
        return {
            "epsilon": self.training.epsilon,
            "clip_norm": self.training.clip_norm,
            "learning_rate": self._get_learning_rate(),
        }

    def _looked_at(self) -> None:
        metrics = self._evaluate(None, None)
        self.model.train()
        better = self._determine_best_metric(metrics=metrics, trial=None)
        if str(getattr(self.args.save_strategy, "value", "")) == "best":
            self.control.should_save = better

    def _ended(self, started: float) -> TrainOutput:
        assert self.training is not None
        self.is_in_train = False
        metrics = {
            "epsilon": self.training.epsilon,
            "delta": self.plan.delta,
            "train_runtime": round(time.time() - started, 2),
        }
        self.log(dict(metrics))
        if self.args.load_best_model_at_end and self.state.best_model_checkpoint is not None:
            self._load_best_model()
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        return TrainOutput(self.state.global_step, math.nan, metrics)

    # -- checkpoints --------------------------------------------------------------------------------

    def _checkpoint(self, given: str | bool | None) -> Path | None:
        found = get_last_checkpoint(self.args.output_dir) if given is True else given or None
        if given is True and found is None:
            raise ParameterMismatch(f"{self.args.output_dir} holds no checkpoint to resume from.")
        return None if found is None else Path(str(found))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """A checkpoint of clipwise: no code is run when it is loaded, and the ledger must have passed through it."""
        assert self.training is not None
        save_checkpoint(self.training, Path(output_dir) / CHECKPOINT)
        state = {k: v for k, v in self.lr_scheduler.state_dict().items() if k != "lr_lambdas" and _plain(v)}
        (Path(output_dir) / SCHEDULER).write_text(json.dumps(state))

    def _save_rng_state(self, output_dir: str) -> None:
        """A resumed run draws everything anew."""

    # -- looking at data ----------------------------------------------------------------------------

    def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
        """As Trainer's, on records that were declared public."""
        self._check_public("evaluate()", given[0] if given else named.get("eval_dataset"))
        metrics: dict[str, float] = super().evaluate(*given, **named)
        return metrics

    def predict(self, *given: Any, **named: Any) -> Any:
        """As Trainer's, on records that were declared public."""
        self._check_public("predict()", given[0] if given else named.get("test_dataset"))
        return super().predict(*given, **named)

    def _check_public(self, what: str, records: Any = None) -> None:
        if not self.eval_is_public or (records is not None and records is self.train_dataset):
            raise PrivateData(
                f"{what} looks at records, and what it shows is not covered by the guarantee. If they are public, say "
                "PrivateTrainer(eval_is_public=True); if not, private_accuracy() pays for the look."
            )

    def private_accuracy(self, dataset: Any, *, size: float, batch_size: int = 1) -> float:
        """The share of right answers on private records, with noise: a look that Plan(evaluations=…) has paid for."""
        if self.training is None:
            raise PrivateData("private_accuracy() needs the ledger of a run: call train() first.")
        if head_of(self.model) == "span":
            raise UnsupportedOp("private_accuracy() does not know what is right for spans; use clipwise.private_score.")
        collate = self._get_collator_with_removed_columns(self.data_collator, description="evaluation")
        return private_score(
            self.training,
            dataset,
            right,
            size=size,
            collate_fn=collate,
            device=self.args.device,
            batch_size=batch_size,
        )

    def hyperparameter_search(self, *given: Any, **named: Any) -> Any:
        """Refused."""
        raise UnsupportedOp("A search on private data must be paid for: clipwise.tune() does that.")


def _warn_of_private_weights(model: nn.Module | None) -> None:
    """What an earlier private run spent on these weights is not counted in this one."""
    source = Path(str(getattr(getattr(model, "config", None), "_name_or_path", "") or "."))
    if (source / CHECKPOINT).exists():
        warnings.warn(
            f"The weights come from {source}, a checkpoint of a private run. What that run spent on its records is not "
            "part of this plan: if they are the same records, the two add up. train(resume_from_checkpoint=…) goes on "
            "with one plan.",
            stacklevel=3,
        )


def _plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def _check(args: TrainingArguments, plan: Plan, eval_is_public: bool, trainer: Mapping[str, Any]) -> None:
    """Refuse by name what would break the guarantee, or would be left aside without a word."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a clipwise.Plan, got {type(plan).__name__}; see plan_for(args, …).")
    for name, (fine, why) in REFUSED.items():
        if not fine(getattr(args, name, None)) and hasattr(args, name):
            raise UnsupportedOp(f"TrainingArguments({name}={getattr(args, name)!r}) {why}. Leave it out.")
    dataset = trainer.get("train_dataset")
    if dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ParameterMismatch(
            "train_dataset needs a length and records by number: Poisson sampling must be able to draw any of them."
        )
    if trainer.get("compute_loss_func") is not None:
        raise UnsupportedOp("compute_loss_func gives one loss for the batch. Pass losses=…, one loss per example.")
    if str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no" and not eval_is_public:
        raise PrivateData(
            f"TrainingArguments(eval_strategy={args.eval_strategy.value!r}) looks at eval_dataset while training. If "
            "it is public, say PrivateTrainer(eval_is_public=True)."
        )
    if args.max_steps > 0 and args.max_steps != plan.steps:
        raise ParameterMismatch(f"TrainingArguments(max_steps={args.max_steps}), but the plan has {plan.steps} steps.")
    if not math.isclose(_batch(args), plan.expected_batch_size, rel_tol=1e-6):
        raise ParameterMismatch(
            f"per_device_train_batch_size × gradient_accumulation_steps = {_batch(args)}, but the plan expects batches "
            f"of {plan.expected_batch_size:g}. plan_for(args, size=…, epsilon=…, delta=…) makes them agree."
        )
    if args.output_dir is None or not os.fspath(args.output_dir):
        raise ParameterMismatch("TrainingArguments(output_dir=…) is needed: the ledger is kept there.")
