"""`clipwise audit`: every rule under every threshold, and one run with canaries, against what is claimed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .audit import Audit
from .audit_training import audit_canaries, audit_step
from .plan import Plan
from .rules import PerLayer, Rule
from .thresholds import Threshold


class TwoLayers(nn.Module):
    """Two linear layers side by side: a record is its own gradient, so that any gradient can be tried."""

    def __init__(self) -> None:
        """Three inputs for one, two for the other."""
        super().__init__()
        self.first, self.second = nn.Linear(3, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """One number per record."""
        outputs: Tensor = self.first(x[:, :3]) + self.second(x[:, 3:])
        return outputs[:, 0]


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    """The output itself."""
    outputs: Tensor = model(batch)
    return outputs


def audit_pair(rule: Rule, threshold: Threshold, sigma: float, delta: float, draws: int, alpha: float) -> Audit | None:
    """The worse of two records, one as long as C and one far longer; None where the two do not go together."""
    numbers: dict[str, Any] = {"noise_multiplier": sigma, "delta": delta, "sampling_prob": 1.0, "steps": 1}
    try:
        plan = Plan(**numbers, expected_batch_size=500, rule=rule, threshold=threshold)
    except ValueError:
        return None
    clip_norm = plan.threshold.init(plan.facts(0, 5)).clip_norm
    others, model, found = 0.1 * torch.eye(5)[:4], TwoLayers(), []
    for norm in (clip_norm * (1 - 1e-6), clip_norm * 1e4):
        record = torch.full((1, 5), norm / math.sqrt(5))
        found.append(audit_step(model, loss, plan, others, record, draws=draws, alpha=alpha / 2))
    return max(found, key=lambda audit: audit.lower)


def audit_table(
    rules: Mapping[str, Callable[[], Rule]],
    thresholds: Mapping[str, Callable[[], Threshold]],
    *,
    sigma: float,
    delta: float,
    draws: int,
    alpha: float,
    canaries: int,
) -> list[dict[str, Any]]:
    """One row per pair that exists, per-layer clipping included, and one for the run with canaries."""
    rows = []
    named = {**{name: make() for name, make in rules.items()}, "psac, per layer": PerLayer()}
    for rule_name, rule in named.items():
        for threshold_name, make_threshold in thresholds.items():
            found = audit_pair(rule, make_threshold(), sigma, delta, draws, alpha)
            if found is not None:
                rows.append({"rule": rule_name, "threshold": threshold_name, **found.as_dict()})
    if canaries:
        run = audit_canaries(delta=delta, canaries=canaries)
        rows.append({"rule": "psac", "threshold": "fixed", **run.as_dict()})
    return rows


def shown(rows: Iterable[Mapping[str, Any]]) -> str:
    """The table as text."""
    lines = [f"{'audit':8} {'rule':16} {'threshold':11} {'lower':>7} {'claimed':>8} {'ratio':>6}  draws"]
    for row in rows:
        verdict = "  REFUTED" if row["refuted"] else ""
        lines.append(
            f"{row['kind']:8} {row['rule']:16} {row['threshold']:11} {row['lower']:7.3f} {row['claimed']:8.3f} "
            f"{row['ratio']:6.3f}  {row['draws']:,}{verdict}"
        )
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Lower bounds beside claims."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'clipwise[figures]'.") from error
    figure, axes = plt.subplots(figsize=(8, 0.32 * len(rows) + 1.6), layout="constrained")
    names = [f"{row['rule']} · {row['threshold']}" + (" · one run" if row["kind"] != "step" else "") for row in rows]
    places = range(len(rows))
    axes.barh(places, [row["lower"] for row in rows], color="#4878a8", height=0.6, label="shown by the audit")
    axes.plot([row["claimed"] for row in rows], places, "|", color="#b03030", ms=12, mew=2, label="claimed")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set_xlabel(f"ε at δ = {rows[0]['delta']:g}")
    figure.legend(loc="outside upper right", ncols=2, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
