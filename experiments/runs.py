"""Result files of recipes: one per recipe, a row per method, setting and seed; what is there is not run again."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .recipes import METHODS, NON_PRIVATE, RECIPES, run_one
from .results_io import RESULTS, load, save


def _commit() -> str | None:
    """Of the code that ran; None outside a checkout."""
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


def run(
    name: str,
    methods: Sequence[str],
    seeds: int,
    device: str,
    settings: Mapping[str, Any],
    compile: bool,
    folder: Path = RESULTS,
) -> Path:
    """Fill what is missing, and save after every run."""
    if unknown := [m for m in methods if m not in (*METHODS, NON_PRIVATE)]:
        raise SystemExit(f"No method {', '.join(unknown)}; known: {', '.join((*METHODS, NON_PRIVATE))}.")
    recipe = RECIPES[name].changed(settings)
    changed = {k: getattr(recipe, k) for k in settings}
    command = " ".join(["python -m experiments", *sys.argv[1:]])
    path = folder / f"{name}.json"
    for seed in range(seeds):
        for method in methods:
            rows = rows_of(name, folder)
            wanted = (method, seed, changed, device)
            if any((r["method"], r["seed"], r["settings"], r["device"]) == wanted for r in rows):
                continue
            row = run_one(recipe, method, seed, device, compile)
            row |= {"settings": changed, "device": device, "command": command, "commit": _commit()}
            path = save(name, {"recipe": dataclasses.asdict(RECIPES[name]), "rows": [*rows, row]}, folder)
            print(f"{name} {method} seed {seed}: {100 * row['accuracy']:.2f}% in {row['seconds']} s", flush=True)
    return path
