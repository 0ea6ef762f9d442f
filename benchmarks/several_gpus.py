"""The checks of tests/test_distributed.py on real GPUs, one process each: sums, noise, weights, empty shares, variance.

    python benchmarks/several_gpus.py [--ranks 8] [--backend nccl]

Two ranks can share one GPU with --backend gloo (replicated weights only).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

WORKER = Path(__file__).parent.parent / "tests" / "distributed_worker.py"
CHECKS = ("equal", "empty", "variance")


def launched(kind: str, ranks: int, backend: str) -> list[list[dict]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"CLIPWISE_DEVICE": "cuda", "CLIPWISE_BACKEND": backend, "WORLD_SIZE": str(ranks), "MASTER_PORT": port}
    running = [
        subprocess.Popen(
            [sys.executable, str(WORKER), kind, ",".join(CHECKS)],
            env=os.environ | shared | {"MASTER_ADDR": "127.0.0.1", "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for r in range(ranks)
    ]
    return [json.loads(process.communicate()[0].strip().splitlines()[-1]) for process in running]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=max(torch.cuda.device_count(), 1))
    parser.add_argument("--backend", default="nccl")
    given = parser.parse_args()
    for kind in ("replicated",) if given.backend == "gloo" else ("replicated", "sharded"):
        equal, empty, variance = zip(*launched(kind, given.ranks, given.backend), strict=True)
        assert max(r["sum_error"] for r in equal) < 1e-5, equal
        assert max(r["noise_error"] for r in equal) < 1e-4, equal
        assert len({r["weights"] for r in equal}) == len({r["weights"] for r in empty}) == 1
        assert all(r["charges"] == 20 for r in empty)
        assert all(abs(r["deviation"] - 1) < 0.01 and abs(r["mean"]) < 0.01 for r in variance), variance
        print(
            f"{kind:10} {given.ranks} ranks, {given.backend}: sum error {max(r['sum_error'] for r in equal):.1e}, "
            f"noise error {max(r['noise_error'] for r in equal):.1e}, deviation {variance[0]['deviation']:.4f}"
        )


if __name__ == "__main__":
    main()
