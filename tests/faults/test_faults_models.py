"""Rows 9 to 13 of the fault list: what models and collate functions may do, and what is refused."""

from __future__ import annotations

import brute
import pytest
import torch
import torch.nn.functional as F
from small_runs import X, Y, losses, network, plan, run, summed, weights
from torch import nn

import clipwise as cw
from clipwise import errors


def test_09_in_place_ops_and_keywords():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            h = self.a(input=x)
            h += x
            h = F.relu(h, inplace=True)
            return self.b(input=h)

    torch.manual_seed(0)
    brute.assert_matches(InPlace(), losses, (X, Y), cw.PSAC())


@pytest.mark.parametrize("reentrant", [True, False])
def test_09_activation_checkpointing_is_exact(reentrant):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)

        def forward(self, x):
            start = x.clone().requires_grad_()
            return self.b(checkpoint(lambda y: self.a(y).tanh(), start, use_reentrant=reentrant))

    class Plain(Checkpointed):
        def forward(self, x):
            return self.b(self.a(x).tanh())

    model, plain = Checkpointed(), Plain()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(summed(model, (X, Y)), summed(plain, (X, Y)))
    brute.assert_matches(plain, losses, (X, Y), cw.PSAC())


def test_09_checkpointing_inside_a_transformers_model():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=30, n_embd=8, n_head=2, n_layer=2, n_positions=12)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    for dropout in (m for m in model.modules() if isinstance(m, nn.Dropout)):
        dropout.p = 0.0
    ids = torch.randint(0, 30, (3, 7))

    def loss(m, batch):
        return m(batch).logits.logsumexp(2).mean(1)

    plain = cw.clipped_sum(model, loss, ids)
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        run(model, loss).batches(ids)  # the preflight agrees
        again = cw.clipped_sum(model, loss, ids)
        torch.testing.assert_close(again.norms, plain.norms)
        assert brute.distance(dict(again.grads), dict(plain.grads)) <= 1e-6


