"""PrivateFit: a LightningModule trained privately with its own training_step; checkpoints, schedules, refusals."""

from __future__ import annotations

import json

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import clipwise as cw
from clipwise.errors import LedgerError, ParameterMismatch, PrivateData, UnsupportedOp
from clipwise.integrations.lightning import PrivateFit

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
DATA = (
    torch.randn(40, 6, generator=torch.Generator().manual_seed(0)),
    torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1)),
)


class Module(L.LightningModule):
    def __init__(self, logs: bool = False, schedule: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))
        self.logs, self.schedule = logs, schedule

    def training_step(self, batch, batch_idx):
        x, y = batch
        losses = F.cross_entropy(self.net(x), y, reduction="none")
        if self.logs:
            self.log("loss", losses.mean())
        return losses

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.schedule is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.schedule}}


def plan(steps: int = 8, **others):
    given = {"noise_multiplier": 1.0, "delta": 1e-5, "sampling_prob": 0.25, "steps": steps, "expected_batch_size": 10}
    return cw.Plan(**{**given, **others})


def trainer(private, folder, **others):
    given = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    given |= {"enable_model_summary": False, "default_root_dir": folder, "callbacks": [private]}
    return L.Trainer(**{**given, **others})


def test_a_fit_is_the_plain_private_loop(tmp_path):
    """The same seed gives the same weights as privatize, batches and step."""
    private, module = PrivateFit(plan(), seed=3), Module()
    module.net[2].p = 0.0
    fit = trainer(private, tmp_path, max_epochs=-1)
    fit.fit(module, private.loader(DATA))
    assert fit.global_step == 8
    assert fit.current_epoch == 2
    assert private.training.epsilon == private.plan.epsilon
    alone = Module()
    alone.net[2].p = 0.0
    optimizer = alone.configure_optimizers()
    losses = lambda m, b: m.training_step(b, 0)  # noqa: E731
    training = cw.privatize(alone, optimizer, plan(), losses, seed=3)
    for batch in training.batches(DATA):
        training.step(batch)
    for a, b in zip(module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(a, b)
    assert "training_step" not in module.__dict__
    assert not isinstance(module.training_step(DATA, 0), type(None))


@pytest.mark.parametrize(("schedule", "lr"), [("step", 0.1 * 0.5**8), ("epoch", 0.1 * 0.5**2)])
def test_schedules_are_stepped(tmp_path, schedule, lr):
    private, module = PrivateFit(plan()), Module(schedule=schedule)
    trainer(private, tmp_path, max_epochs=-1).fit(module, private.loader(DATA))
    assert private.training.optimizer.param_groups[0]["lr"] == pytest.approx(lr)


def test_epsilon_is_logged_and_nothing_else(tmp_path):
    private, module = PrivateFit(plan()), Module()
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer(private, tmp_path, max_epochs=-1, logger=logger, log_every_n_steps=1).fit(module, private.loader(DATA))
    (file,) = tmp_path.rglob("metrics.csv")
    lines = file.read_text().splitlines()
    assert set(lines[0].split(",")) == {"clip_norm", "epoch", "epsilon", "step"}
    assert len(lines) == 9
    noisy = PrivateFit(plan())
    with pytest.raises(PrivateData, match="'loss'"):
        trainer(noisy, tmp_path, max_epochs=1).fit(Module(logs=True), noisy.loader(DATA))


def test_validation_needs_public_records(tmp_path):
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*DATA), batch_size=20)
    private = PrivateFit(plan())
    with pytest.raises(PrivateData, match="eval_is_public"):
        trainer(private, tmp_path, max_epochs=1).fit(Module(), private.loader(DATA), loader)
    public = PrivateFit(plan(), eval_is_public=True)
    fit = trainer(public, tmp_path, max_epochs=2)
    fit.fit(Module(), public.loader(DATA), loader)
    assert 0 <= float(fit.callback_metrics["accuracy"]) <= 1
    assert public.training.ledger.charges == 8


