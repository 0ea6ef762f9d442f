"""The privacy statement of a run: what is promised, on whose word, and what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from ._show import shown_delta
from .accounting.arithmetic import ROOM, tail_delta
from .clipping import trainable
from .errors import CannotCertify
from .ledger import Ledger
from .noise import NoiseSource
from .plan import Plan

NOT_CERTIFIED = (
    "a person with several examples: the unit is one example",
    "choices made by looking at private data: model, learning rate, stopping, preprocessing, vocabulary, class weights",
    "evaluations on private data that were not made by private_score",
    "what was tried before this run and thrown away (see clipwise tune)",
    "the weights that the run began with: what they had seen before",
    "the shapes of records, such as lengths: they are taken as public",
    "side channels: time, memory, power, exceptions' texts",
    "a ledger and a checkpoint that are both put back to an older state",
)
_IN_MEMORY = "what a crash of this process forgets: its ledger lives in memory (privatize(ledger=path) keeps it)"
_GAPS = "floating-point gaps in the noise (privatize(noise='hardened') closes them)"


class Stated(Protocol):
    """Whatever has a statement: a run."""

    def statement(self) -> dict[str, Any]:
        """What is promised, and what is not."""


def arithmetic_delta(plan: Plan, noise: NoiseSource, model: nn.Module) -> float:
    """What the finite tails of the noise add to δ over the whole plan, wherever it runs."""
    size = sum(p.numel() for p in trainable(model).values())
    apart = 1 if plan.adjacency == "add_or_remove_one" else 2  # sensitivities that two neighbouring sums may differ by
    total = tail_delta(
        reach=noise.reach,
        noise_multiplier=plan.noise_multiplier * plan.noise_decay / apart,
        steps=plan.steps * (1 if plan.release is None else 2),
        dimension=size + (plan.release.size if plan.release else 0),
    )
    if plan.evaluations:
        total += tail_delta(
            reach=noise.reach, noise_multiplier=plan.evaluation_noise, steps=plan.evaluations, dimension=1
        )
    return min(total, 1.0)


def check_arithmetic(plan: Plan, noise: NoiseSource, model: nn.Module) -> None:
    """Refuse a plan whose δ has no room for its arithmetic."""
    if noise.certified and (extra := arithmetic_delta(plan, noise, model)) > ROOM * plan.delta:
        raise CannotCertify(
            f"The tails of the noise end too early for so little noise: they would add {extra:.1e} to "
            f"delta={plan.delta:g}. Use privatize(noise='hardened'), whose tails do not end, or more noise."
        )


def run_statement(plan: Plan, ledger: Ledger, noise: NoiseSource, model: nn.Module) -> dict[str, Any]:
    """What can be promised about the run so far, and what cannot. Every value is public and fits into JSON."""
    asserted, notes = ledger.head["assertions"], list(ledger.notes)
    extra = arithmetic_delta(plan, noise, model)
    statement = {
        **plan.statement(),
        "spent_epsilon": ledger.spent,
        "spent_epsilon_at_delta": _at_several(plan, ledger, extra),
        "steps_charged": ledger.charges,
        "evaluations_charged": ledger.looks,
        "noise": {"mode": noise.mode, "arithmetic_delta": extra, "room": ROOM},
        "asserted_by_user": asserted,
        "notes": notes,
        "certified": not asserted and not notes,
        "not_certified": [
            *NOT_CERTIFIED,
            *([] if noise.mode == "hardened" else [_GAPS]),
            *([] if ledger.persistent else [_IN_MEMORY]),
        ],
        "ledger": repr(ledger),
    }
    if "seed" in asserted or "noise" in asserted:
        verdict = "NOT PRIVATE: the noise was seeded" if "seed" in asserted else "NOT CERTIFIED: fast noise"
        statement["guarantee"] = verdict
    elif asserted or notes:
        statement["guarantee"] += ", provided that what the user asserted is true" if asserted else ""
        statement["guarantee"] += ", apart from the notes" if notes else ""
    return statement


def save_statement(training: Stated, path: str | Path) -> None:
    """Write the statement of a run as JSON, for those who receive the model."""
    Path(path).write_text(json.dumps(training.statement(), indent=2, ensure_ascii=False) + "\n")


def _at_several(plan: Plan, ledger: Ledger, arithmetic: float) -> dict[str, float]:
    """ε of what was spent, at the plan's δ and at smaller and larger ones that have room for the arithmetic."""
    deltas = {plan.delta if k == 0 else float(f"{plan.delta * 10.0**k:.6g}") for k in range(-2, 3)}
    fitting = sorted(d for d in deltas if d <= 0.1 and (arithmetic <= ROOM * d or d == plan.delta))
    return {shown_delta(delta): plan.epsilon_at(delta, ledger.charges, ledger.looks) for delta in fitting}
