"""How near to S does one record ever come? Random models, records, rules and precisions, measured in float64.

    python tests/faults/bounds.py --cases 10000 --save benchmarks/results/bounds.json

Each case is a random model (tests/fuzz.py) with a random batch; one record is made extreme in some way. Two numbers are
taken, both as shares of the sensitivity: ‖the record's own contribution‖, and ‖sum with it − sum without it‖, which
includes what its presence does to the rounding of everybody else.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import brute
import torch
from fuzz import losses, random_case
from torch import Tensor

import clipwise as cw

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
RULES = [cw.PSAC(), cw.AutoS(), cw.AutoV(), cw.Abadi(), cw.Reparam(), cw.Global(), cw.PerLayer(cw.PSAC())]


def extreme(record: Tensor, r: random.Random) -> Tensor:
    """A record that somebody might send to break the bound."""
    if not record.is_floating_point():
        return record if r.random() < 0.5 else torch.full_like(record, int(record.flatten()[0]))
    kind = r.choice(["as it is", "scaled", "huge", "tiny", "zero", "one entry", "bad"])
    if kind == "scaled":
        return record * 10 ** r.uniform(-4, 4)
    if kind == "huge":
        return record.sign() * 10 ** r.uniform(10, 38)
    if kind == "tiny":
        return record * 10 ** r.uniform(-40, -10)
    if kind == "zero":
        return torch.zeros_like(record)
    if kind == "one entry":
        spike = torch.zeros_like(record)
        spike.view(-1)[0] = 10 ** r.uniform(0, 6)
        return spike
    return record.index_fill(0, torch.tensor([0]), r.choice([math.nan, math.inf])) if kind == "bad" else record


def measure(seed: int, name: str) -> tuple[float, float]:
    """(own contribution, change of the sum), as shares of S."""
    r = random.Random(seed)
    model, (data,) = random_case(seed)
    model = model.to(DTYPES[name])
    if data.is_floating_point():
        data = data.to(DTYPES[name])
    record = extreme(data[-1], r)[None].to(data.dtype)
    rule, clip_norm = r.choice(RULES), 10 ** r.uniform(-2, 1)
    copies = data[:1].expand(r.choice([1, 30]), *data.shape[1:])  # alike, so that rounding errors add up
    others = torch.cat([data[:-1], copies]) if r.random() < 0.5 else data[:-1]
    alone, without, into = (
        cw.clipped_sum(model, losses, (x,), rule, clip_norm) for x in (record, others, torch.cat([others, record]))
    )
    change = brute.distance(dict(into.grads), dict(without.grads))
    return brute.norm(dict(alone.grads)) / alone.sensitivity, change / into.sensitivity


def worst(cases: int, first: int = 0) -> dict[str, Any]:
    """The largest of both numbers per precision."""
    found: dict[str, Any] = {name: {"own": 0.0, "change": 0.0, "cases": 0, "seed": None} for name in DTYPES}
    refused: Counter[str] = Counter()
    for i in range(cases):
        name, seed = list(DTYPES)[i % 3], first + i
        try:
            own, change = measure(seed, name)
        except (RuntimeError, NotImplementedError) as error:  # plain PyTorch cannot run such a model either
            refused[str(error).splitlines()[0][:60]] += 1
            continue
        row = found[name]
        row["cases"] += 1
        row["own"] = max(row["own"], own)
        if not change <= row["change"]:
            row["change"], row["seed"] = change, seed
    return {"worst share of S": found, "models that plain PyTorch cannot run": dict(refused)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    found = {"command": f"python tests/faults/bounds.py --cases {options.cases}", **worst(options.cases)}
    print(json.dumps(found, indent=2), f"{time.perf_counter() - began:.0f} s")
    if options.save:
        options.save.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
