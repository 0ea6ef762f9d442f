"""python -m experiments data | run NAME | sweep NAME | merge FOLDER | again NAME | figure NAME | table NAME | results.

A recipe (mnist, fashion_mnist, …) takes `--rule psac auto-s …`, `--seeds 5`, `--device cuda`, `--set lr=2 clip_norm=1`,
fills what its result file lacks, and can be stopped and started again at any time.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import (
    again,
    analysis,
    coverage,
    dc_tables,
    digits,
    fetch,
    figures,
    report,
    runs,
    similarity,
    sweeps,
    synthetic,
    tables,
    theory,
)
from .recipes import RECIPES
from .results_io import RESULTS, save

RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "percentiles": synthetic.percentiles,
    "errors": synthetic.errors,
    "thresholds": digits.thresholds,
    "tuning": digits.tuning,
    "models": coverage.models,
    "weights": analysis.weights,
    "lazy": analysis.lazy,
    "bias": analysis.bias,
    "bound": analysis.bound,
    "mixture": analysis.mixture,
    "automatic": theory.automatic,
    "bound_parts": theory.bound_parts,
    "rates": theory.rates,
    "similarity": similarity.similarity,
}

TABLES: dict[str, Callable[..., str]] = {**tables.TABLES, **dc_tables.DC_TABLES, "again": again.again_table}


def main() -> None:
    """Run, draw or print."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("data").add_argument("names", nargs="*", choices=[[], *fetch.FETCHED])
    run, sweep = kinds.add_parser("run"), kinds.add_parser("sweep")
    run.add_argument("name", choices=[*RUNS, *RECIPES])
    sweep.add_argument("name", choices=sweeps.SWEEPS)
    sweep.add_argument("--only", nargs="+", default=[], choices=RECIPES, help="recipes of the sweep")
    run.add_argument("--rule", nargs="+", default=["psac"], help="methods of a recipe")
    run.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other settings of a recipe")
    for one in (run, sweep):
        one.add_argument("--seeds", type=int, default=1)
        one.add_argument("--first", type=int, default=0, help="leave out the seeds before this one")
        one.add_argument("--device", default="cpu")
        one.add_argument("--jobs", type=int, default=1, help="runs at the same time, on one device")
        one.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
        one.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None, help="default: on a GPU")
    kinds.add_parser("merge", help="add rows of result files made elsewhere").add_argument("folder", type=Path)
    repeat = kinds.add_parser("again", help="train runs of a result file once more and compare")
    repeat.add_argument("name", choices=RECIPES)
    repeat.add_argument("--seed", type=int, default=0)
    repeat.add_argument("--device", default="cpu")
    repeat.add_argument("--rows", type=int, default=10**6, help="at most so many runs")
    kinds.add_parser("results", help="write RESULTS.md")
    kinds.add_parser("figure").add_argument("name", choices=figures.DRAWN)
    kinds.add_parser("table").add_argument("name", choices=TABLES)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.kind == "data":
        fetch.fetch(given.names)
    elif given.kind == "run" and given.name in RUNS:
        print(save(given.name, RUNS[given.name]()))
    elif given.kind in ("run", "sweep"):
        compiled = given.device != "cpu" if given.compile is None else given.compile
        if given.kind == "sweep":
            jobs = sweeps.sweep(given.name, given.seeds, given.device, compiled, given.only)
        else:
            settings = dict(part.partition("=")[::2] for part in given.set)
            jobs = runs.jobs_of(given.name, given.rule, given.seeds, given.device, settings, compiled)
        runs.run([job for job in jobs if job.seed >= given.first], given.jobs, given.results)
    elif given.kind == "merge":
        runs.merge(given.folder)
    elif given.kind == "again":
        again.again(given.name, given.device, given.seed, rows=given.rows)
    elif given.kind == "results":
        print(report.write())
    elif given.kind == "figure":
        print(*figures.draw(given.name), sep="\n")
    else:
        print(TABLES[given.name]())


if __name__ == "__main__":
    main()
