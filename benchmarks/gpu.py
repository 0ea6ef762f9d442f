"""Forward + backward on a GPU: plain and clipwise (norms and clipping included), eager and compiled, noise apart.

    python benchmarks/gpu.py [--rounds 20] [--out benchmarks/results/gpu.json]

Times are medians in ms, memory is the peak in GiB; compiled against compiled is the ratio that counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from step import EncoderLayer, mnist_cnn
from torch import Tensor, nn

import clipwise as cw
from clipwise.clipping import clip, engine_gradients, trainable
from clipwise.engine.compiled import Compiled
from clipwise.noise import NoiseSource


class Gpt(nn.Module):
    """GPT-2 small with a tied head: 124M parameters."""

    def __init__(self, words: int = 50257, length: int = 256, d: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, d), nn.Embedding(length, d)
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.02)
        self.blocks, self.norm = (
            nn.Sequential(*(EncoderLayer(d, 12, causal=True) for _ in range(layers))),
            nn.LayerNorm(d),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place(torch.arange(x.shape[1], device=x.device))
        return F.linear(self.norm(self.blocks(h)), self.embed.weight)


class Vit(nn.Module):
    """ViT-B on 224 pixels: 196 tokens, mean pooling."""

    def __init__(self, d: int = 768, layers: int = 12) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, d, 16, 16)
        self.place = nn.Parameter(0.02 * torch.randn(196, d))
        self.blocks, self.norm = nn.Sequential(*(EncoderLayer(d, 12) for _ in range(layers))), nn.LayerNorm(d)
        self.head = nn.Linear(d, 1000)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cut(x).flatten(2).transpose(1, 2) + self.place
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


def timed(step: Callable[[], Any], rounds: int) -> tuple[float, float]:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times), torch.cuda.memory_reserved() / 2**30  # with what CUDA graphs hold


def measured(model: nn.Module, loss: Any, batch: Any, rounds: int) -> dict[str, float]:
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

    found: dict[str, float] = {}
    found["compiled_ms"], found["compiled_gib"] = timed(lambda: plain(compiled), rounds)
    found["eager_ms"], found["eager_gib"] = timed(lambda: plain(lambda: loss(model, batch).mean()), rounds)
    found["clipwise_ms"], found["clipwise_gib"] = timed(private, rounds)
    found["clipwise_compiled_ms"], found["clipwise_compiled_gib"] = timed(private_compiled, rounds)
    found["warm_up_s"] = sum(whole.warm_up)
    sums, source = private(), NoiseSource()
    truth = whole(batch, mask, 1.0)[0]
    length = sum(float(v.double().square().sum()) for v in sums.values()) ** 0.5
    apart = sum(float((v.double() - truth[n].double()).square().sum()) for n, v in sums.items()) ** 0.5
    found["compiled_against_eager_relative"] = apart / length
    found["noise_ms"], _ = timed(
        lambda: source.add_(sums, sensitivity=1.0, noise_multiplier=1.0, sequence=1, stream="gradient"), rounds
    )
    found["ratio_to_compiled"] = found["clipwise_compiled_ms"] / found["compiled_ms"]
    found["memory_ratio"] = found["clipwise_compiled_gib"] / found["compiled_gib"]
    found["eager_ratio_to_eager"] = found["clipwise_ms"] / found["eager_ms"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", help="words that the names of the work must hold")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    tokens = torch.randint(0, 50257, (32, 256), device="cuda")
    pictures = torch.randn(64, 3, 224, 224, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 10, (512,), device="cuda")
    work: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
        "GPT 124M, T 256, batch 32, bf16": lambda: (Gpt().cuda().bfloat16(), words, (tokens, tokens.roll(1, 1))),
        "GPT 124M, T 256, batch 32, TF32": lambda: (Gpt().cuda(), words, (tokens, tokens.roll(1, 1))),
        "ViT-B, 196 tokens, batch 64, bf16": lambda: (Vit().cuda().bfloat16(), classes, (pictures, labels[:64])),
        "ResNet18 (GN), 32 px, batch 256": lambda: (
            resnet18().cuda(),
            classes,
            (torch.randn(256, 3, 32, 32, device="cuda"), labels[:256]),
        ),
        "MNIST CNN, batch 512": lambda: (
            mnist_cnn().cuda(),
            classes,
            (torch.randn(512, 1, 28, 28, device="cuda"), labels),
        ),
    }
    results: dict[str, Any] = {}
    for name, make in work.items():
        if given.only and not any(word in name for word in given.only):
            continue
        try:
            results[name] = measured(*make(), given.rounds)
        except Exception as error:
            results[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        print(name, json.dumps(results[name]), flush=True)
        if given.out:
            machine = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
