"""Result files of recipes: one per recipe, a row per method, setting and seed; what is there is not run again."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .recipes import METHODS, NON_PRIVATE, RECIPES, run_one
from .results_io import RESULTS, load, save


def code_commit() -> str | None:
    """Of the code that ran, from the environment or the checkout; None outside of both."""
    if named := os.environ.get("CLIPWISE_COMMIT"):
        return named
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or None


def rows_of(name: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """Every row of a recipe's result file, none if there is no file."""
    return list(load(name, folder)["rows"]) if (folder / f"{name}.json").exists() else []


@dataclass(frozen=True)
class Job:
    """One run that a result file lacks."""

    name: str
    method: str
    seed: int
    settings: dict[str, Any]
    device: str
    compile: bool

    def done(self, folder: Path) -> bool:
        """Whether the file has its row."""
        wanted = {"method": self.method, "seed": self.seed, "settings": self.settings, "device": self.device}
        return any(_same_run(wanted, r) for r in rows_of(self.name, folder))

    def row(self) -> dict[str, Any]:
        """Train."""
        row = run_one(RECIPES[self.name].changed(self.settings), self.method, self.seed, self.device, self.compile)
        return row | {"settings": self.settings, "device": self.device}


def jobs_of(
    name: str, methods: Sequence[str], seeds: int, device: str, settings: Mapping[str, Any], compile: bool
) -> list[Job]:
    """All runs of a recipe, seed by seed, whether they are done or not."""
    if unknown := [m for m in methods if m not in (*METHODS, NON_PRIVATE)]:
        raise SystemExit(f"No method {', '.join(unknown)}; known: {', '.join((*METHODS, NON_PRIVATE))}.")
    recipe = RECIPES[name].changed(settings)
    changed = {k: getattr(recipe, k) for k in settings}
    return [Job(name, m, seed, changed, device, compile) for seed in range(seeds) for m in methods]


def run(jobs: Sequence[Job], processes: int = 1, folder: Path = RESULTS) -> None:
    """Fill what is missing, and save after every run. Several processes share one device."""
    missing = [job for job in jobs if not job.done(folder)]
    given = sys.argv[1:]
    if "--results" in given:  # a path of this machine
        at = given.index("--results")
        del given[at : at + 2]
    command = " ".join(["python -m experiments", *given])
    commit = code_commit()
    for job, row in _rows(missing, processes):
        if isinstance(row, Exception):
            print(f"{job.name} {job.method} {job.settings} seed {job.seed} failed: {row!r}", flush=True)
            continue
        row |= {"command": command, "commit": commit}
        content = {"recipe": dataclasses.asdict(RECIPES[job.name]), "rows": [*rows_of(job.name, folder), row]}
        save(job.name, content, folder)
        told = " ".join(f"{k}={v}" for k, v in job.settings.items())
        print(
            f"{job.name} {job.method} {told} seed {job.seed}: {100 * row['accuracy']:.2f}% in {row['seconds']} s",
            flush=True,
        )


def _rows(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, dict[str, Any] | Exception]]:
    """One run that fails, for want of memory say, does not stop the others when there are several processes."""
    if processes == 1:
        yield from ((job, job.row()) for job in jobs)
        return
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        running = {pool.submit(job.row): job for job in jobs}
        for future in as_completed(running):
            failed = future.exception()
            yield running[future], failed if isinstance(failed, Exception) else future.result()


def merge(source: Path, folder: Path = RESULTS) -> None:
    """Rows of result files made elsewhere, added to those of `folder` which lack them."""
    for path in sorted(p for p in source.glob("*.json") if p.stem in RECIPES):
        made, rows = load(path.stem, source), rows_of(path.stem, folder)
        new = [row for row in made["rows"] if not any(_same_run(row, r) for r in rows)]
        save(path.stem, made | {"rows": [*rows, *new]}, folder)
        print(f"{path.stem}: {len(new)} new rows")


def _same_run(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a[k] == b[k] for k in ("method", "seed", "settings", "device"))
