"""Rows 1 to 19 of the fault list: one example's influence is at most S."""

from __future__ import annotations

import copy
import math
import warnings
from dataclasses import replace

import brute
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from small_runs import RULES, X, Y, losses, network, plan, run, summed, weights
from torch import nn

import clipwise as cw
from clipwise import errors
from clipwise.engine.contributions import Outer
from clipwise.engine.ops import OP_RULES
from clipwise.engine.reduce import OuterGrad


def moved(model, loss_fn, data, extra, rule, clip_norm=1.0):
    """‖sum with one more record − without‖ / S, in float64."""
    together = tuple(torch.cat([a, b]) for a, b in zip(data, extra, strict=True))
    without, into = (cw.clipped_sum(model, loss_fn, d, rule, clip_norm) for d in (data, together))
    return brute.distance(dict(into.grads), dict(without.grads)) / into.sensitivity


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_01_a_bad_record_contributes_exactly_zero_and_nothing_tells(bad, rule, capfd):
    model, spoilt = network(), X.clone()
    spoilt[7, 2] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = summed(model, (spoilt, Y), rule=rule)
    kept = [i for i in range(48) if i != 7]
    torch.testing.assert_close(found, summed(model, (X[kept], Y[kept]), rule=rule), rtol=1e-5, atol=1e-6)
    # the same with a padded row in its place, bit by bit: another bad value changes nothing at all
    other = X.clone()
    other[7] = math.nan
    assert torch.equal(found, summed(model, (other, Y), rule=rule))
    training = run(model, rule=rule, sampling="asserted")
    training.step((spoilt, Y))
    assert training.ledger.charges == 1
    assert torch.isfinite(weights(training)).all()
    assert capfd.readouterr() == ("", "")


def test_01_bad_activations_and_gradients_too():
    def log_loss(model, batch):
        return model(batch[0]).sum(1).clamp(min=0).sqrt()  # the gradient is infinite at 0, NaN below

    model = nn.Linear(6, 2, bias=False)
    with torch.no_grad():
        model.weight.abs_()
    data = X.abs().clone()
    data[3] = 0
    kept = [i for i in range(48) if i != 3]
    found = summed(model, (data, Y), log_loss)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found, summed(model, (data[kept], Y[kept]), log_loss), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1e19, 1e25, 1e30, 3e38])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_02_squares_that_overflow(scale, rule):
    record = (torch.full((1, 6), scale).clamp(max=3.4e38), Y[:1])
    assert moved(network(), losses, (X, Y), record, rule) <= 1
    linear = nn.Linear(6, 1, bias=False)  # here the gradient is the record itself
    with torch.no_grad():
        linear.weight.mul_(1e-3)
    assert moved(linear, lambda m, b: m(b[0])[:, 0], (X, Y), record, rule) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [16, 512], ids=["materialised", "Gram"])
def test_02b_cancelling_positions(dtype, width):
    """T = 64, inputs of norm 1e4 and a sum of norm 10: a Gram norm may come out as 0, and AutoS would let 1000·C by."""
    torch.manual_seed(0)
    model = nn.Linear(width, width, bias=False).to(dtype)
    half = torch.randn(8, 32, width) * 1e4 / math.sqrt(width)
    cancelling = torch.cat([half, -half + torch.randn(8, 32, width) / math.sqrt(width)], dim=1).to(dtype)
    others = torch.randn(5, 64, width).to(dtype)

    def loss(m, batch):
        return m(batch[0]).float().sum((1, 2))

    for rule in (cw.AutoS(), cw.AutoV(), cw.Abadi(), cw.PSAC()):
        for record in cancelling:
            assert moved(model, loss, (others,), (record[None],), rule, 0.1) <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dimension", [100, 10_000, 100_000])
def test_03_half_precision_contributions_stay_within_s(dtype, dimension):
    torch.manual_seed(0)
    model = nn.Linear(dimension, 1, bias=False).to(dtype)
    x = torch.randn(3, dimension).to(dtype)

    def loss(m, batch):
        return m(batch[0])[:, 0].float() * 4

    for rule in (cw.Abadi(), cw.AutoV(), cw.PSAC()):
        out = cw.clipped_sum(model, loss, (x[:1],), rule)
        assert out.grads["weight"].dtype == torch.float32
        assert float(out.grads["weight"].double().norm()) <= out.sensitivity
        assert moved(model, loss, (x[1:],), (x[:1],), rule) <= 1


