"""`python -m experiments again NAME` trains runs of a result file once more, and writes how far apart the two lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .papers import LABELS
from .recipes import RECIPES, prepared, run_one
from .results_io import RESULTS, load, save
from .runs import code_commit, rows_of

_SAME = ("name", "method", "seed", "settings", "device")


def again(name: str, device: str = "cpu", seed: int = 0, results: Path = RESULTS, rows: int = 10**6) -> list[Any]:
    """Every run of one seed on one device, up to `rows`; what was compared before is not run again."""
    known = load("again", results)["rows"] if (results / "again.json").exists() else []
    for old in rows_of(name, results):
        key = {"name": name, **{k: old[k] for k in _SAME[1:]}}
        if old["device"] != device or old["seed"] != seed or any(_same(key, k) for k in known) or rows <= 0:
            continue
        rows -= 1
        recipe = RECIPES[name].changed(old["settings"])
        new = run_one(recipe, old["method"], seed, device, bool(old.get("compiled")))
        tested = len(prepared(recipe, device).test[1])
        versions = {"commits": [old["commit"], code_commit()], "torch": [old["torch"], new["torch"]]}
        apart = round(abs(new["accuracy"] - old["accuracy"]) * tested)
        known.append(key | {"examples_apart": apart, "tested": tested, "accuracy": new["accuracy"], **versions})
        save("again", {"rows": known}, results)
        print(f"{name} {old['method']} {old['settings']}: {apart} of {tested} test examples apart", flush=True)
    return known


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a[k] == b[k] for k in _SAME)


def again_table(results: Path = RESULTS) -> str:
    """By recipe, method and device: how many runs were trained again, how far apart they lie at most."""
    lines = [
        "| recipe, method | device | runs | test examples apart, at most | equal in all digits | commits |",
        "|---|---|---|---|---|---|",
    ]
    rows = load("again", results)["rows"] if (results / "again.json").exists() else []
    kinds = dict.fromkeys((r["name"], r["method"], r["device"]) for r in rows)
    for name, method, device in kinds:
        found = [r for r in rows if (r["name"], r["method"], r["device"]) == (name, method, device)]
        most = max(found, key=lambda r: r["examples_apart"])
        equal = sum(r["examples_apart"] == 0 for r in found)
        apart = f"{most['examples_apart']} of {most['tested']}"
        commits = "; ".join(dict.fromkeys(" and ".join(map(str, r["commits"])) for r in found))
        lines.append(
            f"| {name}, {LABELS[method]} | {device} | {len(found)} | {apart} | {equal} of {len(found)} | {commits} |"
        )
    return "\n".join(lines) if rows else "Not run."
