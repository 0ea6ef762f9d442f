"""privatize(): checks everything that can be checked before the data is touched, then makes the run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from ._check import count, one_of, seed_or_none
from ._show import shown_epsilon
from ._types import Engine, LossFn
from .clipping import check_optimizer, trainable
from .engine import OpRule
from .errors import ParameterMismatch, UnsupportedOp
from .guard import GUARDS, earlier_ledgers
from .ledger import Ledger
from .noise import Mode, made_on_cpu
from .parts import Settings
from .plan import Plan
from .ranks import Alone, Ranks
from .sampling import PoissonSampler
from .statement import check_arithmetic
from .training import PrivateTraining

_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "OptimizedModule", "FullyShardedDataParallel"})


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
    ranks: Ranks | None = None,
) -> PrivateTraining:
    """Make a training run private. Neither model nor optimizer is wrapped.

    Guarantee: after any number of `step`s, the model's weights are (`training.epsilon`, plan.delta)-DP with
    respect to one example of the data set given to `batches`, provided that the model treats examples
    independently, which the preflight checks on made-up records before the first batch is drawn.

    Args:
        model: any module; trainable parameters are those with requires_grad.
        optimizer: any torch.optim optimizer over exactly those parameters.
        plan: every public number of the run.
        loss_fn: loss_fn(model, batch) → one loss per example, shape [b]. Without it there is no preflight, and the
            ledger says so.
        ledger: a path, so that the record of what is spent survives; None keeps it in memory.
        microbatch: rows per physical slice; changes memory and speed only.
        compile: compile the step with Inductor: forward, backward, norms and clipping in one graph, on batches padded
            to `microbatch` rows (default: expected_batch_size plus four standard deviations). Takes a while at the
            first step; `training.warm_up` says how long.
        engine: "bookkeeping" (fast), or "vmap" (slow, accepts more).
        preflight: False skips the check; "private" runs it on private records; the ledger says either.
        probe: a few public records for the preflight, instead of made-up ones.
        sampling: "asserted" lets you step your own batches; the ledger says that you vouched for them.
        noise: "hardened" resists floating-point attacks, on the CPU; "fast" uses torch's generator: NOT CERTIFIED,
            and the ledger says so.
        seed: makes the run repeatable and NOT PRIVATE, and the ledger says so.
        op_rules: rules for ops that clipwise does not know.
        ranks: the processes of a run on several; `clipwise.integrations.distributed.privatize` gives them.

    >>> model = nn.Linear(2, 1)
    >>> plan = Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.5, steps=3, expected_batch_size=4)
    >>> training = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, lambda m, x: m(x)[:, 0] ** 2)
    >>> for batch in training.batches(torch.ones(8, 2)):
    ...     training.step(batch)
    >>> training.epsilon == plan.epsilon
    True
    """
    one_of(("bookkeeping", "vmap"), engine=engine)
    one_of(("poisson", "asserted"), sampling=sampling)
    if compile and (engine != "bookkeeping" or loss_fn is None):
        raise UnsupportedOp("compile=True needs a loss_fn and engine='bookkeeping': it compiles training.step().")
    if microbatch is not None:
        count(microbatch=microbatch)
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a clipwise.Plan, got {type(plan).__name__}.")
    if loss_fn is not None and not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function of (model, batch), got {loss_fn!r}.")
    _check_model(model)
    _check_kind(optimizer)
    check_optimizer(optimizer, model)
    plan.rule.sensitivity(1.0, len(plan.rule.groups(list(trainable(model)))))
    ranks = Alone() if ranks is None else ranks
    source = ranks.noise(noise, seed_or_none(seed=seed))
    sampler = PoissonSampler(plan.sampling_prob, seed, ranks.share)
    check_arithmetic(plan, source, model)
    asserted = _assertions(sampling, noise, seed, preflight if loss_fn is not None else "none, for want of a loss_fn")
    asserted |= _of_ones_own(plan)
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in trainable(model).items()]
    ranks.same("plan, options or model", f"{plan.digest} {asserted} {noise} {engine} {compile} {shapes}")
    if any(p.device.type == "cpu" for p in model.parameters()):
        ranks.same("the code that makes noise on a CPU (built on some, not on others)", made_on_cpu())
    earlier = (*earlier_ledgers(model), *([GUARDS[optimizer].ledger] if optimizer in GUARDS else []))
    opened = ranks.ledger(
        lambda: _opened(ledger, plan, asserted, noise, earlier), lambda: Ledger(plan, None, asserted, noise)
    )
    if compile and microbatch is None:  # fixed rows, which a Poisson batch hardly ever exceeds: then it is split
        expected = plan.expected_batch_size / ranks.share[1]
        microbatch = math.ceil(expected + 4 * math.sqrt(expected))
    settings = Settings(microbatch, engine, preflight, probe, sampling, op_rules, compile)
    return PrivateTraining(model, optimizer, plan, loss_fn, opened, source, sampler, settings, ranks)


def _assertions(sampling: str, noise: str, seed: int | None, preflight: bool | str) -> dict[str, str]:
    """What the user vouches for: it stands in the ledger's first line and in every statement."""
    asserted = {}
    if sampling == "asserted":
        asserted["sampling"] = "asserted to be Poisson"
    if noise == "fast":
        asserted["noise"] = "fast: NOT CERTIFIED"
    if seed is not None:
        asserted["seed"] = f"{seed}: NOT PRIVATE"
    if preflight is not True:
        how = {False: "skipped", "private": "on private records, outside the guarantee"}
        asserted["preflight"] = how.get(preflight, str(preflight))
    return asserted


