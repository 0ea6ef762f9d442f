"""The command line: train, report, tune, epsilon, calibrate, audit, ledger. Bad input: one clear line, exit code 2."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from typer.exceptions import TyperException

from . import __version__
from ._check import count, open_unit, positive
from ._show import shown_delta, shown_epsilon
from .accounting import calibrate as solve_sigma
from .accounting import epsilon as spent_epsilon
from .accounting.tuning import METHODS
from .cli_ledger import shown_entries, shown_summary, summary
from .cli_tuning import digits_search, tuning_costs, tuning_table
from .errors import ClipwiseError
from .plan import Plan
from .report import write_report
from .rules import PSAC, Abadi, AutoS, AutoV, Global, PerLayer, Reparam, Rule
from .thresholds import (
    DecayThreshold,
    FixedThreshold,
    MinErrorThreshold,
    PercentileThreshold,
    QuantileThreshold,
    Threshold,
)
from .training import PrivateTraining

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Train under differential privacy without a clipping threshold to tune.",
)
RULES: dict[str, Callable[[], Rule]] = {
    "psac": PSAC,
    "auto-s": AutoS,
    "auto-v": AutoV,
    "abadi": Abadi,
    "reparam": Reparam,
    "global": Global,
}
THRESHOLDS = ("fixed", "decay", "quantile", "percentile", "min-error")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Delta = Annotated[float, typer.Option(help="δ, the probability that the guarantee may fail by.")]
SamplingProb = Annotated[float, typer.Option(help="q, the probability that an example joins a batch.")]
Steps = Annotated[int, typer.Option(help="How many steps the run takes.")]
Accountant = Annotated[
    str, typer.Option(help="pld (tight), rdp (looser), or gdp (an estimate that certifies nothing).")
]
Adjacency = Annotated[str, typer.Option(help="add_or_remove_one or replace_one.")]


@contextmanager
def _one_clear_line() -> Iterator[None]:
    """Refusals are for people: no traceback, exit code 2."""
    try:
        yield
    except (ClipwiseError, ValueError, TypeError, ImportError, OSError) as error:
        print(f"clipwise: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(2) from error


def _show(values: dict[str, Any], as_json: bool, text: str) -> None:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    print(json.dumps(finite, allow_nan=False) if as_json else text)


def _threshold(name: str, clip_norm: float) -> Threshold:
    """`clip_norm` is C, or the C that a moving threshold begins with."""
    if name not in THRESHOLDS:
        raise ValueError(f"--threshold must be one of {', '.join(THRESHOLDS)}, got {name!r}.")
    if name == "fixed":
        return FixedThreshold(clip_norm)
    if name == "decay":
        return DecayThreshold(clip_norm)
    if name == "quantile":
        return QuantileThreshold(initial=clip_norm)
    return PercentileThreshold(initial=clip_norm) if name == "percentile" else MinErrorThreshold(clip_norm)


def _rule(name: str, per_layer: bool) -> Rule:
    if name not in RULES:
        raise ValueError(f"--rule must be one of {', '.join(RULES)}, got {name!r}.")
    rule = RULES[name]()
    return PerLayer(rule) if per_layer else rule


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Train under differential privacy without a clipping threshold to tune."""
    if version:
        print(f"clipwise {__version__}")
        raise typer.Exit


@app.command()
def epsilon(
    noise_multiplier: Annotated[float, typer.Option(help="σ: noise standard deviation / sensitivity.")],
    sampling_prob: SamplingProb,
    steps: Steps,
    delta: Delta,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_or_remove_one",
    as_json: Json = False,
) -> None:
    """ε of a run with a given noise multiplier."""
    with _one_clear_line():
        numbers: dict[str, Any] = {
            "noise_multiplier": noise_multiplier,
            "sampling_prob": sampling_prob,
            "steps": steps,
            "delta": delta,
            "accountant": accountant,
            "adjacency": adjacency,
        }
        found = spent_epsilon(**numbers)
        certified = accountant != "gdp"
        remark = "" if certified else "  (an ESTIMATE below the true value; certifies nothing)"
        text = f"epsilon = {shown_epsilon(found)} at delta = {shown_delta(delta)}, {accountant}, {adjacency}{remark}"
        _show({"epsilon": found, "certified": certified, **numbers}, as_json, text)


