"""Rows 1 to 8 of the fault list: one example's influence is at most S, in every arithmetic."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import nullcontext
from dataclasses import replace

import brute
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from kernels import interpret, needs_triton
from small_runs import RULES, X, Y, losses, network, run, summed, weights
from torch import nn
from ways import WAYS, by

import clipwise as cw
from clipwise.clipping import clip, engine_gradients, trainable
from clipwise.engine import contributions, conv, reduce
from clipwise.engine.contributions import Outer, _alike
from clipwise.engine.ops import OP_RULES
from clipwise.engine.patches import PatchGrad
from clipwise.engine.products import cut
from clipwise.engine.reduce import OuterGrad
from clipwise.engine.static import static


@pytest.fixture(params=WAYS, autouse=True, scope="module")
def way(request):
    """Both, where there is native code."""
    with by(request.param):
        yield request.param


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


CANCELLING = [nn.Conv2d(1, 2, 7, bias=False), nn.Conv2d(3, 5, 3), nn.Linear(49, 2), nn.Linear(5, 7)]


@pytest.mark.parametrize("as_compiled", [False, True])
@pytest.mark.parametrize("model", CANCELLING, ids=repr)
def test_02b_where_a_record_lies_does_not_matter_even_if_all_of_it_cancels(model, as_compiled):
    """Its gradient is then rounding alone, and clipped to C: were it another in the next row, nothing would hold."""
    torch.manual_seed(0)
    is_conv, positions, size = isinstance(model, nn.Conv2d), 196, 64
    sides = (model.in_channels, *(n + 13 for n in model.kernel_size)) if is_conv else (positions, model.in_features)
    half = 1e9 * torch.randn(model.weight.shape[0], positions // 2)
    cancels = torch.cat([half, -half], 1)[:, torch.randperm(positions)]
    cancels = cancels.view(-1, 14, 14) if is_conv else cancels.mT

    def total(first):
        """Every second record cancels, the others are zero; or the same with one zero record more in front."""
        factors = torch.zeros(size, *cancels.shape)
        factors[first : first + size - 1 : 2] = cancels
        with static() if as_compiled else nullcontext():
            weighted = lambda m, b: (m(b[0]) * b[1]).flatten(1).sum(1)  # noqa: E731
            found = engine_gradients(model, weighted, (torch.ones(size, *sides), factors), size)
            return clip(found, cw.Abadi(), 1.0, cw.Abadi().groups(list(trainable(model))))[0]

    one, other = total(0), total(1)
    assert max(float((one[name] - other[name]).norm()) for name in one) <= 1e-3


@pytest.mark.parametrize("t", [1, 3, 49, 64])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_02b_no_matrix_stands_alone_or_begins_within_a_line_of_the_cache(size, t, monkeypatch):
    """Not every CPU's library takes another kernel then: here it is seen on all of them."""
    real, seen = torch.bmm, []

    def watched(left, right, out=None):
        made = real(left, right) if out is None else real(left, right, out=out)
        for x in (left, right, made):
            seen.append((len(x), x.stride(0) * x.element_size() % 64, x.data_ptr() % 64))
        return made

    left, right = torch.randn(size, 5, t), torch.randn(size, t, 7)
    within = [torch.randn(size * n + 3)[3:].view(size, *shape) for n, shape in ((5 * t, (5, t)), (7 * t, (t, 7)))]
    monkeypatch.setattr(torch, "bmm", watched)
    for a, b in ((left, right), within):
        assert torch.allclose(_alike(a, b), a @ b, atol=1e-4)
    assert len(seen) == 6
    assert all(count > 1 and not hop and not start for count, hop, start in seen)


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


def cancelling_factor():
    """64 positions × 64: signs that cancel, and magnitudes that lose much or little when they take a weight."""
    signs = torch.ones(1, 1)
    for _ in range(6):
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    bits = torch.tensor([[(k >> j) & 1 for j in range(6)] for k in range(64)])
    bent = 1 - 2 * ((bits[:, 0] * bits[:, 1] + bits[:, 2] * bits[:, 3] + bits[:, 4] * bits[:, 5]) % 2)
    signs = bent[:, None] * signs
    return cut(torch.where(signs * signs.sum(0).sign() > 0, 1.50293, -1.5))


@pytest.mark.parametrize("shape", [(64, 64, 1, 1), (64, 1, 64), (64 * 64,), (8, 8, 64)])
@pytest.mark.parametrize("kernel", [1, 3])
def test_04_convolutions_without_patches(shape, kernel, monkeypatch):
    """TF32, as a GPU takes it; the parameter may be any reshape of the weight."""
    for module in (contributions, conv, reduce):
        monkeypatch.setattr(module, "precision_of", lambda left, right: "tf32")

    class Viewed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(math.prod(shape) * kernel**2).view(*shape[:-1], -1))

        def forward(self, x):
            return F.conv2d(x, self.weight.view(64, 64, kernel, kernel), padding=kernel // 2)

    batch = torch.ones(1, 64, 8, 8), cancelling_factor().T.reshape(1, 64, 8, 8)
    found = engine_gradients(
        Viewed(),
        lambda m, b: (m(b[0]) * b[1]).flatten(1).sum(1),
        batch,
        1,
        paths={"weight": reduce.Path("outer", False)},
    )
    assert isinstance(found.reduced["weight"], PatchGrad)
    norm, weight = float(found.norms([["weight"]])), cut(torch.tensor([[1.33203]]))
    total = found.weighted_sum(weight, torch.ones(1, dtype=torch.bool), [["weight"]])["weight"]
    assert 0.98 * norm <= float(total.double().norm() / weight) <= norm


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


def test_02_biases_and_scales_count_in_the_norm():
    """Their gradients are put side by side; with zeros for input they are all that there is."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    with torch.no_grad():
        model[0].bias.copy_(torch.tensor([1.0, -2.0, 0.5, 3.0]))
    out = cw.clipped_sum(model, lambda m, x: 1e3 * m(x).sum(1), torch.zeros(1, 3), cw.Abadi(), 1.0)
    truth = torch.autograd.grad(1e3 * model(torch.zeros(1, 3)).sum(), list(model.parameters()))
    assert float(out.norms[0]) >= float(torch.cat([g.flatten() for g in truth]).norm()) * (1 - 1e-6)
    assert float(torch.cat([g.flatten() for g in out.grads.values()]).double().norm()) <= out.sensitivity


def test_02_copies_of_one_record_at_the_clip_norm():
    """Nothing may jump with a norm: its last digits depend on who else is in the batch."""
    for rule in RULES:
        model = nn.Linear(6, 1, bias=False)
        record = F.normalize(X[:1], dim=1)
        copies = (record.expand(31, -1), Y[:31])
        data = moved(copy.deepcopy(model), lambda m, b: m(b[0])[:, 0], copies, (record, Y[:1]), rule)
        assert data <= 1


@needs_triton
def test_04_bounds_of_convolutions_in_the_gpu_kernel():
    """Of many positions: pairs of tiles, of which each but those with itself stands for two."""
    interpret("conv", "-k", "bounds")


@needs_triton
def test_05_weights_of_one_layer_reach_their_own_records_on_a_gpu():
    """They are a column of all weights, and kernels read them one after the other."""
    interpret("rows", "-k", "weights")