def _of_ones_own(plan: Plan) -> dict[str, str]:
    """Rules and thresholds that are not clipwise's: that they keep their sensitivity is the user's word."""
    given = {"rule": plan.rule, "rule in each layer": getattr(plan.rule, "rule", None), "threshold": plan.threshold}
    own = {what: type(x) for what, x in given.items() if x is not None}
    return {
        what: f"{kind.__name__}, of the user's own (check_{what.split()[0]} tests it)"
        for what, kind in own.items()
        if not kind.__module__.startswith("clipwise.")
    }


def _opened(
    ledger: str | Path | Ledger | None,
    plan: Plan,
    asserted: dict[str, str],
    noise: str,
    earlier: tuple[Ledger, ...],
) -> Ledger:
    """Open the ledger last, so that a refusal leaves no lock behind. What was spent on this model is not forgotten."""
    path = ledger.path if isinstance(ledger, Ledger) else None if ledger is None else Path(ledger).absolute()
    spent = [before for before in earlier if before is not ledger and (before.charges or before.looks)]
    for before in spent:
        if path is None or path != before.path:
            raise ParameterMismatch(
                f"This model, or a part of it, was already trained by a run that spent "
                f"epsilon={shown_epsilon(before.spent)}; under a new ledger that would be forgotten. Pass "
                "ledger=training.ledger, or its path, to go on; for a run of its own make a new model."
            )
    lost = ParameterMismatch(
        f"Ledger {path} is gone, or is not the one that this model was trained with, or an older copy of it: what was "
        "spent is not in it. Restore the file; for a run of its own make a new model."
    )
    if spent and path is not None and not path.exists():  # before a new one appears there
        raise lost
    opened = ledger if isinstance(ledger, Ledger) else Ledger(plan, ledger, asserted, noise)
    if not all(opened.holds(before.position) for before in spent):
        opened.close()
        raise lost
    if (opened.plan.digest, opened.head["assertions"], opened.head["noise"]) != (plan.digest, asserted, noise):
        raise ParameterMismatch("The Ledger object was made for another plan or other assertions.")
    return opened


def _check_kind(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer must be a torch.optim optimizer, got {type(optimizer).__name__}.")
    if isinstance(optimizer, (torch.optim.LBFGS, torch.optim.SparseAdam)):
        raise ParameterMismatch(
            f"{type(optimizer).__name__} evaluates the loss itself or needs sparse gradients; neither can be noised. "
            "Use SGD, Adam or another optimizer that reads dense gradients."
        )


def _check_model(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
    for name, module in model.named_modules():
        if type(module).__name__ in _WRAPPERS or isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedOp(
                f"Module {name or 'model'!r} is a {type(module).__name__}: its ops cannot be recorded. "
                "Pass the plain module to privatize()."
            )
    if not trainable(model):
        raise ParameterMismatch("The model has no trainable parameter (requires_grad=True): there is nothing to train.")
