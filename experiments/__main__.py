"""python -m experiments run NAME | figure NAME | table NAME."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

from . import coverage, digits, figures, synthetic, tables
from .results_io import save

RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "percentiles": synthetic.percentiles,
    "errors": synthetic.errors,
    "thresholds": digits.thresholds,
    "tuning": digits.tuning,
    "models": coverage.models,
}


def main() -> None:
    """Run, draw or print."""
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    kinds = parser.add_subparsers(dest="kind", required=True)
    kinds.add_parser("run").add_argument("name", choices=RUNS)
    kinds.add_parser("figure").add_argument("name", choices=figures.DRAWN)
    kinds.add_parser("table").add_argument("name", choices=tables.TABLES)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    if given.kind == "run":
        print(save(given.name, RUNS[given.name]()))
    elif given.kind == "figure":
        print(*figures.draw(given.name), sep="\n")
    else:
        print(tables.TABLES[given.name]())


if __name__ == "__main__":
    main()
