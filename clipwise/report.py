"""One self-contained HTML page per run: what is promised, what it cost, and how it went. No scripts, no network.

    run folder (report.json) ─► page() ─► report.html

Only released values and public numbers are shown. What a run folder marks as `non_private` is left out unless asked
for, and then it says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ._show import shown_delta, shown_epsilon
from .plan import Plan

Points = Sequence[tuple[float, float]]


def epsilon_over_steps(plan: Plan, charges: int, looks: int = 0, points: int = 8) -> list[tuple[float, float]]:
    """(steps, ε) along the run, never understated: evaluations count from the start."""
    at = sorted({round(charges * k / points) for k in range(points + 1)})
    return [(k, plan.epsilon_at(plan.delta, k, looks) if k or looks else 0.0) for k in at]


def save_report(
    training: Any,
    folder: str | Path,
    *,
    title: str = "A private run",
    result: Mapping[str, Any] | None = None,
    clip_norms: Sequence[float] | None = None,
) -> Path:
    """Write report.json and report.html of a run to `folder`; returns the page.

    Args:
        training: the run; its statement and its ε over the steps go into the report.
        folder: made if it is not there.
        title: the page's heading.
        result: what else may be shown, such as {"accuracy": 0.93, "test_examples": 297} on public records.
        clip_norms: C of every step, if it moved.
    """
    ledger = training.ledger
    curves: dict[str, Any] = {"epsilon": epsilon_over_steps(training.plan, ledger.charges, ledger.looks)}
    if clip_norms is not None:
        curves["clip_norm"] = list(clip_norms)
    shown = {"epsilon": training.epsilon, "delta": training.plan.delta, "steps": ledger.charges, **(result or {})}
    content = {"title": title, "result": shown, "privacy_statement": training.statement(), "curves": curves}
    path = Path(folder) / "report.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")
    return write_report(path)


def write_report(run: str | Path, *, non_private: bool = False) -> Path:
    """Read RUN/report.json, write RUN/report.html; the page's path."""
    given = Path(run)
    source = given / "report.json" if given.is_dir() else given
    if not source.exists():
        raise FileNotFoundError(f"{source} does not exist: give the folder that `clipwise train --out` has written.")
    try:
        content = json.loads(source.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{source} is not a run's report: {error}.") from error
    if not isinstance(content, dict) or "privacy_statement" not in content:
        raise ValueError(f"{source} is not a run's report: it has no privacy_statement.")
    target = source.with_suffix(".html")
    target.write_text(page(content, non_private=non_private), encoding="utf-8")
    return target


def page(run: Mapping[str, Any], *, non_private: bool = False) -> str:
    """The page of one run."""
    statement, result = run["privacy_statement"], run.get("result", {})
    curves = run.get("curves", {})
    parts = [_verdict(statement), _figures(statement, result)]
    if len(curves.get("epsilon", [])) > 1 and all(math.isfinite(e) for _, e in curves["epsilon"]):
        parts.append(_chart("Privacy spent", "steps", "ε", curves["epsilon"]))
    if len({c for c in curves.get("clip_norm", []) if 0 < c < math.inf}) > 1:
        points = list(enumerate(curves["clip_norm"], start=1))
        parts.append(_chart("Clip norm, from released values", "steps", "C", points, log=True))
    parts += [_mechanism(statement), _several(statement), _lists(statement)]
    if non_private and run.get("non_private"):
        parts.append(_secret(run["non_private"]))
    title = escape(str(run.get("title", "A private training run")))
    return _PAGE.replace("%TITLE%", title).replace("%BODY%", "\n".join(parts))


def _verdict(statement: Mapping[str, Any]) -> str:
    sure = bool(statement.get("certified"))
    kind = "good" if sure else "bad" if "NOT" in str(statement.get("guarantee")) else "fair"
    told = {
        "good": "The guarantee stands on what clipwise did itself.",
        "fair": "The guarantee stands on what the user asserted, listed below.",
        "bad": "No guarantee can be given for this run.",
    }[kind]
    return f'<p class="verdict {kind}"><b>{escape(str(statement.get("guarantee", "")))}</b><br>{told}</p>'


def _figures(statement: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    shown = [
        ("ε spent", shown_epsilon(statement["spent_epsilon"])),
        ("δ", shown_delta(statement["delta"])),
        ("steps", f"{statement['steps_charged']:,}"),
    ]
    if (accuracy := result.get("test_accuracy")) is not None:
        shown.insert(0, ("test accuracy, public records", f"{100 * accuracy:.1f}%"))
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in shown)
    return f'<dl class="figures">{cells}</dl>'


def _mechanism(statement: Mapping[str, Any]) -> str:
    left_out = {"guarantee", "certified", "notes", "asserted_by_user", "not_certified", "spent_epsilon_at_delta"}
    rows = []
    for name, value in statement.items():
        if name in left_out or value is None:
            continue
        text = ", ".join(f"{k}: {_number(v)}" for k, v in value.items()) if isinstance(value, dict) else _number(value)
        text = _EXACT[name](value) if name in _EXACT else text
        rows.append(f"<tr><th>{escape(name.replace('_', ' '))}</th><td>{escape(text)}</td></tr>")
    return f"<h2>Mechanism</h2><div class=wide><table>{''.join(rows)}</table></div>"


def _rounded_down(value: float) -> str:
    digits = 5 - math.floor(math.log10(value)) if value > 0 else 0
    return f"{math.floor(value * 10.0**digits) / 10.0**digits:g}" if math.isfinite(value) else str(value)


# Nothing looks better than it is: ε and δ are not rounded down, and noise is not rounded up.
_EXACT: dict[str, Callable[[Any], str]] = {
    "epsilon": shown_epsilon,
    "spent_epsilon": shown_epsilon,
    "delta": shown_delta,
    "noise_multiplier": _rounded_down,
    "gradient_noise_multiplier": _rounded_down,
    "threshold_noise_multiplier": _rounded_down,
}


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _several(statement: Mapping[str, Any]) -> str:
    found = statement.get("spent_epsilon_at_delta", {})
    rows = "".join(f"<tr><th>{escape(d)}</th><td>{shown_epsilon(e)}</td></tr>" for d, e in found.items())
    return f"<h2>ε at several δ</h2><table><tr><th>δ</th><th>ε</th></tr>{rows}</table>" if rows else ""


def _lists(statement: Mapping[str, Any]) -> str:
    asserted = [f"{k}: {v}" for k, v in statement.get("asserted_by_user", {}).items()] + list(
        statement.get("notes", [])
    )
    shown = (
        ("What the user asserted", asserted),
        ("What was not private, or is not covered", statement["not_certified"]),
    )
    return "".join(
        f"<h2>{title}</h2><ul>{''.join(f'<li>{escape(str(line))}</li>' for line in lines)}</ul>"
        for title, lines in shown
        if lines
    )


def _secret(diagnostics: Mapping[str, Sequence[float]]) -> str:
    parts = ["<section class=secret><h2>NOT PRIVATE: do not share this section</h2>"]
    parts.append("<p>Computed from private records without noise; ε does not cover it.</p>")
    for name, values in diagnostics.items():
        counts, low, high = _histogram(list(values))
        points = [(low + (high - low) * k / len(counts), float(n)) for k, n in enumerate(counts)]
        parts.append(_chart(name, name, "records", points))
    return "".join(parts) + "</section>"


def _histogram(values: list[float], bins: int = 30) -> tuple[list[int], float, float]:
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite) + 1e-12
    counts = [0] * bins
    for v in finite:
        counts[min(bins - 1, int((v - low) / (high - low) * bins))] += 1
    return counts, low, high


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 640, 240, 62, 12, 14, 44


