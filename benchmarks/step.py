"""Step time of plain PyTorch, clipwise and (if installed) Opacus, as ratios, alternating in one process.

    python benchmarks/step.py [--rounds 40] [--processes 5] [--out benchmarks/results/step.json]

A step is forward, backward and, for the private ones, norms, clipping, noise and the optimizer. glibc hands freed
memory back to the system and faults it in again, in whichever contender's step its heap happens to end (up to 15% of a
step): the script starts itself again with that switched off, for all contenders alike. Where a process has its memory
moves ratios too, by as much: with --processes the median of several is taken, and the range shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise as cw
from clipwise.engine import pooling
from clipwise.noise import NoiseSource


def mnist_cnn() -> nn.Module:
    """The 4-layer tanh CNN of the papers."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, 2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


class EncoderLayer(nn.Module):
    def __init__(self, d: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).reshape(b, t, d)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """A transformer encoder: d 256, 4 layers, 4 heads."""

    def __init__(self, d: int = 256, layers: int = 4, words: int = 1000, classes: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, d)
        self.layers = nn.Sequential(*(EncoderLayer(d, 4) for _ in range(layers)))
        self.head = nn.Linear(d, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x)).mean(1))


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


def work() -> dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, Tensor]]]:
    """What is measured: a model and a batch."""
    return {
        "MNIST CNN, batch 512": (mnist_cnn, (torch.randn(512, 1, 28, 28), torch.randint(0, 10, (512,)))),
        "encoder d 256 x 4, T 64, batch 32": (Encoder, (torch.randint(0, 1000, (32, 64)), torch.randint(0, 2, (32,)))),
    }


def with_steady_memory() -> None:
    """Start this script again with glibc's trimming off, unless that is done."""
    keep = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
    if not keep.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **keep})


def plain_step(
    make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], compiled: bool = False
) -> Callable[[], None]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    forward = torch.compile(losses, dynamic=False) if compiled else losses

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        forward(model, batch).mean().backward()
        optimizer.step()

    return step


def clipwise_step(
    make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], compiled: bool = False
) -> Callable[[], None]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    size = len(batch[0])
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.01, steps=10**6, expected_batch_size=size)
    options: dict[str, Any] = {"compile": True, "microbatch": size} if compiled else {}
    training = cw.privatize(model, optimizer, plan, losses, sampling="asserted", **options)
    return lambda: training.step(batch)


def noise_step(make: Callable[[], nn.Module]) -> Callable[[], None]:
    """What of a private step is the noise."""
    source, sums = NoiseSource(), {name: p.detach().clone() for name, p in make().named_parameters()}

    def step() -> None:
        source.add_(sums, sensitivity=1.0, noise_multiplier=1.0, sequence=1, stream="gradient")

    return step


def with_torchs_pooling(step: Callable[[], None]) -> Callable[[], None]:
    """The same without engine/pooling.py: what of a ratio is not privacy."""

    def plainly() -> None:
        ours, pooling.OPS = pooling.OPS, ()
        try:
            step()
        finally:
            pooling.OPS = ours

    return plainly


def opacus_step(make: Callable[[], nn.Module], batch: tuple[Tensor, Tensor], ghost: bool) -> Callable[[], None]:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    options: dict[str, object] = {"grad_sample_mode": "ghost", "criterion": nn.CrossEntropyLoss()} if ghost else {}
    made = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(*batch), batch_size=len(batch[0])),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
        **options,
    )
    private, optimizer, criterion = (*made[:2], made[2] if ghost else nn.CrossEntropyLoss())

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        criterion(private(batch[0]), batch[1]).backward()
        optimizer.step()

    return step


def measure(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median ratio of each to plain, taken round by round, so that a slow moment hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 3):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if number >= 3:
                times[name].append(time.perf_counter() - began)
    found = {"plain_ms": 1e3 * statistics.median(times["plain"])}
    for name in steps:
        if name != "plain":
            found[name] = statistics.median(a / b for a, b in zip(times[name], times["plain"], strict=True))
    return found


def measured(rounds: int, both: bool) -> dict[str, dict[str, Any]]:
    """All work, in this process; `both` compiled."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    results = {}
    for name, (make, batch) in work().items():
        steps = {"plain": plain_step(make, batch, both), "clipwise": clipwise_step(make, batch, both)}
        steps["of it noise"] = noise_step(make)
        if any(isinstance(m, nn.MaxPool2d) for m in make().modules()) and not both:
            steps["with torch's max pooling"] = with_torchs_pooling(clipwise_step(make, batch))
        try:
            if both:
                raise ImportError("it does not compile")
            import opacus  # noqa: F401

            steps |= {"opacus hooks": opacus_step(make, batch, False), "opacus ghost": opacus_step(make, batch, True)}
        except ImportError:
            pass
        results[name] = measure(steps, rounds)
    return results


def in_processes(count: int, given: list[str]) -> dict[str, dict[str, Any]]:
    """The median of as many processes, and the range of our own ratio."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(count):
            out = Path(folder) / f"{number}.json"
            subprocess.run([sys.executable, __file__, *given, "--processes", "1", "--out", str(out)], check=True)
            found.append(json.loads(out.read_text())["results"])
    results: dict[str, dict[str, Any]] = {}
    for name in found[0]:
        results[name] = {k: statistics.median(f[name][k] for f in found) for k in found[0][name]}
        ours = [f[name]["clipwise"] for f in found]
        results[name] |= {"lowest": min(ours), "highest": max(ours), "processes": count}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compiled", action="store_true", help="plain and private, both compiled")
    arguments = parser.parse_args()
    if arguments.processes > 1:
        given = ["--rounds", str(arguments.rounds), *(["--compiled"] if arguments.compiled else [])]
        results = in_processes(arguments.processes, given)
    else:
        results = measured(arguments.rounds, arguments.compiled)
    machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "python": platform.python_version()}
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")
    for name, found in results.items():
        ratios = "  ".join(f"{k} {v:.2f}x" for k, v in found.items() if k not in ("plain_ms", "processes"))
        print(f"{name:36s} plain {found['plain_ms']:7.1f} ms  {ratios}", flush=True)


if __name__ == "__main__":
    with_steady_memory()
    main()
