"""The model's own randomness is not mixing."""

from __future__ import annotations

import pytest
import torch
from test_preflight import SEQUENCES, Module, passes
from torch import nn

from clipwise import errors
from clipwise.engine.quiet import Quiet


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x):
        mean, log = self.encode(x).chunk(2, dim=-1)
        return self.decode(mean + torch.randn_like(mean) * log.exp())


class DropPath(nn.Module):
    """Stochastic depth as the vision libraries write it."""

    def __init__(self, inner, keep):
        super().__init__()
        self.inner, self.keep = inner, keep

    def forward(self, x):
        mask = (self.keep + torch.rand((len(x),) + (1,) * (x.dim() - 1), dtype=x.dtype)).floor_()
        return x + self.inner(x) / self.keep * mask


class Noisy(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.a, self.b, self.draw = nn.Linear(6, 4), nn.Linear(4, 3), draw

    def forward(self, x):
        return self.b(self.draw(self.a(x)))


DRAWS = {
    "normal": lambda h: h + torch.normal(0.0, 1.0, h.shape).to(h.dtype),
    "normal of tensors": lambda h: torch.normal(h, torch.ones_like(h)) + h,
    "bernoulli": lambda h: h * torch.bernoulli(torch.full_like(h, 0.5)),
    "bernoulli in place": lambda h: h * torch.empty_like(h).bernoulli_(0.5),
    "uniform in place": lambda h: h * torch.empty_like(h).uniform_(0.5, 1.5),
    "normal in place": lambda h: h + torch.empty_like(h).normal_(),
    "randint": lambda h: h * torch.randint(3, (len(h), 1)),
    "randint from": lambda h: h.gather(1, torch.randint(1, 4, (len(h), 4))),
    "randint by name": lambda h: h * torch.randint(low=1, high=4, size=(len(h), 1)),
    "randint half by name": lambda h: h * torch.randint(1, high=4, size=(len(h), 1)),
    "randint like": lambda h: h * torch.randint_like(h[:, :1], 2, 5),
    "rand": lambda h: h * torch.rand(len(h), 1, dtype=h.dtype),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_noise_of_the_model_itself_is_not_mixing(draw):
    passes(Noisy(draw))


def test_random_models_pass():
    passes(Vae(), loss_fn=lambda m, batch: m(batch[0]).square().mean(-1))
    for keep in (0.05, 0.5, 0.95):
        passes(DropPath(nn.Linear(6, 6), keep), loss_fn=lambda m, batch: m(batch[0]).square().mean(-1))
    sequences = lambda m, batch: m(batch[0]).square().mean((1, 2))  # noqa: E731
    passes(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.3, batch_first=True), SEQUENCES, loss_fn=sequences)
    lstm = Module(lambda m, x: m.a(x)[0], a=nn.LSTM(6, 3, num_layers=2, dropout=0.4, batch_first=True))
    passes(lstm, SEQUENCES, loss_fn=sequences)


def test_integers_stay_within_their_limits():
    for level in (0.02, 0.98):
        with Quiet(level):
            for draw in (torch.randint(2, 5, (4, 3)), torch.randint(low=2, high=5, size=(4, 3))):
                assert draw.min() >= 2
                assert draw.max() <= 4
                assert torch.equal(draw[0], draw[1])
            assert torch.randint(7, (3,)).max() <= 6


def test_rows_chosen_by_chance_are_mixing():
    class Picks(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(6, 4)

        def forward(self, x):
            return self.a(x + x[torch.randint(0, len(x), (len(x),))])

    with pytest.raises(errors.ClipwiseError):
        passes(Picks())


def test_mixing_behind_a_path_that_is_sometimes_dropped_is_seen():
    class Mean(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    for keep in (0.05, 0.5, 0.95):
        with pytest.raises(errors.CrossExampleOp):
            passes(
                nn.Sequential(nn.Linear(6, 6), DropPath(Mean(), keep)),
                loss_fn=lambda m, batch: m(batch[0]).square().mean(-1),
            )