def test_04_fp16_squares_do_not_underflow():
    model = nn.Linear(1000, 1, bias=False).half()
    x = torch.full((1, 1000), 3e-5).half()
    norm = float(cw.clipped_sum(model, lambda m, b: m(b[0])[:, 0].float(), (x,)).norms)
    assert norm == pytest.approx(float(x.double().norm()), rel=1e-3)


def test_04_the_factor_that_takes_the_weights_may_be_rounded():
    """bfloat16 products, as tensor cores take them: here every entry of the weighted factor is rounded up."""
    left, right = torch.full((1, 1, 16, 8), 1.0).bfloat16(), torch.full((1, 1, 16, 8), 1.0).bfloat16()
    grad = OuterGrad(Outer(left, right), (8, 8), precision="bfloat16")
    norm = float(grad.squared_norms().sqrt())
    for eighths in range(1, 300):
        weight = (1 + eighths / 300) / norm
        total = grad.weighted_sum(torch.tensor([weight]), torch.ones(1, dtype=torch.bool))
        assert float(total.double().norm()) <= weight * norm


def test_04_what_the_user_allows_the_model_on_a_cpu_does_not_reach_the_engine():
    """`set_float32_matmul_precision("medium")` makes float32 products bfloat16 ones on some CPUs."""
    seen = []

    class Looks(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x):
            return F.linear(x, self.weight)

    def uses(call, grad):
        seen.append(torch.backends.mkldnn.matmul.fp32_precision)
        yield from OP_RULES[F.linear].uses(call, grad)

    rule = replace(OP_RULES[F.linear], uses=uses)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        told = torch.backends.mkldnn.matmul.fp32_precision
        cw.clipped_sum(Looks(), lambda m, x: m(x).square().sum(1), torch.randn(2, 3), op_rules={F.linear: rule})
        assert seen == ["ieee"]
        assert torch.backends.mkldnn.matmul.fp32_precision == told != "ieee"
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("rule", RULES[:-1], ids=repr)
@given(n=st.one_of(st.sampled_from([0.0, 5e-324, 1e-45, 1e-38, 3.4e38, 1.7e308]), st.floats(0, 1.7e308)))
def test_05_every_rule_at_every_norm(rule, n):
    for dtype in (torch.float32, torch.float64):
        norms = torch.tensor([n], dtype=dtype)
        weight = rule.weights(norms, 1.0)
        assert torch.isfinite(weight).all()
        if torch.isfinite(norms).all():
            assert float(norms.double() * weight.double()) <= rule.sensitivity(1.0)


@pytest.mark.parametrize(("words", "width"), [(11, 8), (400, 64)], ids=["materialised", "Gram"])
def test_06_tied_weights_are_one_gradient(words, width):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(words, width)
            self.head = nn.Linear(width, words, bias=False)
            self.head.weight = self.table.weight

        def forward(self, ids):
            return self.head(self.table(ids).cumsum(1))

    torch.manual_seed(0)
    model = Tied()
    ids = torch.randint(0, words, (6, 9))
    brute.assert_matches(model, lambda m, b: m(b).logsumexp(2).sum(1), ids, cw.Abadi(), 0.1)
    out = cw.clipped_sum(model, lambda m, b: 100 * m(b).logsumexp(2).sum(1), ids[:1], cw.Abadi(), 0.1)
    assert brute.norm(dict(out.grads)) <= out.sensitivity


def test_07_a_layer_used_several_times_and_a_recurrent_cell():
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.cell = nn.Linear(6, 6), nn.GRUCell(6, 6)

        def forward(self, x):
            h = self.layer(self.layer(x).tanh())
            for _ in range(3):
                h = self.cell(x, h)
            return self.layer(h)

    torch.manual_seed(0)
    brute.assert_matches(Loop(), lambda m, b: m(b[0]).square().sum(1) * 9, (X[:5],), cw.Abadi(), 0.1)


CASES = {
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 7, 7)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4), (4, 7, 7)),
    "dilated": (lambda: nn.Conv2d(4, 6, 3, dilation=2), (4, 7, 7)),
    "strided": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), (4, 7, 7)),
    "same": (lambda: nn.Conv1d(4, 6, 3, padding="same"), (4, 9)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), (4, 5, 5)),
    "three axes": (lambda: nn.Conv3d(2, 3, 2), (2, 4, 4, 4)),
    "linear, 3-D": (lambda: nn.Linear(5, 4), (7, 5)),
    "linear, 4-D": (lambda: nn.Linear(5, 4), (3, 7, 5)),
}


