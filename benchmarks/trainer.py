"""PrivateTrainer against the bare private loop: the same model, records and collate function, alternating in rounds.

    python benchmarks/trainer.py [--rounds 5] [--out benchmarks/results/trainer.json]

Time from the end of one step to the end of the next, medians; batches, scheduler, callbacks and state included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from step import with_steady_memory
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

import clipwise as cw
from clipwise.integrations.losses import losses_for
from clipwise.integrations.transformers import PrivateTrainer

ROWS, LENGTH, STEPS = 32, 64, 12


def collate(records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {("labels" if k == "label" else k): torch.stack([r[k] for r in records]) for k in records[0]}


def setting() -> tuple[Any, list[dict[str, Any]], cw.Plan]:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    records = [
        {
            "input_ids": torch.randint(0, 1000, (LENGTH,)),
            "attention_mask": torch.ones(LENGTH, dtype=torch.int64),
            "label": torch.tensor(i % 2),
        }
        for i in range(ROWS)
    ]
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=1.0, steps=STEPS, expected_batch_size=ROWS)
    return BertForSequenceClassification(config), records, plan


class Watch(TrainerCallback):
    def __init__(self) -> None:
        self.ended: list[float] = []

    def on_step_end(self, *given: Any, **named: Any) -> None:
        self.ended.append(time.perf_counter())


def by_trainer() -> list[float]:
    model, records, plan = setting()
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=ROWS, report_to=[], disable_tqdm=True, save_strategy="no",
            logging_strategy="no", use_cpu=True,
        )  # fmt: skip
        trainer = PrivateTrainer(
            model, args, plan=plan, train_dataset=records, data_collator=collate, callbacks=[watch]
        )
        trainer.train()
        trainer.training.ledger.close()
    return [b - a for a, b in itertools.pairwise(watch.ended)]


def by_hand() -> list[float]:
    model, records, plan = setting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        training = cw.privatize(
            model.train(), optimizer, plan, losses_for(model), ledger=Path(folder) / "run.ledger", microbatch=ROWS
        )
        ended = []
        for batch in training.batches(records, collate_fn=collate):
            training.step(batch)
            ended.append(time.perf_counter())
        training.ledger.close()
    return [b - a for a, b in itertools.pairwise(ended)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=None)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    ways = {"trainer": by_trainer, "bare": by_hand}
    found: dict[str, list[float]] = {name: [] for name in ways}
    ratios = []
    for _ in range(given.rounds):
        now = {name: statistics.median(run()[2:]) for name, run in ways.items()}
        ratios.append(now["trainer"] / now["bare"])
        for name, value in now.items():
            found[name].append(1e3 * value)
    result = {name: statistics.median(values) for name, values in found.items()} | {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
    }
    print(f"bare {result['bare']:.0f} ms, PrivateTrainer {result['trainer']:.0f} ms, ratio {result['ratio']:.3f}")
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with_steady_memory()
    main()
