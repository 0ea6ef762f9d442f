"""The code and the numbers of the README; test_docs.py has the pages."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_ten_lines_run(capsys):
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "one example" in printed


def test_numbers_come_from_the_committed_result_file():
    eager, compiled = (
        json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())["results"]
        for name in ("step", "step_compiled")
    )
    without = json.loads((ROOT / "benchmarks/results/step_without.json").read_text())["results"]
    slower = [f"{found['clipwise']:.2f}×" for found in without.values()]
    assert f"the eager steps take {' and '.join(slower)}." in README.replace("\n", " ")
    faster = json.loads((ROOT / "benchmarks/results/step_faster_products.json").read_text())["results"]
    assert f"the encoder took {list(faster.values())[1]['clipwise']:.2f}× without the code in C" in README
    pooled = eager["MNIST CNN, batch 512"]["with torch's max pooling"]
    assert f"with PyTorch's own it takes {pooled:.2f}×" in README.replace("\n", " ")
    for name, found in [*eager.items(), *compiled.items()]:
        shown = f"| {name} | {found['plain_ms']:.0f} ms | **{found['clipwise']:.2f}×** | "
        assert f"{shown}{found['lowest']:.2f}–{found['highest']:.2f}× | {found['of it noise']:.2f}× |" in README


ACCURACIES = {
    "MNIST, the papers' CNN, ε = 3, PSAC": "mnist",
    "Fashion-MNIST, the papers' CNN, ε = 3, PSAC": "fashion_mnist",
    "MNIST, scattering features, ε = 3, PSAC": "mnist_best",
    "Fashion-MNIST, scattering features, ε = 3, PSAC": "fashion_mnist_best",
    "CIFAR-10 from scratch, scattering features, ε = 3, PSAC": "cifar10_best",
}


@pytest.mark.parametrize("task", ACCURACIES)
def test_accuracies_come_from_committed_result_files(task):
    rows = json.loads((ROOT / f"experiments/results/{ACCURACIES[task]}.json").read_text())["rows"]
    found = [
        100 * r["accuracy"]
        for r in rows
        if (r["method"], r["settings"], r["device"]) == ("psac", {}, "cuda") and r["seed"] < 5
    ]
    assert len(found) == 5
    assert f"| {task} | {statistics.mean(found):.2f} ± {statistics.stdev(found):.2f} |" in README


def test_gpu_numbers_come_from_the_committed_result_file():
    results = json.loads((ROOT / "benchmarks/results/gpu.json").read_text())["results"]
    for name, r in results.items():
        rows = [line for line in README.splitlines() if line.startswith(f"| {name}")]
        numbers = (
            f"| {name} | {min(r['opacus_hooks_ms'], r['opacus_ghost_ms']):.1f} ms | {r['fastdp_ms']:.1f} ms | "
            f"{r['compiled_ms']:.1f} ms | {r['clipwise_compiled_ms']:.1f} ms | {r['ratio_to_compiled']:.2f}× | "
            f"{r['memory_ratio']:.2f}× | {r['whole_ratio']:.2f}× |"
        )
        assert numbers in rows
    eager = sorted(r["eager_ratio_to_eager"] for r in results.values())
    assert f"a step on a GPU takes {eager[0]:.1f} to {eager[-1]:.1f} times the plain eager one" in README