@pytest.mark.parametrize("name", CASES)
def test_08_convolutions_and_deep_inputs(name):
    torch.manual_seed(0)
    make, shape = CASES[name]
    model, x = make(), torch.randn(5, *shape)
    brute.assert_matches(model, lambda m, b: m(b[0]).square().flatten(1).sum(1), (x,), cw.Abadi(), 0.1)


def test_08_padding_tokens():
    model = nn.Embedding(9, 4, padding_idx=0)
    ids = torch.tensor([[1, 2, 0, 0], [3, 3, 3, 0], [0, 0, 0, 0]])
    out = brute.assert_matches(model, lambda m, b: (m(b) + 1).square().sum((1, 2)), ids, cw.PSAC())
    assert (out.grads["weight"][0] == 0).all()


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


def test_11_mixing_in_the_collate_function_is_refused():
    model = nn.Embedding(20, 4)
    training = run(model, lambda m, b: m(b).mean(1).square().sum(1))
    with pytest.raises(errors.ClipwiseError, match="collate"):
        training.batches(Words(), collate_fn=padded)
    with pytest.raises(errors.ClipwiseError, match="collate"):
        run().batches(torch.utils.data.TensorDataset(X, Y), collate_fn=mixup)


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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_14_a_reduced_loss_is_refused(reduction):
    def reduced(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction)

    with pytest.raises(errors.LossShape, match="per example"):
        cw.clipped_sum(network(), reduced, (X, Y))
    with pytest.raises(errors.LossShape, match="per example"):
        run(loss_fn=reduced).batches((X, Y))

    def expanded(model, batch):
        return reduced(model, batch).expand(len(batch[0]))

    with pytest.raises(errors.ClipwiseError):
        run(loss_fn=expanded).batches((X, Y))


def test_15_nothing_public_depends_on_the_number_of_records():
    seen = []
    for size in (47, 48):
        training = run(seed=1)
        for batch in training.batches((X[:size], Y[:size])):
            training.step(batch)
        seen.append((training.sensitivity, training.plan.as_dict(), training.epsilon, training.ledger.charges))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("microbatch", [1, 5, 16, 48, 64])
def test_16_any_split_gives_the_same_sum_one_draw_and_one_charge(microbatch):
    results = []
    for rows in (None, microbatch):
        training = run(microbatch=rows, sampling="asserted", seed=3)
        training.step((X, Y))
        results.append(weights(training))
        assert training.ledger.charges == 1
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)  # the seed gives both the same noise, drawn once


def test_17_order_of_calls():
    training = run()
    batch = next(iter(training.batches((X, Y))))
    with pytest.raises(errors.WrongOrder):
        training.release()
    (part,) = training.microbatches(batch)
    with training.record(part) as data:
        values = losses(training.model, data)
    training.backward(values)
    with pytest.raises(errors.WrongOrder):
        training.backward(values)
    training.release()
    with pytest.raises(errors.WrongOrder):
        training.release()
    with pytest.raises(errors.WrongBatch):
        training.step(batch)
    assert training.ledger.charges == 1


def test_17_backward_in_the_loss_is_refused():
    def sneaky(model, batch):
        values = losses(model, batch)
        values.sum().backward(retain_graph=True)
        return values

    with pytest.raises(errors.ClipwiseError):
        cw.clipped_sum(network(), sneaky, (X, Y))


def test_18_replace_one():
    add, replace = plan(), plan(adjacency="replace_one")
    assert replace.epsilon > add.epsilon
    assert run().sensitivity == run(adjacency="replace_one").sensitivity
    whole = {"sampling_prob": 1.0, "steps": 1, "delta": 1e-5}
    doubled = cw.epsilon(noise_multiplier=1.0, **whole)
    assert cw.epsilon(noise_multiplier=2.0, adjacency="replace_one", **whole) == pytest.approx(doubled, rel=1e-3)


def test_19_every_statement_says_what_the_unit_is():
    training = run()
    assert "one example" in training.statement()["unit"]
    assert "several examples" in " ".join(training.statement()["not_certified"])
    assert "a person with several examples is not covered" in str(training.plan)


def test_02_copies_of_one_record_at_the_clip_norm():
    """Nothing may jump with a norm: its last digits depend on who else is in the batch."""
    for rule in RULES:
        model = nn.Linear(6, 1, bias=False)
        record = F.normalize(X[:1], dim=1)
        copies = (record.expand(31, -1), Y[:31])
        data = moved(copy.deepcopy(model), lambda m, b: m(b[0])[:, 0], copies, (record, Y[:1]), rule)
        assert data <= 1
