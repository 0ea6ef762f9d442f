"""ε of many settings by dp-accounting itself, on a grid finer than the library's, to a committed file.

    python tests/faults/golden.py

The reference is Google's PLD accountant, pessimistic, on a grid of 1e-5 to 5e-5 (2e-4 where ε > 20,
where the library's is 1e-3); composition of the
sampled Gaussian for add-or-remove-one.
"""

from __future__ import annotations

import json
import logging
import math
import random
import time
from pathlib import Path

FILE = Path(__file__).with_name("golden_epsilon.json")
SETTINGS = 500


def settings(seed: int = 20) -> list[tuple[float, float, int, float]]:
    """(σ, q, T, δ), spread over what people use and somewhat beyond."""
    drawn = random.Random(seed)
    found = []
    for _ in range(SETTINGS):
        q = 10 ** drawn.uniform(-4, 0) if drawn.random() < 0.9 else 1.0
        steps = round(10 ** drawn.uniform(0, 4))
        least = max(0.4, 0.35 * q * math.sqrt(steps))
        found.append((least * 10 ** drawn.uniform(0, 0.8), q, steps, 10 ** drawn.uniform(-10, -3)))
    return found


def reference(sigma: float, q: float, steps: int, delta: float) -> float:
    import dp_accounting

    release = dp_accounting.GaussianDpEvent(sigma)
    event = release if q == 1 else dp_accounting.PoissonSampledDpEvent(q, release)
    rough = dp_accounting.rdp.RdpAccountant().compose(event, steps).get_epsilon(delta)
    width = min(5e-5, max(1e-5, 1e-5 * rough)) if rough <= 20 else 2e-4
    found = dp_accounting.pld.PLDAccountant(value_discretization_interval=width)
    return float(found.compose(event, steps).get_epsilon(delta))


def main() -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)
    rows, began = [], time.perf_counter()
    for number, setting in enumerate(settings()):
        rows.append([*setting, reference(*setting)])
        if number % 50 == 0:
            print(number, f"{time.perf_counter() - began:.0f} s", flush=True)
    columns = ["noise_multiplier", "sampling_prob", "steps", "delta", "epsilon"]
    lines = ",\n".join(json.dumps(row) for row in rows)
    command = '"python tests/faults/golden.py"'
    FILE.write_text(f'{{"command": {command}, "columns": {json.dumps(columns)}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
