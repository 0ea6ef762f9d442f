"""Norms and clipped sum of one linear layer against the number of positions T, by both ways and by the one chosen.

    python benchmarks/positions.py [--device cuda] [--out benchmarks/results/positions.json]
    python benchmarks/positions.py --plot docs/figures/positions     # from the committed result files

Each is a multiple of the plain weight gradient (one matrix product) of the same shape, alternating, medians. `worst` is
how much slower the chosen way is than the better of the two.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clipwise.engine.contributions import Outer, is_native
from clipwise.engine.products import exact_products, precision_of
from clipwise.engine.reduce import DenseGrad, OuterGrad, choose_path, reduce_uses, squared_norms

SHAPES = {
    "cpu": [(8, 128, 128), (8, 256, 256), (8, 256, 1024)],
    "cuda": [(32, 768, 768), (32, 768, 3072), (64, 256, 256), (128, 128, 128)],
}
LENGTHS = (64, 128, 256, 512, 1024, 2048)
RESULTS = Path(__file__).parent / "results"


def measured(run: dict[str, Callable[[], Any]], rounds: int, device: str) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in run}
    for number in range(rounds + 2):
        for name, step in run.items():
            if device == "cuda":
                torch.cuda.synchronize()
            began = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
            if number > 1:
                times[name].append(time.perf_counter() - began)
    return {name: statistics.median(found) for name, found in times.items()}


def replayed(step: Callable[[], Any]) -> Callable[[], Any]:
    """As in a compiled step: one CUDA graph, so that starting kernels costs nothing. Ten times, to be measurable."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            step()
    return graph.replay


def row(b: int, p: int, d: int, t: int, device: str, rounds: int) -> dict[str, Any]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    left, right = (torch.randn(b, 1, t, k, device=device).to(dtype) for k in (p, d))
    weights, keep = torch.rand(b, device=device), torch.ones(b, dtype=torch.bool, device=device)
    precision = precision_of(left, right)
    path = choose_path(t, p, d, left.device, precision, is_native(left))
    use = Outer(left, right)

    def both(grad: OuterGrad | DenseGrad) -> None:
        squared_norms([grad])
        grad.weighted_sum(weights, keep)

    run = {
        "plain": lambda: torch.mm(left.flatten(0, 2).mT, right.flatten(0, 2)),
        "outer": lambda: both(OuterGrad(use, (p, d), path.wide and path.form == "outer", precision=precision)),
        "dense": lambda: both(reduce_uses([use], (p, d), "w", {"w": replace(path, form="dense", wide=False)})),
    }
    with exact_products(left.device):
        found = measured(run if device == "cpu" else {name: replayed(f) for name, f in run.items()}, rounds, device)
    ratios = {name: found[name] / found["plain"] for name in ("outer", "dense")}
    worst = ratios[path.form] / min(ratios.values())
    return {
        "b": b,
        "p": p,
        "d": d,
        "t": t,
        "chosen": path.form,
        "plain_ms": 1e3 * found["plain"] / (10 if device == "cuda" else 1),
        **ratios,
        "worst": worst,
    }


def chosen(found: dict[str, Any], device: str) -> str:
    """The way that the engine takes today."""
    precision: Any = "exact" if device == "cpu" else "bfloat16"
    return choose_path(found["t"], found["p"], found["d"], torch.device(device), precision, device == "cpu").form


def worst(rows: list[dict[str, Any]], device: str) -> float:
    """How much slower the chosen way is than the better one, at most."""
    return max(r[chosen(r, device)] / min(r["outer"], r["dense"]) for r in rows)


def plot(out: Path) -> None:
    """Both ways against T, the chosen one in full."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    files = {"cpu": "positions.json", "cuda": "positions_gpu.json"}
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, (device, file) in zip(axes, files.items(), strict=True):
        read = json.loads((RESULTS / file).read_text())
        rows = [r for r in read["rows"] if r["t"] in LENGTHS]
        for number, (b, p, d) in enumerate(dict.fromkeys((r["b"], r["p"], r["d"]) for r in rows)):
            those = [r for r in rows if (r["b"], r["p"], r["d"]) == (b, p, d)]
            for form, style in (("outer", "--"), ("dense", ":")):
                axis.plot([r["t"] for r in those], [r[form] for r in those], style, color=f"C{number}", lw=1)
            taken = [r[chosen(r, device)] for r in those]
            axis.plot([r["t"] for r in those], taken, "o-", color=f"C{number}", label=f"{b} × ({p}, {d})")
        axis.set(xscale="log", yscale="log", xlabel="positions T", ylabel="time / plain weight gradient")
        axis.set_xticks(LENGTHS, [str(t) for t in LENGTHS])
        axis.minorticks_off()
        most = worst(rows, device)
        axis.set_title(f"{read['machine']['device']}: chosen at most {most:.2f}× the better one", fontsize=10)
        axis.legend(title="batch × weight", fontsize=8)
        axis.grid(alpha=0.3)
    figure.suptitle(
        "Norms and clipped sum of one linear layer: Gram form (dashed), materialised (dotted), chosen (dots)"
    )
    for suffix in (".png", ".svg"):
        figure.savefig(out.with_suffix(suffix), dpi=120, metadata={"Date": None} if suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="draw the committed results to this name, .png and .svg")
    given = parser.parse_args()
    if given.plot:
        plot(given.plot)
        return
    rows = []
    for b, p, d in SHAPES[given.device]:
        for t in LENGTHS:
            rows.append(row(b, p, d, t, given.device, given.rounds))
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
    print(f"the chosen way is at most {worst(rows, given.device):.2f} times the better one")
    if given.out:
        name = torch.cuda.get_device_name() if given.device == "cuda" else platform.machine()
        machine = {"torch": torch.__version__, "device": name, "threads": torch.get_num_threads()}
        given.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
