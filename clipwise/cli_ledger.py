"""`clipwise ledger verify|show`: what a ledger file says, without a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ._show import shown_delta, shown_epsilon
from .accounting.accountants import epsilon_of
from .accounting.arithmetic import accounted
from .accounting.events import decaying
from .errors import LedgerError
from .ledger_file import LedgerState, read_ledger


def summary(path: Path) -> dict[str, Any]:
    """The verified content of a ledger, with the ε of what it has charged, computed anew from its own plan."""
    state = read_ledger(path)
    plan = state.head.get("plan", {})
    return {
        "file": str(path),
        "verified": True,
        "charges": state.charges,
        "evaluations": state.looks,
        "torn_last_line": state.torn,
        "spent_epsilon": _spent(state, path),
        "planned_epsilon": plan.get("spent", plan.get("epsilon")),
        "delta": plan.get("delta"),
        "plan": plan,
        "asserted_by_user": state.head.get("assertions", {}),
        "notes": state.notes,
        "last_hash": state.last_hash,
    }


def _spent(state: LedgerState, path: Path) -> float:
    plan = state.head.get("plan", {})
    if "search" in plan:  # of a search over runs: spent whole as soon as it has begun
        return float(plan["spent"]) if state.charges else 0.0
    if not state.charges and not state.looks:
        return 0.0
    try:
        event = decaying(
            plan["noise_multiplier"],
            plan["noise_decay"],
            max(state.charges, 1),
            max(plan["steps"], state.charges),
            plan["sampling_prob"],
            plan["adjacency"],
            state.looks / plan["evaluation_noise"] ** 2,
        )
        return epsilon_of(event, accounted(plan["delta"]), plan["accountant"])
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerError(f"Ledger {path} is of another version: its plan cannot be accounted ({error}).") from error


def shown_summary(found: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"ledger         {found['file']}: every line unbroken, the last one {found['last_hash'][:12]}",
        f"spent          epsilon = {shown_epsilon(found['spent_epsilon'])} at delta = {shown_delta(found['delta'])}",
        f"of             epsilon = {shown_epsilon(found['planned_epsilon'])} planned",
        f"charged        {found['charges']} step(s), {found['evaluations']} evaluation(s)",
    ]
    if found["torn_last_line"]:
        lines.append("torn           the last line was cut off by a crash; it counts as charged")
    lines += [f"asserted       {name}: {text}" for name, text in found["asserted_by_user"].items()]
    lines += [f"note           {text}" for text in found["notes"]]
    return "\n".join(lines)


def shown_entries(path: Path) -> str:
    """Every line, as it was written."""
    return "\n".join(json.dumps(entry, sort_keys=True) for entry in read_ledger(path).entries)