@app.command()
def calibrate(
    epsilon: Annotated[float, typer.Option(help="The ε that must not be exceeded.")],
    sampling_prob: SamplingProb,
    steps: Steps,
    delta: Delta,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_or_remove_one",
    tuning: Annotated[int | None, typer.Option(help="What tuning over so many values costs, beside no tuning.")] = None,
    as_json: Json = False,
) -> None:
    """The noise multiplier for a wanted ε, never above it."""
    with _one_clear_line():
        if tuning is not None:
            if accountant != "pld" or adjacency != "add_or_remove_one":
                raise ValueError("--tuning compares fixed accountants under add_or_remove_one; leave both options out.")
            rows = tuning_costs(epsilon=epsilon, delta=delta, sampling_prob=sampling_prob, steps=steps, runs=tuning)
            _show({"tuning": rows}, as_json, tuning_table(rows, epsilon, delta))
            return
        common: dict[str, Any] = {
            "sampling_prob": sampling_prob,
            "steps": steps,
            "delta": delta,
            "accountant": accountant,
            "adjacency": adjacency,
        }
        sigma = solve_sigma(epsilon=epsilon, **common)
        achieved = spent_epsilon(noise_multiplier=sigma, **common)
        at = f"epsilon = {shown_epsilon(achieved)} <= {epsilon:g} at delta = {shown_delta(delta)}"
        text = f"noise multiplier = {math.ceil(sigma * 1e6) / 1e6:.6f}  ({at})"
        _show({"noise_multiplier": sigma, "epsilon": achieved, "target_epsilon": epsilon, **common}, as_json, text)


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="What to train: digits.")],
    epsilon: Annotated[float, typer.Option(help="The ε of the whole run.")] = 3.0,
    delta: Delta = 1e-4,
    rule: Annotated[str, typer.Option(help=f"Clipping rule: {', '.join(RULES)}.")] = "psac",
    threshold: Annotated[str, typer.Option(help=f"Who decides C: {', '.join(THRESHOLDS)}.")] = "fixed",
    per_layer: Annotated[bool, typer.Option("--per-layer", help="Clip each layer by its own norm.")] = False,
    clip_norm: Annotated[float, typer.Option(help="C, or the first C of a moving threshold.")] = 1.0,
    steps: Steps = 200,
    sampling_prob: SamplingProb = 0.2,
    lr: Annotated[float, typer.Option(help="Learning rate of SGD with momentum 0.9.")] = 0.2,
    ledger: Annotated[Path | None, typer.Option(help="File that records what is spent; survives crashes.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for model and report.")] = Path("runs/digits"),
    as_json: Json = False,
) -> None:
    """Train a built-in recipe under differential privacy."""
    from .recipes import digits

    with _one_clear_line():
        if recipe != "digits":
            raise ValueError(f"Unknown recipe {recipe!r}; there is one: digits.")
        plan = Plan(
            epsilon=epsilon,
            delta=delta,
            sampling_prob=sampling_prob,
            steps=steps,
            expected_batch_size=max(sampling_prob * digits.TRAIN_SIZE, 1),
            rule=_rule(rule, per_layer),
            threshold=_threshold(threshold, clip_norm),
        )
        console = Console(stderr=True)
        if not as_json:
            print(plan)
        with _progress_bar(plan, console, hidden=as_json) as tick:
            result = digits.train_digits(plan, lr=positive(lr=lr), ledger=ledger, out=out, progress=tick)
        where = (
            f"ledger         {ledger}" if ledger else "ledger         in memory only (give --ledger FILE to keep it)"
        )
        text = "\n".join(
            (
                f"test accuracy  {100 * result.test_accuracy:.1f}% on {result.test_size} held-out digits",
                f"privacy spent  epsilon = {shown_epsilon(result.epsilon)} at delta = {shown_delta(result.delta)}, "
                f"{result.steps} steps",
                f"time           {result.seconds:.1f} s",
                where,
                f"report         {result.report}",
            )
        )
        _show(vars(result), as_json, text)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="The folder that `train --out` has written, or its report.json.")],
    non_private: Annotated[
        bool, typer.Option("--non-private", help="Show diagnostics of private records too, marked: do not share them.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a run's report as one HTML page, for those who receive the model."""
    with _one_clear_line():
        path = write_report(run, non_private=non_private)
        _show({"report": str(path)}, as_json, f"report         {path}")


@app.command()
def tune(
    recipe: Annotated[str, typer.Argument(help="What to tune: digits.")],
    epsilon: Annotated[float, typer.Option(help="The ε of the whole search.")] = 3.0,
    delta: Delta = 1e-4,
    method: Annotated[str, typer.Option(help=f"How the search is paid for: {', '.join(METHODS)}.")] = METHODS[2],
    runs: Annotated[float, typer.Option(help="How many runs (their mean, where it is secret).")] = 10,
    rule: Annotated[str, typer.Option(help=f"Clipping rule: {', '.join(RULES)}.")] = "abadi",
    clip_norms: Annotated[str, typer.Option(help="Values of C, with commas.")] = "0.01,0.03,0.1,0.2,0.4,0.8,1.6,3,6,12",
    lrs: Annotated[str, typer.Option(help="Learning rates, with commas.")] = "0.2",
    steps: Steps = 200,
    sampling_prob: SamplingProb = 0.2,
    ledger: Annotated[Path | None, typer.Option(help="File that records the search; survives crashes.")] = None,
    out: Annotated[Path | None, typer.Option(help="File for the winner's weights.")] = None,
    as_json: Json = False,
) -> None:
    """Search clip norms and learning rates, pay for it, and release the winner only."""
    with _one_clear_line():
        if recipe != "digits":
            raise ValueError(f"Unknown recipe {recipe!r}; there is one: digits.")
        numbers = {"epsilon": epsilon, "delta": delta, "steps": steps, "sampling_prob": sampling_prob}
        search = digits_search(method, runs, _rule(rule, False), clip_norms, lrs, numbers)
        if not as_json:
            print(search.plan)
        if out is not None and out.is_dir():
            raise ValueError(f"--out must be a file, but {out} is a folder.")
        with Console(stderr=True).status("searching; how many runs there are is secret"):
            winner = search.run(ledger, out)
        _show(winner, as_json, search.text(winner))


@app.command()
def audit(
    noise_multiplier: Annotated[float, typer.Option(help="σ of the audited step.")] = 1.0,
    delta: Delta = 1e-5,
    draws: Annotated[int, typer.Option(help="Releases per world; a million takes a minute or two.")] = 100_000,
    canaries: Annotated[int, typer.Option(help="Of the run that is audited as a whole; 0 leaves it out.")] = 10_000,
    alpha: Annotated[float, typer.Option(help="How often a step's bound may be wrong by chance.")] = 1e-6,
    out: Annotated[Path | None, typer.Option(help="Picture of bounds and claims (.png, .svg).")] = None,
    as_json: Json = False,
) -> None:
    """Attack the library's own steps, for every rule and threshold: lower bounds on ε beside the claims."""
    from .cli_audit import audit_table, plot, shown

    with _one_clear_line():
        rows = audit_table(
            RULES,
            {name: partial(_threshold, name, 1.0) for name in THRESHOLDS},
            sigma=positive(noise_multiplier=noise_multiplier),
            delta=open_unit(delta=delta),
            draws=count(draws=draws),
            alpha=open_unit(alpha=alpha),
            canaries=count(minimum=0, canaries=canaries),
        )
        if out is not None:
            plot(rows, out)
        _show({"audits": rows}, as_json, shown(rows) + (f"\npicture        {out}" if out else ""))
    if any(row["refuted"] for row in rows):
        raise typer.Exit(1)


ledger_app = typer.Typer(no_args_is_help=True, help="Look at a ledger file: verify, show.")
app.add_typer(ledger_app, name="ledger")


@ledger_app.command()
def verify(file: Annotated[Path, typer.Argument(help="The ledger.")], as_json: Json = False) -> None:
    """Check every line of a ledger, and compute what it has spent."""
    with _one_clear_line():
        found = summary(file)
        _show(found, as_json, shown_summary(found))


@ledger_app.command()
def show(file: Annotated[Path, typer.Argument(help="The ledger.")]) -> None:
    """Print a ledger's lines, once they are verified."""
    with _one_clear_line():
        print(shown_entries(file))


@contextmanager
def _progress_bar(
    plan: Plan, console: Console, hidden: bool
) -> Iterator[Callable[[PrivateTraining, int], None] | None]:
    """Step and ε spent so far; ε is computed a dozen times in all, since it takes a third of a second."""
    every = max(plan.steps // 12, 1)
    if hidden:
        yield None
        return
    if not console.is_terminal:
        yield lambda training, number: _line(training, plan, console) if number % (3 * every) == 0 else None
        return
    columns = (TextColumn("step {task.completed}/{task.total}"), BarColumn(), TextColumn("epsilon {task.fields[eps]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bar:
        task = bar.add_task("train", total=plan.steps, eps="0")

        def tick(training: PrivateTraining, number: int) -> None:
            if number % every == 0 or number == plan.steps:
                bar.update(task, completed=training.ledger.charges, eps=shown_epsilon(training.epsilon))
            else:
                bar.update(task, completed=training.ledger.charges)

        yield tick


def _line(training: PrivateTraining, plan: Plan, console: Console) -> None:
    """In a file or a pipe: one line at a time."""
    spent = shown_epsilon(training.epsilon)
    console.print(f"step {training.ledger.charges}/{plan.steps}  epsilon {spent}", highlight=False)


def run() -> None:
    """The entry point: a wrong option gets one line as well."""
    try:
        code = app(standalone_mode=False)
    except TyperException as error:
        message = " ".join(error.format_message().split())
        if message:  # empty where the help text has been printed already
            print(f"clipwise: {message}", file=sys.stderr)
        code = 2
    except (typer.Abort, KeyboardInterrupt):
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    run()
