"""Tabular data with a report: who earns more than 50,000 a year, from census rows (Adult).

    make data && python examples/adult.py           (or, without the data: made rows of the same kind)

Numbers are scaled by public constants and words are looked up in public lists: nothing is fitted on private rows.
Writes runs/adult/report.html.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise as cw

sys.path.insert(0, str(Path(__file__).parent.parent))
from experiments.datasets import Data, DataMissing, load


def rows() -> tuple[Data, str]:
    """The census, or 8,000 made rows where a few columns matter."""
    try:
        return load("adult"), "Adult census"
    except DataMissing:
        draw = torch.Generator().manual_seed(0)
        x = (torch.rand(10_000, 100, generator=draw) < 0.2).float()
        y = (x[:, :8].sum(1) - x[:, 8:16].sum(1) + 0.3 * torch.randn(10_000, generator=draw) > 0.5).long()
        return Data((x[:8_000], y[:8_000]), (x[8_000:], y[8_000:]), 2), "made rows"


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--epochs", type=float, default=10.0)
    parser.add_argument("--out", type=Path, default=Path("runs/adult"))
    given = parser.parse_args()
    data, name = rows()
    size = len(data.train[0])
    model = nn.Linear(data.train[0].shape[1], 2)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    plan = cw.Plan.for_dataset(
        size=size, batch_size=512, epochs=given.epochs, epsilon=given.epsilon, delta=1 / (10 * size)
    )
    training = cw.privatize(model, optimizer, plan, loss_fn)
    for batch in training.batches(data.train):
        training.step(batch)
    with torch.no_grad():
        accuracy = float((model(data.test[0]).argmax(1) == data.test[1]).float().mean())

    result = {"accuracy": accuracy, "test_examples": len(data.test[0])}
    page = cw.save_report(training, given.out, title=f"{name}, trained privately", result=result)
    print(f"accuracy {accuracy:.1%} at epsilon {training.epsilon:.4f} on {name}; report: {page}")


if __name__ == "__main__":
    main()
