"""Models of `transformers`, shrunk: equal to single examples in float64, or refused for the right reason."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import clipwise as cw
from clipwise import errors

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
pytest.importorskip("transformers")

from experiments import coverage, tables  # noqa: E402

REFUSED = {"XLNet": "first axis does not run over the examples", "Mixtral": "selected", "ResNet": "batch_norm"}


@pytest.mark.parametrize("name", coverage.MODELS)
def test_gradients_are_those_of_single_examples(name):
    found = coverage.error(*coverage.build(name))
    if name in REFUSED:
        assert REFUSED[name] in found["refused"]
    else:
        assert found.get("norms", 1.0) <= 1e-10, found
        assert found["sum"] <= 1e-10


@pytest.mark.parametrize("name", [name for name in coverage.MODELS if name not in REFUSED])
def test_with_dropout_on_each_example_stays_bounded(name):
    model, loss, data = coverage.build(name, dropout=True)
    out = cw.clipped_sum(
        model.float(), loss, tuple(x.float() if x.is_floating_point() else x for x in data), cw.AutoV()
    )
    size = sum(float(g.double().square().sum()) for g in out.grads.values()) ** 0.5
    assert torch.isfinite(out.norms).all()
    assert 0 < size <= out.sensitivity * coverage.ROWS


@pytest.mark.parametrize("name", coverage.LORA)
def test_adapters_alone_are_trained(name):
    model, loss, data = coverage.with_lora(name)
    found = coverage.error(model, loss, data)
    assert found.get("norms", 1.0) <= 1e-10, found
    assert found["sum"] <= 1e-10
    assert all("lora" in key for key, p in model.named_parameters() if p.requires_grad)


def test_resnet_after_its_batch_norm_is_replaced():
    model, loss, data = coverage.build("ResNet")
    found = coverage.error(cw.fix_batch_norm(model), loss, data)
    assert found.get("norms", 1.0) <= 1e-10, found


def test_fix_batch_norm_keeps_scale_shift_mode_and_nesting():
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.Sequential(nn.BatchNorm2d(12), nn.ReLU()), nn.BatchNorm2d(6)).eval()
    before = model[1][0].weight
    fixed = cw.fix_batch_norm(model)
    assert isinstance(fixed[1][0], nn.GroupNorm)
    assert fixed[1][0].weight is before
    assert (fixed[1][0].num_groups, fixed[2].num_groups) == (3, 1)
    assert not fixed[1][0].training
    assert isinstance(cw.fix_batch_norm(nn.BatchNorm1d(8)), nn.GroupNorm)
    assert cw.fix_batch_norm(nn.BatchNorm1d(8, affine=False)).weight is None


def test_fix_batch_norm_takes_shared_norms_once_and_refuses_what_it_does_not_know():
    class Activated(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).relu()

    shared = nn.BatchNorm1d(8)
    model = cw.fix_batch_norm(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": shared}))
    assert isinstance(model["a"], nn.GroupNorm)
    assert model["a"] is model["b"][0] is model["c"]
    for bad in (Activated(8), nn.BatchNorm1d(1), nn.LazyBatchNorm1d()):
        with pytest.raises(errors.UnsupportedOp):
            cw.fix_batch_norm(nn.Sequential(bad))
    with pytest.raises(ValueError, match="groups"):
        cw.fix_batch_norm(model, groups=0)


def test_the_table_in_the_docs_is_the_measured_one():
    assert tables.models_table() in (ROOT / "docs" / "models.md").read_text()


def test_a_small_bert_trains_with_the_preflight_on():
    model, loss, _ = coverage.build("Bert", dropout=True)
    model = model.float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.2, steps=2, expected_batch_size=4)
    training = cw.privatize(model, optimizer, plan, loss)
    words = torch.randint(4, coverage.WORDS, (20, 6))
    for batch in training.batches((words, torch.arange(20) % 2)):
        training.step(batch)
    assert training.epsilon == plan.epsilon
