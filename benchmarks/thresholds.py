"""Step time under every threshold, as a ratio to the fixed one, alternating in one process.

python benchmarks/thresholds.py [--rounds 50] [--out benchmarks/results/thresholds.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from step import losses, with_steady_memory, work

import clipwise as cw

THRESHOLDS = {
    "fixed": cw.FixedThreshold(),
    "decay": cw.DecayThreshold(),
    "quantile": cw.QuantileThreshold(),
    "percentile": cw.PercentileThreshold(),
    "min-error": cw.MinErrorThreshold(),
}


def private_step(make: Callable[[], torch.nn.Module], batch: Any, threshold: Any) -> Callable[[], None]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    numbers = {"noise_multiplier": 1.0, "delta": 1e-5, "sampling_prob": 0.01, "steps": 10**6}
    plan = cw.Plan(**numbers, expected_batch_size=len(batch[0]), rule=cw.Abadi(), threshold=threshold)
    training = cw.privatize(model, optimizer, plan, losses, sampling="asserted")
    return lambda: training.step(batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    results = {}
    for name, (make, batch) in work().items():
        steps = {kind: private_step(make, batch, threshold) for kind, threshold in THRESHOLDS.items()}
        times: dict[str, list[float]] = {kind: [] for kind in steps}
        for number in range(given.rounds + 2):
            for kind, step in steps.items():
                began = time.perf_counter()
                step()
                if number >= 2:
                    times[kind].append(time.perf_counter() - began)
        ratios = {k: [a / b for a, b in zip(t, times["fixed"], strict=True)] for k, t in times.items()}
        results[name] = {kind: statistics.median(r) for kind, r in ratios.items()}
    if given.out:
        given.out.write_text(json.dumps({"torch": torch.__version__, "results": results}, indent=2) + "\n")
    for name, found in results.items():
        print(f"{name:36s}" + "  ".join(f"{kind} {ratio:.3f}x" for kind, ratio in found.items()))


if __name__ == "__main__":
    with_steady_memory()
    main()
