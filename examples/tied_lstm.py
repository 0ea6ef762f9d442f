"""A model that libraries with per-sample hooks refuse, trained as it is: a compiled LSTM, in-place ops, tied weights.

    python examples/tied_lstm.py [--steps 60]

It learns to guess the next letter of this project's licence text. The embedding is also the output layer (one gradient,
counted once), the residual is added in place, and the whole step, LSTM included, is one compiled graph.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise as cw

LENGTH = 6


class LetterModel(nn.Module):
    """Embedding, LSTM, in-place residual, and the embedding again."""

    def __init__(self, letters: int, width: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(letters, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.mix, self.act = nn.Linear(width, width), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(self.table(x))
        out = self.mix(h)
        out += h
        return F.linear(self.act(out), self.table.weight)


def records() -> tuple[Tensor, int]:
    """Windows of the licence text, seven letters each; and how many letters there are."""
    text = (Path(__file__).parent.parent / "LICENSE").read_text()
    letters = sorted(set(text))
    numbers = torch.tensor([letters.index(c) for c in text])
    return numbers.unfold(0, LENGTH + 1, 3), len(letters)


def losses(model: nn.Module, windows: Tensor) -> Tensor:
    """One loss per window: the mean over its letters."""
    logits = model(windows[:, :-1])
    each = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
    return each.view(len(windows), -1).mean(dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    windows, letters = records()
    model = LetterModel(letters)
    plan = cw.Plan(epsilon=8.0, delta=1e-4, sampling_prob=0.1, steps=steps, expected_batch_size=0.1 * len(windows))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    training = cw.privatize(model, optimizer, plan, losses, compile=True)
    with torch.no_grad():
        before = float(losses(model, windows).mean())
    for batch in training.batches(windows):
        training.step(batch)
    with torch.no_grad():
        after = float(losses(model, windows).mean())
    print(f"compiled in {training.warm_up:.0f} s, {plan.steps} steps at epsilon {training.epsilon:.4f}")
    print(f"loss per letter, of a text that is public: {before:.2f} before, {after:.2f} after")


if __name__ == "__main__":
    main()
