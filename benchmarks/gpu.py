"""Forward + backward on a GPU: plain and clipwise (norms and clipping included), eager and compiled, noise apart; and
Opacus and fastDP, where they can be imported.

    python benchmarks/gpu.py [--rounds 20] [--only GPT ViT] [--out benchmarks/results/gpu.json]

Times are medians in ms, memory is the peak in GiB; compiled against compiled is the ratio that counts. Each model has a
process of its own, so that no other's memory is counted. They compile at the same time, and are timed one by one when
all have.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import peers
import torch
import torch.nn.functional as F
from step import EncoderLayer, mnist_cnn
from torch import Tensor, nn

import clipwise as cw
from clipwise.clipping import clip, engine_gradients, trainable
from clipwise.engine.compiled import Compiled
from clipwise.noise import NoiseSource

BEGAN = time.monotonic()


class Gpt(nn.Module):
    """GPT-2 small with a tied head: 124M parameters. Peers get a head of its own."""

    def __init__(
        self, words: int = 50257, length: int = 256, d: int = 768, layers: int = 12, untied: bool = False
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, d), nn.Embedding(length, d)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.02)
        self.head = nn.Linear(d, words, bias=False) if untied else None
        self.blocks, self.norm = (
            nn.Sequential(*(EncoderLayer(d, 12, causal=True) for _ in range(layers))),
            nn.LayerNorm(d),
        )

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        h = self.embed(x) + self.place(places if self.head is None else places.repeat(len(x), 1))
        h = self.norm(self.blocks(h))
        return F.linear(h, self.embed.weight) if self.head is None else self.head(h)


class Vit(nn.Module):
    """ViT-B on 224 pixels: 196 tokens, mean pooling."""

    def __init__(self, d: int = 768, layers: int = 12, table: bool = False) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, d, 16, 16)
        self.place = None if table else nn.Parameter(0.02 * torch.randn(196, d))
        self.places = nn.Embedding(196, d) if table else None
        self.blocks, self.norm = nn.Sequential(*(EncoderLayer(d, 12) for _ in range(layers))), nn.LayerNorm(d)
        self.head = nn.Linear(d, 1000)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cut(x).flatten(2).transpose(1, 2)
        if self.places is not None:
            h = h + self.places(torch.arange(196, device=x.device).repeat(len(x), 1))
        else:
            h = h + self.place
        return self.head(self.norm(self.blocks(h)).mean(1))


class Residual(nn.Module):
    def __init__(self, c: int, p: int, stride: int) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(c, p, 3, stride, 1, bias=False), nn.Conv2d(p, p, 3, 1, 1, bias=False)
        self.na, self.nb = nn.GroupNorm(32, p), nn.GroupNorm(32, p)
        self.skip = nn.Conv2d(c, p, 1, stride, bias=False) if stride > 1 or c != p else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))) + self.skip(x))


def resnet18() -> nn.Module:
    """For 32 pixels, with group norm."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64), nn.ReLU()]
    width = 64
    for p, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        layers.append(Residual(width, p, stride))
        width = p
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def classes(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1], reduction="none")


def words(model: nn.Module, batch: Any) -> Tensor:
    logits = model(batch[0])
    return (
        F.cross_entropy(logits.flatten(0, 1).float(), batch[1].flatten(), reduction="none")
        .view(len(logits), -1)
        .mean(1)
    )


def memory(step: Callable[[], Any]) -> float:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    step()
    torch.cuda.synchronize()
    return torch.cuda.memory_reserved() / 2**30  # with what CUDA graphs hold


def timed(step: Callable[[], Any], rounds: int) -> float:
    times = []
    for number in range(rounds + 3):
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if number >= 3:
            times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