def _chart(title: str, x_name: str, y_name: str, points: Points, log: bool = False) -> str:
    """A line as inline SVG, in the colours of the page."""
    points = [(float(x), float(y)) for x, y in points if math.isfinite(y) and (y > 0 or not log)]
    if len(points) > 400:
        points = [*points[:: len(points) // 400 + 1], points[-1]]
    value = math.log10 if log else float
    ys = [value(y) for _, y in points]
    low, high = (min(ys), max(ys)) if log else (min(0.0, *ys), max(ys))
    span_x, span_y = (points[-1][0] - points[0][0]) or 1.0, (high - low) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        right = _LEFT + (x - points[0][0]) / span_x * (_WIDTH - _LEFT - _RIGHT)
        return right, _HEIGHT - _BOTTOM - (y - low) / span_y * (_HEIGHT - _TOP - _BOTTOM)

    placed = [place(x, y) for (x, _), y in zip(points, ys, strict=True)]
    path = "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in placed)
    marks = []
    for k in range(5):
        level = low + span_y * k / 4
        _, y = place(points[0][0], level)
        label = f"{10**level if log else level:.3g}"
        marks.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
        at = points[0][0] + span_x * k / 4
        at = round(at) if span_x >= 8 else at
        x, _ = place(at, low)
        anchor = "start" if k == 0 else "end" if k == 4 else "middle"
        marks.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="{anchor}">{at:.4g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    marks.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_name)}</text>')
    label = escape(f"{title}: {y_name}{', log scale' if log else ''}")
    return (
        f'<h2>{label}</h2><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        f'{"".join(marks)}<path d="{path}"/></svg>'
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>%TITLE%</title>
<style>
:root { color-scheme: light dark; --ink: #1c2330; --paper: #fff; --soft: #5b6678; --line: #dfe3ea; --accent: #2457c5;
  --good: #e6f4ea; --fair: #fff5d6; --bad: #fde7e7; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7ebf2; --paper: #14181f; --soft: #9aa6b8; --line: #303846;
  --accent: #7fa6ff; --good: #17351f; --fair: #3d3413; --bad: #431b1b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 46rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 1rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.verdict { padding: .8rem 1rem; border-radius: .5rem; margin: 0 0 1rem; }
.good { background: var(--good); } .fair { background: var(--fair); } .bad { background: var(--bad); }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .75rem; margin: 0; }
.figures div { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .8rem; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 500; color: var(--soft); white-space: nowrap; } td { overflow-wrap: anywhere; }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
svg path { fill: none; stroke: var(--accent); stroke-width: 2; } .grid { stroke: var(--line); }
.secret { border: 2px solid #c62828; border-radius: .5rem; padding: 0 1rem 1rem; margin-top: 2rem; }
ul { padding-left: 1.2rem; } li { margin: .2rem 0; }
@media (max-width: 34rem) { .wide th, .wide td { display: block; padding: .1rem 0; } .wide th { border: 0; }
  svg text { font-size: 17px; } }
</style></head><body>
<h1>%TITLE%</h1>
%BODY%
</body></html>
"""
