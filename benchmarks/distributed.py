"""Weak scaling of the private step: one process on its own records, against several that make one step together.

    python benchmarks/distributed.py [--ranks 2] [--rounds 12] [--out benchmarks/results/distributed.json]

Every process has one thread and the same number of records in both settings; blocks of steps alternate. Efficiency is
(time of a step alone) / (time of a step together): 1 would be perfect. Clipping, sum over ranks, charge, noise and
optimizer are included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step import losses, with_steady_memory, work

import clipwise as cw
from clipwise.integrations import distributed

STEPS = 4


def run_of(make: Callable[..., Any], name: str, ranks: int) -> Callable[[], None]:
    """Steps on all of `ranks` shares of records (q = 1): the same work for every rank at every step."""
    torch.manual_seed(0)
    build, batch = work()[name]
    model = build()
    rows = len(batch[0])
    dataset = tuple(x.repeat(ranks, *[1] * (x.dim() - 1)) for x in batch)
    plan = cw.Plan(
        noise_multiplier=1.0, delta=1e-5, sampling_prob=1.0, steps=10_000, expected_batch_size=rows * ranks,
        accountant="rdp",
    )  # fmt: skip
    training = make(model, torch.optim.SGD(model.parameters(), lr=1e-3), plan, losses)
    batches = training.batches(dataset)

    def steps() -> None:
        for _ in range(STEPS):
            training.step(next(batches))

    return steps


def timed(steps: Callable[[], None]) -> float:
    began = time.perf_counter()
    steps()
    return 1e3 * (time.perf_counter() - began) / STEPS


def rank_main(rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in work():
        together = run_of(distributed.privatize, name, dist.get_world_size())
        alone = run_of(cw.privatize, name, 1) if dist.get_rank() == 0 else None
        pairs = []
        for _ in range(rounds + 1):
            dist.barrier()
            single = timed(alone) if alone is not None else 0.0
            dist.barrier()
            pairs.append((single, timed(together)))
        if alone is not None:
            pairs = pairs[1:]
            found[name] = {
                "alone_ms": statistics.median(a for a, _ in pairs),
                "together_ms": statistics.median(b for _, b in pairs),
                "efficiency": statistics.median(a / b for a, b in pairs),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        found = rank_main(given.rounds)
        if dist.get_rank() == 0:
            print(json.dumps(found))
        dist.destroy_process_group()
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": str(given.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, "--rounds", str(given.rounds)],
            env=os.environ | shared | {"RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(given.ranks)
    ]
    outputs = [process.communicate()[0] for process in running]
    results = json.loads(outputs[0].strip().splitlines()[-1])
    print("| work | step alone | step together | efficiency |\n|---|---|---|---|")
    for name, row in results.items():
        print(f"| {name} | {row['alone_ms']:.0f} ms | {row['together_ms']:.0f} ms | {row['efficiency']:.2f} |")
    if given.out is not None:
        content = {"ranks": given.ranks, "machine": platform.machine(), "torch": torch.__version__, "results": results}
        given.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    with_steady_memory()
    main()