@contextmanager
def my_turn(folder: Path, others: int, wait: float, lock: Path) -> Iterator[None]:
    """When all have compiled, or `wait` seconds after the start, one after the other, holding the lock."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix="ready", delete=False):
        pass
    while len(list(folder.glob("ready*"))) < others and time.monotonic() - BEGAN < wait:
        time.sleep(0.2)
    with open(lock, "w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        yield


def measured(model: nn.Module, loss: Any, batch: Any, rounds: int, turn: Any, others: Any) -> dict[str, float]:
    parameters = trainable(model)
    rule, paths = cw.PSAC(), {}
    groups = rule.groups(list(parameters))
    compiled = torch.compile(lambda: loss(model, batch).mean())

    def plain(forward: Callable[[], Tensor]) -> None:
        torch.autograd.grad(forward(), list(parameters.values()))

    def clipped(data: Any, mask: Tensor, scale: Any) -> Any:
        found = engine_gradients(model, loss, data, len(mask), paths=paths)
        return clip(found, rule, scale, groups, mask)

    mask = torch.ones(len(batch[0]), dtype=torch.bool)
    whole = Compiled(model, clipped)

    def private() -> dict[str, Tensor]:
        return clipped(batch, mask, 1.0)[0]

    def private_compiled() -> dict[str, Tensor]:
        return whole(batch, mask, 1.0, keep=False)[0]  # as step() does

    steps: dict[str, Callable[[], Any]] = {
        "compiled": lambda: plain(compiled),
        "eager": lambda: plain(lambda: loss(model, batch).mean()),
        "clipwise": private,
        "clipwise_compiled": private_compiled,
    }
    found = {f"{name}_gib": memory(step) for name, step in steps.items()}
    sums, source = private(), NoiseSource()
    apart = sum(float((v - sums[n]).double().square().sum()) for n, v in private_compiled().items()) ** 0.5
    found["compiled_against_eager_relative"] = (
        apart / sum(float(v.double().square().sum()) for v in sums.values()) ** 0.5
    )
    found["warm_up_s"] = sum(whole.warm_up)

    def noised(sums: dict[str, Tensor]) -> None:
        source.add_(sums, sensitivity=1.0, noise_multiplier=1.0, sequence=1, stream="gradient")

    steps["noise"] = lambda: noised(sums)
    steps["whole"] = lambda: noised(private_compiled())
    with turn:
        found |= {f"{name}_ms": timed(step, rounds) for name, step in steps.items()}
        found |= peers.measured(others, lambda step: timed(step, rounds))
    found["ratio_to_compiled"] = found["clipwise_compiled_ms"] / found["compiled_ms"]
    found["whole_ratio"] = found["whole_ms"] / found["compiled_ms"]
    found["memory_ratio"] = found["clipwise_compiled_gib"] / found["compiled_gib"]
    found["eager_ratio_to_eager"] = found["clipwise_ms"] / found["eager_ms"]
    return found


def works(device: str = "cuda", simple: bool = False) -> dict[str, Callable[[], tuple[nn.Module, Any, Any]]]:
    """Model, losses and batch of each; `simple`: models that peers can take."""
    half = torch.bfloat16

    def text(dtype: torch.dtype) -> tuple[nn.Module, Any, Any]:
        tokens = torch.randint(0, 50257, (32, 256), device=device)
        return Gpt(untied=simple).to(device, dtype), words, (tokens, tokens.roll(1, 1))

    def images(model: nn.Module, *shape: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any, Any]:
        batch = (torch.randn(*shape, device=device, dtype=dtype), torch.randint(0, 10, shape[:1], device=device))
        return model.to(device, dtype), classes, batch

    return {
        "GPT 124M, T 256, batch 32, bf16": lambda: text(half),
        "GPT 124M, T 256, batch 32, TF32": lambda: text(torch.float32),
        "ViT-B, 196 tokens, batch 64, bf16": lambda: images(Vit(table=simple), 64, 3, 224, 224, dtype=half),
        "ResNet18 (GN), 32 px, batch 256": lambda: images(resnet18(), 256, 3, 32, 32),
        "MNIST CNN, batch 512": lambda: images(mnist_cnn(), 512, 1, 28, 28),
    }


def one(name: str, rounds: int, folder: Path, others: int, wait: float, lock: Path, out: Path) -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    try:
        found: dict[str, Any] = measured(
            *works()[name](), rounds, my_turn(folder, others, wait, lock), works(simple=True)[name]
        )
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        with my_turn(folder, 0, 0, lock):
            pass
    machine = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    out.write_text(json.dumps({"name": name, "machine": machine, "found": found}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", help="words that the names of the work must hold")
    parser.add_argument("--wait", type=float, default=600, help="seconds until the first is timed, ready or not")
    parser.add_argument("--lock", type=Path, help="held while timing, and waited for while others hold it")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, folder, others = given.one
        one(name, given.rounds, Path(folder), int(others), given.wait, given.lock or Path(folder, "turn"), given.out)
        return
    names = [n for n in works() if not given.only or any(word in n for word in given.only)]
    with tempfile.TemporaryDirectory() as folder:
        outs = {name: Path(folder, f"{i}.json") for i, name in enumerate(names)}
        command = [sys.executable, __file__, "--rounds", str(given.rounds), "--wait", str(given.wait)]
        command += ["--lock", str(given.lock)] if given.lock else []
        started = [
            subprocess.Popen([*command, "--out", str(out), "--one", name, folder, str(len(names))])
            for name, out in outs.items()
        ]
        results: dict[str, Any] = {}
        machine: dict[str, str] = {}
        for process, (name, out) in zip(started, outs.items(), strict=True):
            process.wait()
            read = json.loads(out.read_text()) if out.exists() else {"found": {"failed": "killed"}, "machine": machine}
            results[name], machine = read["found"], read["machine"]
            print(name, json.dumps(results[name]), flush=True)
            if given.out:
                given.out.parent.mkdir(parents=True, exist_ok=True)
                given.out.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
