"""How fast secure noise is, on the CPU (one core) and on a GPU, beside torch.randn, and whether it is Gaussian.

python benchmarks/noise.py [--save FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from clipwise import chacha
from clipwise.noise import NoiseSource


def rates_on_cpu(size: int = 20_000_000, rounds: int = 5) -> dict[str, float]:
    torch.set_num_threads(1)
    found = {}
    for mode in ("secure", "hardened"):
        source, times = NoiseSource(mode), []
        count = size if mode == "secure" else size // 4
        for i in range(rounds):
            values = {"w": torch.zeros(count)}
            began = time.perf_counter()
            source.add_(values, sensitivity=1.0, noise_multiplier=1.0, sequence=i, stream="benchmark")
            times.append(time.perf_counter() - began)
        found[mode] = count / statistics.median(times) / 1e6
    return found


def timed_on_gpu(action: Any, rounds: int = 20) -> float:
    """Median milliseconds."""
    for _ in range(3):
        action()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        action()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def rates_on_gpu(size: int = 2**29) -> dict[str, Any]:
    from clipwise.chacha_cuda import add_gaussians_

    values = torch.zeros(size, device="cuda")
    key = bytes(range(32))
    found: dict[str, Any] = {}
    for rounds in (8, 12, 20):
        found[f"chacha{rounds}"] = (
            size / timed_on_gpu(partial(add_gaussians_, [values], [key], 1.0, rounds=rounds)) / 1e6
        )
    found["torch.randn"] = size / timed_on_gpu(lambda: values.add_(torch.randn_like(values))) / 1e6
    parts = [torch.zeros(768, 768 * (1 + i % 4), device="cuda") for i in range(150)]
    source = NoiseSource()
    named = {str(i): part for i, part in enumerate(parts)}
    count = sum(part.numel() for part in parts)
    whole = timed_on_gpu(
        lambda: source.add_(named, sensitivity=1.0, noise_multiplier=1.0, sequence=1, stream="benchmark")
    )
    return {**found, "150 tensors": {"elements": count, "ms": whole}}


def checks_on_gpu(size: int = 2**28) -> dict[str, Any]:
    """Against the reference, moments, tails and correlations."""
    from clipwise.chacha_cuda import add_gaussians_

    key = bytes(range(32))
    values = torch.zeros(100_003, device="cuda")
    add_gaussians_([values], [key], 1.0)
    error = float((values.cpu().double() - chacha.gaussians(key, 0, 100_003)).abs().max())
    z = torch.zeros(size, device="cuda")
    add_gaussians_([z], [key], 1.0)
    wide = z.double()
    from scipy.special import ndtr

    tails = {
        str(k): [int((wide.abs() > k).sum()), round(2 * size * float(ndtr(-k)), 1)] for k in (1, 2, 3, 4, 5, 5.5, 6)
    }
    ordered, _ = wide[: 2**24].sort()
    grid = (torch.arange(len(ordered), device="cuda", dtype=torch.float64) + 0.5) / len(ordered)
    ks = float((torch.special.ndtr(ordered) - grid).abs().max()) * len(ordered) ** 0.5
    return {
        "largest difference from the reference": error,
        "mean·√n": float(wide.mean()) * size**0.5,
        "std": float(wide.std()),
        "kurtosis": float((wide**4).mean()),
        "correlation·√n at lags": {
            str(lag): float((wide[lag:] * wide[:-lag]).mean()) * size**0.5 for lag in (1, 7, 255, 256, 512, 2048)
        },
        "|z| beyond k: seen, expected": tails,
        "Kolmogorov–Smirnov √n·D (1.63 at 1%)": ks,
        "largest": float(wide.abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"command": "python benchmarks/noise.py", "torch": torch.__version__}
    found["million per second, one CPU core"] = rates_on_cpu()
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["billion per second, GPU"] = rates_on_gpu()
        found["checks, GPU"] = checks_on_gpu()
    print(json.dumps(found, indent=2, ensure_ascii=False))
    if options.save:
        options.save.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
