"""Row 11 where chance, the size of a batch or its longest record decide: mixing that one look in a few would see."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import X, Y, losses, network, run
from torch import nn
from torch.utils.data import default_collate

import clipwise as cw
from clipwise import errors
from clipwise.engine.preflight import preflight


def negatives(model, batch):
    found = model(batch[0])
    return (found - found[torch.rand(len(found)).argsort()]).square().sum(1)


def by_sorting(model, batch):
    found = model(batch[0])
    return (found - found[torch.randn(len(found)).sort().indices]).square().sum(1)


def one_hot(model, batch):
    x = batch[0]
    order = F.one_hot(torch.rand(len(x)).argsort(), len(x)).to(x)
    return losses(model, (0.6 * x + 0.4 * order @ x, batch[1]))


def coin(model, batch):
    x = batch[0]
    return losses(model, (x - x.mean(0) if torch.bernoulli(torch.tensor(0.5)) == 0 else x, batch[1]))


def by_dropout(model, batch):
    x = batch[0]
    return losses(model, (x - x.mean(0) if F.dropout(torch.ones(()), 0.5) == 0 else x, batch[1]))


def swaps(model, batch):
    x = batch[0]
    return losses(model, (torch.where(torch.bernoulli(torch.full_like(x, 0.85)) > 0, x, x.roll(1, 0)), batch[1]))


def hardest_left_out(model, batch):
    found = losses(model, batch)
    if number := int(0.1 * len(found)):
        found = found * (found < found.topk(number).values.min()).detach()
    return found


def outliers_left_out(model, batch):
    found = losses(model, batch)
    with torch.no_grad():
        far = found > found.mean() + 3 * found.std(correction=0) + 1e-9
    return torch.where(far, 0 * found, found)


@pytest.mark.parametrize(
    "mixing", [negatives, by_sorting, one_hot, coin, by_dropout, swaps, hardest_left_out, outliers_left_out]
)
def test_11_what_chance_or_size_opens_is_seen(mixing):
    training = run(loss_fn=mixing)
    with pytest.raises((errors.CrossExampleOp, errors.UnsupportedOp)):
        training.batches((X, Y))
    assert training.ledger.charges == 0


def mixup(records):
    x, y = default_collate(records)
    return 0.6 * x + 0.4 * x[torch.rand(len(x)).argsort()], y


def mixup_by_numpy(records):
    x, y = default_collate(records)
    return 0.6 * x + 0.4 * x[np.random.permutation(len(x))], y


def mixup_by_random(records):
    x, y = default_collate(records)
    return 0.6 * x + 0.4 * x[random.sample(range(len(x)), len(x))], y


@pytest.mark.parametrize("collate", [mixup, mixup_by_numpy, mixup_by_random])
def test_11_mixup_is_seen(collate):
    training = run()
    with pytest.raises(errors.CrossExampleOp):
        training.batches(list(zip(X, Y, strict=True)), collate_fn=collate)


class Noisy(nn.Module):
    """Noise of each record's own, of many kinds."""

    def __init__(self):
        super().__init__()
        self.model, self.drop = network(), nn.Dropout(0.3)

    def forward(self, x):
        x = self.drop(x) + 0.1 * torch.randn_like(x)
        keep = torch.rand(len(x), 1) < 0.8
        return self.model(x * keep * torch.bernoulli(torch.full_like(x, 0.9)))


def test_11_noise_of_each_record_alone_is_taken():
    training = run(model=Noisy())
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    batches = training.batches((X, Y))
    assert torch.equal(state[0], torch.get_rng_state())
    assert state[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    for batch in batches:
        training.step(batch)
    assert training.statement()["certified"]


@pytest.mark.parametrize("least", [32, 64])
def test_11_padding_to_a_multiple_is_seen(least):
    def padded(records):
        longest = -(-max(len(r) for r in records) // least) * least
        return torch.stack([F.pad(r, (0, 0, 0, longest - len(r))) for r in records])

    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())

    def mean(m, x):
        return m(x + 1).mean(dim=(1, 2))

    records = [torch.randn(20 + i, 4) for i in range(12)]
    training = run(model=model, loss_fn=mean)
    with pytest.raises(errors.CrossExampleOp):
        training.batches(records, collate_fn=padded)


def test_06_rows_that_come_in_another_order_are_refused():
    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.w = nn.Linear(6, 2), nn.Parameter(torch.randn(3, 2))

        def forward(self, x):
            return torch.kron(self.w, self.linear(x)).view(3, len(x), -1).permute(1, 0, 2).flatten(1)

    model = Product()
    with pytest.raises(errors.ClipwiseError):
        cw.clipped_sum(model, lambda m, x: m(x).logsumexp(1), X[:4])
    with pytest.raises(errors.ClipwiseError):
        preflight(model, lambda m, x: m(x).logsumexp(1), list(X[:4]))


def test_11_losses_that_take_gradients_of_their_own_are_looked_at_too():
    """Also where nobody records gradients, and with nothing left behind by a look that fails."""

    def perturbed(model, batch):
        x = batch[0].detach().requires_grad_()
        (grad,) = torch.autograd.grad(losses(model, (x, batch[1])).sum(), x)
        return losses(model, (batch[0] + 0.1 * grad.sign() + 0.01 * torch.randn_like(x), batch[1]))

    with torch.no_grad():
        batches = run(loss_fn=perturbed, engine="bookkeeping").batches((X, Y))
    assert batches is not None
