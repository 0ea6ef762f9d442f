"""A Lightning image classifier, made private by a callback.

    python examples/lightning_images.py [--epochs 8]

Digits as pictures of 8×8. `training_step` returns one loss per example instead of their mean; nothing else changes.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import clipwise as cw
from clipwise.integrations.lightning import PrivateFit


class Classifier(L.LightningModule):
    """A small convolutional net with group norm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y, reduction="none")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    epochs = parser.parse_args().epochs
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    L.seed_everything(0, verbose=False)
    digits = load_digits()
    x, y = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32), torch.tensor(digits.target)
    held_out = torch.utils.data.TensorDataset(x[1500:], y[1500:])

    plan = cw.Plan.for_dataset(size=1_500, batch_size=250, epochs=epochs, epsilon=3.0, delta=1e-4)
    private = PrivateFit(plan, eval_is_public=True)
    with tempfile.TemporaryDirectory() as scratch:
        trainer = L.Trainer(
            max_epochs=epochs,
            callbacks=[private],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=scratch,
        )
        loader = torch.utils.data.DataLoader(held_out, batch_size=297)
        trainer.fit(Classifier(), private.loader((x[:1500], y[:1500])), loader)
    accuracy = float(trainer.callback_metrics["accuracy"])
    print(f"accuracy {accuracy:.1%} at epsilon {private.training.epsilon:.4f}")


if __name__ == "__main__":
    main()
