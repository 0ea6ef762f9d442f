"""Text classification with PrivateTrainer and LoRA: sentences of SST-2, MiniLM with a new head, adapters only.

    python examples/sst2_lora.py                                   (made sentences, a tiny random model: seconds)
    python examples/sst2_lora.py --data FOLDER --model FOLDER      (train.tsv.gz and dev.tsv of SST-2; MiniLM's files)

The tokenizer comes with the model and was made without these sentences: a vocabulary counted on private text leaks.
"""

from __future__ import annotations

import argparse
import gzip
import random
import tempfile
import zlib
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, TrainingArguments

from clipwise.integrations.transformers import PrivateTrainer, plan_for

LENGTH = 24
GOOD, BAD = "moving funny warm sharp lovely".split(), "dull clumsy cold flat tedious".split()


class Hashed:
    """For the tiny model: words as numbers, by a public function."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        numbers = [2 + zlib.crc32(word.encode()) % 998 for word in text.split()][:LENGTH]
        return {
            "input_ids": numbers + [0] * (LENGTH - len(numbers)),
            "attention_mask": [1] * len(numbers) + [0] * (LENGTH - len(numbers)),
        }


class FromModel:
    """The tokenizer that came with the model, padded to one length."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, text: str) -> dict[str, list[int]]:
        return dict(self.tokenizer(text, padding="max_length", truncation=True, max_length=LENGTH))


def made(n: int, seed: int) -> list[tuple[int, str]]:
    """Sentences whose adjectives tell the label."""
    draw = random.Random(seed)
    rows = []
    for _ in range(n):
        label = draw.randrange(2)
        words = draw.choices(GOOD if label else BAD, k=2)
        rows.append((label, f"a {words[0]} film with a {words[1]} {draw.choice(['story', 'cast', 'ending'])}"))
    return rows


def tiny() -> torch.nn.Module:
    """A stand-in for a model that was trained on public text: it has learnt which adjective comes first."""
    config = BertConfig(vocab_size=1000, hidden_size=32, num_hidden_layers=2, num_attention_heads=2)
    config.intermediate_size, config.num_labels = 64, 10
    model, tokens = AutoModelForSequenceClassification.from_config(config), Hashed()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step in range(60):
        rows = [text for _, text in made(100, 1_000 + step)]
        records = [{**tokens(text), "label": (GOOD + BAD).index(text.split()[1])} for text in rows]
        model(**collate(records)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.classifier, model.num_labels, config.num_labels = torch.nn.Linear(32, 2), 2, 2
    return model


def sst2(path: Path) -> list[tuple[int, str]]:
    """Lines of label and sentence."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = [line.split("\t", 1) for line in raw.decode().splitlines() if line[:1] in "01"]
    return [(int(label), sentence) for label, sentence in rows]


def collate(records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {("labels" if k == "label" else k): torch.tensor([r[k] for r in records]) for k in records[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--out", default=None)
    given = parser.parse_args()
    torch.manual_seed(0)
    if given.model is None:
        model, tokens = tiny(), Hashed()
    else:
        model = AutoModelForSequenceClassification.from_pretrained(given.model, num_labels=2)
        tokens = FromModel(given.model)
    if given.data is None:
        train, test = made(2_000, 1), made(400, 2)
    else:
        train, test = sst2(given.data / "train.tsv.gz"), sst2(given.data / "dev.tsv")
    records, held_out = ([{**tokens(text), "label": label} for label, text in rows] for rows in (train, test))

    adapters = peft.LoraConfig(task_type="SEQ_CLS", r=8, target_modules=["query", "value"])
    model = peft.get_peft_model(model, adapters)
    with tempfile.TemporaryDirectory() as scratch:
        args = TrainingArguments(
            output_dir=given.out or scratch,
            per_device_train_batch_size=100,
            gradient_accumulation_steps=2,
            num_train_epochs=given.epochs,
            learning_rate=1e-2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=10,
        )
        plan = plan_for(args, size=len(records), epsilon=given.epsilon, delta=1e-5)
        trainer = PrivateTrainer(
            model,
            args,
            plan=plan,
            train_dataset=records,
            eval_dataset=held_out,
            eval_is_public=True,  # the held-out sentences are not part of the promise
            data_collator=collate,
            compute_metrics=lambda p: {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())},
        )
        trainer.train()
        accuracy = trainer.evaluate()["eval_accuracy"]
        print(f"accuracy {accuracy:.1%} at epsilon {trainer.training.epsilon:.4f}")


if __name__ == "__main__":
    main()
