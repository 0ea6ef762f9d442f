"""The price of clipping against the number of positions, the batch and the width of an encoder: is there a cliff?

    python benchmarks/sizes.py [--device cuda] [--out benchmarks/results/sizes.json]
    python benchmarks/sizes.py --plot docs/figures/sizes     # from the committed result files

Forward, backward, norms and clipping against plain forward and backward, as medians of ratios, alternating: eager on a
CPU, compiled on a GPU. One of the three is changed at a time. On a GPU each point has a process of its own; all compile
at the same time and are timed one by one.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from step import Encoder, losses, with_steady_memory

import clipwise as cw
from clipwise.clipping import clip, engine_gradients, trainable
from clipwise.engine.compiled import Compiled

CENTRE = {"cpu": {"T": 64, "batch": 32, "width": 256}, "cuda": {"T": 256, "batch": 32, "width": 768}}
RANGES: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": {"T": (16, 32, 64, 128, 256, 512), "batch": (2, 8, 32, 128), "width": (64, 128, 256, 512)},
    "cuda": {"T": (64, 128, 256, 512, 1024, 2048), "batch": (8, 16, 32, 64, 128), "width": (256, 512, 768, 1024, 2048)},
}
RESULTS = Path(__file__).parent / "results"
FILES = {"cpu": "sizes.json", "cuda": "sizes_gpu.json"}


def points(device: str) -> list[dict[str, int]]:
    found = [CENTRE[device] | {name: value} for name, values in RANGES[device].items() for value in values]
    return [dict(p) for p in dict.fromkeys(tuple(p.items()) for p in found)]


def ratio(point: dict[str, int], device: str, rounds: int, lock: Path) -> dict[str, Any]:
    """Of one point."""
    torch.manual_seed(0)
    model: torch.nn.Module = Encoder(point["width"], layers=2).to(device)
    size = (point["batch"], point["T"])
    batch = torch.randint(0, 1000, size, device=device), torch.randint(0, 2, size[:1], device=device)
    if device == "cuda":
        model = model.bfloat16()
    parameters, rule, paths = trainable(model), cw.PSAC(), dict[str, Any]()
    groups, mask = rule.groups(list(parameters)), torch.ones(size[0], dtype=torch.bool, device=device)
    forward = torch.compile(losses, dynamic=False) if device == "cuda" else losses

    def clipped(data: Any, mask: Any, scale: Any) -> Any:
        return clip(engine_gradients(model, losses, data, len(mask), paths=paths), rule, scale, groups, mask)

    whole = Compiled(model, clipped) if device == "cuda" else None

    def plain() -> None:
        torch.autograd.grad(forward(model, batch).mean(), list(parameters.values()))

    def private() -> None:
        if whole is None:
            clipped(batch, mask, 1.0)
        else:
            whole(batch, mask, 1.0, keep=False)

    times: dict[str, list[float]] = {"plain": [], "private": []}
    for _ in range(2):
        plain(), private()
    with open(lock, "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        for _ in range(rounds):
            for name, step in (("plain", plain), ("private", private)):
                began = time.perf_counter()
                step()
                if device == "cuda":
                    torch.cuda.synchronize()
                times[name].append(time.perf_counter() - began)
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    return {**point, "plain_ms": 1e3 * statistics.median(times["plain"]), "ratio": statistics.median(ratios)}


def apart(point: dict[str, int], rounds: int, lock: Path) -> dict[str, Any]:
    """The same, in a process of its own."""
    command = [sys.executable, __file__, "--device", "cuda", "--rounds", str(rounds), "--lock", str(lock)]
    done = subprocess.run([*command, "--one", json.dumps(point)], capture_output=True, text=True)
    if done.returncode:
        return {**point, "failed": done.stderr[-300:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def plot(out: Path) -> None:
    """One panel for each of the three."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.6), layout="constrained", sharey=True)
    ticks: dict[str, set[int]] = {name: set() for name in RANGES["cpu"]}
    for device, file in FILES.items():
        if not (RESULTS / file).exists():
            continue
        read = json.loads((RESULTS / file).read_text())
        for axis, name in zip(axes, RANGES[device], strict=True):
            rest = {k: v for k, v in CENTRE[device].items() if k != name}
            rows = [r for r in read["rows"] if all(r[k] == v for k, v in rest.items()) and "ratio" in r]
            rows.sort(key=lambda r: r[name])
            label = f"{read['machine']['device']}, " + ", ".join(f"{k} {v}" for k, v in rest.items())
            axis.plot([r[name] for r in rows], [r["ratio"] for r in rows], "o-", label=label)
            axis.set(xscale="log", xlabel=name)
            ticks[name] |= {r[name] for r in rows}
            axis.set_xticks(sorted(ticks[name]), [str(x) for x in sorted(ticks[name])], rotation=60, fontsize=8)
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            axis.legend(fontsize=8, loc="lower right")
    axes[0].set_ylabel("clipped / plain")
    axes[0].set_ylim(bottom=0.0)
    for axis in axes:
        axis.axhline(1.0, color="grey", linewidth=1, linestyle=":")
    figure.suptitle("Forward, backward, norms and clipping of a two-layer encoder, as a multiple of plain training")
    for suffix in (".png", ".svg"):
        figure.savefig(out.with_suffix(suffix), dpi=120, metadata={"Date": None} if suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=RANGES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the committed results to this name, .png and .svg")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--lock", type=Path, help="held while timing")
    given = parser.parse_args()
    if given.plot:
        plot(given.plot)
        return
    with tempfile.TemporaryDirectory() as folder:
        lock = given.lock or Path(folder, "turn")
        if given.one:
            print(json.dumps(ratio(json.loads(given.one), given.device, given.rounds, lock)))
            return
        if given.device == "cuda":
            with ThreadPoolExecutor(8) as pool:
                rows = list(pool.map(lambda point: apart(point, given.rounds, lock), points("cuda")))
        else:
            rows = [ratio(point, "cpu", given.rounds, lock) for point in points("cpu")]
    for found in rows:
        print({k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()})
    if given.out:
        name = torch.cuda.get_device_name() if given.device == "cuda" else f"{torch.get_num_threads()} CPU cores"
        machine = {"torch": torch.__version__, "device": name, "python": platform.python_version()}
        given.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    with_steady_memory()
    main()