def test_checkpoints_go_on_with_their_ledger_only(tmp_path):
    path, saved = tmp_path / "run.ledger", tmp_path / "saved.ckpt"
    private = PrivateFit(plan(), ledger=path)
    fit = trainer(private, tmp_path, max_epochs=1)
    fit.fit(Module(), private.loader(DATA))
    fit.save_checkpoint(saved)
    private.training.ledger.close()
    without = PrivateFit(plan(), ledger=path)
    with pytest.raises(ParameterMismatch, match="ckpt_path"):
        trainer(without, tmp_path, max_epochs=2).fit(Module(), without.loader(DATA))
    other = PrivateFit(plan(), ledger=tmp_path / "other.ledger")
    with pytest.raises(LedgerError):
        trainer(other, tmp_path, max_epochs=2).fit(Module(), other.loader(DATA), ckpt_path=saved)
    again, module = PrivateFit(plan(), ledger=path), Module()
    trainer(again, tmp_path, max_epochs=-1).fit(module, again.loader(DATA), ckpt_path=saved)
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds.count("charge") == 8
    again.training.ledger.close()


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 1.0},
        {"accumulate_grad_batches": 2},
        {"overfit_batches": 2},
        {"precision": "16-mixed"},
    ],
    ids=str,
)
def test_what_breaks_the_guarantee_is_refused_by_name(tmp_path, options):
    private = PrivateFit(plan())
    fit = trainer(private, tmp_path, max_epochs=1, **{k: v for k, v in options.items() if k != "precision"})
    if "precision" in options:
        fit = trainer(private, tmp_path, max_epochs=1)
        type(fit).precision, before = property(lambda self: "16-mixed"), type(fit).precision
        try:
            with pytest.raises(UnsupportedOp, match="precision"):
                fit.fit(Module(), private.loader(DATA))
        finally:
            type(fit).precision = before
        return
    with pytest.raises(UnsupportedOp, match=next(iter(options))):
        fit.fit(Module(), private.loader(DATA))


def test_bf16_mixed_precision_and_an_adaptive_threshold(tmp_path):
    private = PrivateFit(plan(rule=cw.Abadi(), threshold=cw.QuantileThreshold(0.5, count_noise=3.0)), microbatch=8)
    module = Module()
    trainer(private, tmp_path, max_epochs=-1, precision="bf16-mixed").fit(module, private.loader(DATA))
    assert private.training.ledger.charges == 8
    assert private.training.clip_norm != 1.0


def test_a_mean_loss_is_refused(tmp_path):
    class Mean(Module):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx).mean()

    private = PrivateFit(plan())
    with pytest.raises(cw.errors.LossShape):
        trainer(private, tmp_path, max_epochs=1).fit(Mean(), private.loader(DATA))


def test_hooks_that_change_batches_or_are_not_called_are_refused(tmp_path):
    class Rolls(Module):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    class Clips(Module):
        def configure_gradient_clipping(self, *given, **named):
            return None

    for kind, name in ((Rolls, "on_after_batch_transfer"), (Clips, "configure_gradient_clipping")):
        private = PrivateFit(plan())
        with pytest.raises(UnsupportedOp, match=name):
            trainer(private, tmp_path, max_epochs=1).fit(kind(), private.loader(DATA))


def test_logging_what_training_step_kept_is_refused(tmp_path):
    class Keeps(Module):
        def training_step(self, batch, batch_idx):
            losses = super().training_step(batch, batch_idx)
            self.kept = float(losses.mean().detach())
            return losses

        def on_train_epoch_end(self):
            self.log("train_loss", self.kept)

    private = PrivateFit(plan())
    with pytest.raises(PrivateData, match="train_loss"):
        trainer(private, tmp_path, max_epochs=1).fit(Keeps(), private.loader(DATA))