def test_09_checkpointing_after_attention():
    """A fused op is written out under the tape itself: what follows must still be seen."""
    from torch.utils.checkpoint import checkpoint

    class After(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.attention, self.layer = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(6, 3)
            self.reentrant = reentrant

        def forward(self, x):
            h = self.attention(x[:, None], x[:, None], x[:, None], need_weights=False)[0][:, 0]
            if self.reentrant is None:
                return self.layer(h)
            return checkpoint(self.layer, h, use_reentrant=self.reentrant)

    found = []
    for reentrant in (None, True, False):
        torch.manual_seed(0)
        found.append(summed(After(reentrant), (X, Y)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_10_frozen_unused_and_late_parameters():
    model = network()
    model[0].bias.requires_grad_(False)
    out = cw.clipped_sum(model, losses, (X, Y))
    assert "0.bias" not in out.grads
    training = run(model)
    batch = next(iter(training.batches((X, Y))))
    model[0].bias.requires_grad_(True)
    before = weights(training)
    with pytest.raises(errors.ParameterMismatch, match=r"changed since privatize\(\): 0.bias"):
        training.step(batch)
    assert torch.equal(before, weights(training))
    assert training.ledger.charges == 0


def test_10_a_parameter_the_tape_never_saw():
    class Hidden(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.w = nn.Linear(6, 3), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.a(x) + Secretly.apply(self.w)

    class Secretly(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    with pytest.raises(errors.ClipwiseError):
        cw.clipped_sum(Hidden(), losses, (X, Y))


def test_10_foreign_parameters_and_waiting_gradients():
    model, foreign = network(), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([*model.parameters(), foreign], lr=0.1)
    with pytest.raises(errors.ParameterMismatch, match="not of the model"):
        cw.privatize(model, optimizer, plan(), losses)
    training = run()
    batch = next(iter(training.batches((X, Y))))
    losses(training.model, (X, Y)).mean().backward()
    with pytest.raises(errors.ParameterMismatch, match=r"already hold a \.grad"):
        training.step(batch)
    with pytest.raises(errors.WrongOrder, match="neither clipped nor noised"):
        training.optimizer.step()


class Routed(nn.Module):
    """Half of the examples, chosen by rank in the batch, go through an expert."""

    def __init__(self):
        super().__init__()
        self.gate, self.expert = nn.Linear(6, 1), nn.Linear(6, 3)

    def forward(self, x):
        score = self.gate(x)[:, 0]
        return self.expert(x) * (score > score.median()).float()[:, None] + score[:, None]


def contrastive(model, batch):
    z = F.normalize(model(batch[0]), dim=1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none")


@pytest.mark.parametrize("case", ["batch norm", "routing", "contrastive", "time-major"])
def test_11_mixing_in_the_model_is_refused_by_name(case):
    torch.manual_seed(0)
    model, loss = {
        "batch norm": (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), losses),
        "routing": (Routed(), losses),
        "contrastive": (network(), contrastive),
        "time-major": (nn.TransformerEncoderLayer(6, 2, 12), lambda m, b: m(b[0][:, None]).sum((1, 2))),
    }[case]
    with pytest.raises(errors.ClipwiseError) as caught:
        next(iter(run(model, loss).batches((X, Y))))
    if case == "batch norm":
        assert "'1'" in str(caught.value)


class Words:
    """Sentences of different lengths."""

    def __init__(self, longest=9):
        self.items = [torch.arange(1, 2 + i % longest) for i in range(30)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def padded(records):
    return nn.utils.rnn.pad_sequence(records, batch_first=True)


def mixup(records):
    x = torch.stack([r[0] for r in records])
    return 0.7 * x + 0.3 * x.roll(1, 0), torch.stack([r[1] for r in records])


@pytest.mark.parametrize("engine", ["bookkeeping", "vmap"])
def test_11_pooling_that_reaches_the_next_image_is_refused(engine):
    model = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.MaxPool2d((1, 2), 1, (0, 1), (1, 3)), nn.Sigmoid())
    images = torch.tensor([[[[1.0, 2.0]]], [[[3.0, 4.0]]]])
    with pytest.raises(errors.UnsupportedOp, match="max_pool2d with dilation 3 and padding 1"):
        cw.clipped_sum(model, lambda m, x: m(x).flatten(1).sum(1), images, engine=engine)


def test_11_mixing_in_the_collate_function_is_refused():
    model = nn.Embedding(20, 4)
    training = run(model, lambda m, b: m(b).mean(1).square().sum(1))
    with pytest.raises(errors.ClipwiseError, match="collate"):
        training.batches(Words(), collate_fn=padded)
    with pytest.raises(errors.ClipwiseError, match="collate"):
        run().batches(torch.utils.data.TensorDataset(X, Y), collate_fn=mixup)


class Cut(nn.Module):
    """Cuts off padding, for all records at once, and takes the state after it."""

    def __init__(self, measure):
        super().__init__()
        self.measure, self.table = measure, nn.Embedding(9, 4)
        self.net, self.head = nn.GRU(4, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        seen = x.bool()  # no comparison from which the preflight could learn that 0 is padding
        last = (seen * torch.arange(1, x.shape[1] + 1)).amax(1)
        places = int((seen.sum(1) if self.measure == "count" else last).max())
        return self.head(self.net(self.table(x[:, : max(places, 1)]))[0][:, -1])


@pytest.mark.parametrize("length", [5, 7, 12, 16, 22, 64])
@pytest.mark.parametrize("measure", ["count", "last"])
def test_11_cutting_off_padding_for_all_at_once_is_refused(length, measure):
    """However regular made-up records are: the state depends on the longest record."""
    torch.manual_seed(0)
    training = run(Cut(measure), lambda m, b: m(b[0]).square().sum(1))  # no label that is ignored: nothing to look for
    with pytest.raises(errors.CrossExampleOp):
        training.batches((torch.zeros(len(Y), length, dtype=torch.int64), Y))


def test_12_buffers_that_average_data_are_refused():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x):
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return self.layer(x)

    with pytest.raises(errors.ClipwiseError, match="mean"):
        run(Centred()).batches((X, Y))


def test_12b_a_recorded_input_changed_later_and_no_grad_branches():
    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x):
            x = x * 1.0
            y = self.layer(x)
            x += 1
            return (y + x)[:, :3]

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            with torch.no_grad():
                gate = self.b(x).sigmoid()
            return self.a(x) * gate

    with pytest.raises(errors.ChangedInput):
        cw.clipped_sum(Changed(), losses, (X, Y))
    branch = Branch()
    with pytest.raises(errors.UnrecordedGradient, match=r"b.bias, b.weight are used under torch.no_grad\(\) alone"):
        cw.clipped_sum(branch, losses, (X, Y))
    branch.b.requires_grad_(False)
    brute.assert_matches(branch, losses, (X, Y), cw.PSAC())


def test_12b_the_preflight_never_looks_at_private_records():
    seen = []

    def spy(model, batch):
        seen.append(batch[0].detach().clone())
        return losses(model, batch)

    run(loss_fn=spy).batches((X, Y))
    rows = {tuple(row.tolist()) for row in X}
    assert seen
    assert not any(tuple(row.tolist()) in rows for batch in seen for row in batch)


def test_13_dropout_is_drawn_per_example_and_views_are_averaged_before_clipping():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 400, bias=False), nn.Dropout(0.5), nn.Linear(400, 1, bias=False))
    norms = cw.clipped_sum(model, lambda m, b: m(b[0])[:, 0], (X[:1].expand(8, -1),)).norms
    assert len(set(norms.tolist())) == 8  # equal records, different masks

    def over_views(m, batch):  # [b, views, 6]
        flat = F.cross_entropy(m(batch[0].flatten(0, 1)), batch[1].repeat_interleave(4), reduction="none")
        return flat.unflatten(0, (-1, 4)).mean(1)

    views = X[:12].unflatten(0, (3, 4))
    out = brute.assert_matches(network(), over_views, (views, Y[:3]), cw.Abadi(), 0.05)
    assert len(out.norms) == 3  # one bound for all views of an example
