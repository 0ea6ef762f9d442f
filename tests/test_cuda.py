"""The engine on a GPU: fused kernels, tensor cores, CUDA graphs. Runs where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import clipwise as cw
from clipwise._types import CHAIN, ROUNDINGS
from clipwise.clipping import clip, engine_gradients, trainable
from clipwise.engine.compiled import Compiled
from clipwise.engine.contributions import Outer, Window
from clipwise.engine.gram import gram, gram_bounds
from clipwise.engine.patches import PatchGrad
from clipwise.engine.products import aligned, column_sums, cut, weighted_product
from clipwise.engine.reduce import DenseGrad, OuterGrad, Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(params=["bfloat16", "tf32", "exact"])
def precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if request.param == "tf32" else "highest")
    yield request.param
    torch.set_float32_matmul_precision(before)


def dtype_of(precision):
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


@pytest.mark.parametrize("shape", [(3, 1, 256, 64, 96), (2, 2, 33, 16, 8), (2, 1, 300, 1160, 24), (1, 1, 40, 8, 5000)])
def test_the_fused_gram_kernel(shape, precision):
    if precision == "exact":
        pytest.skip("exact products have no fused kernel")
    b, g, t, p, d = shape
    left, right = (torch.randn(b, g, t, k, device="cuda").to(dtype_of(precision)) for k in (p, d))
    left, right = (cut(x) if precision == "tf32" else x for x in (left, right))
    right[0, :, t // 2 :] = 0
    found = gram(Outer(left, right), torch.float32, precision)
    left, right = left.double(), right.double()
    truth = torch.einsum("bgtp,bgtd->bgpd", left, right).square().sum((1, 2, 3))
    reach = (left.norm(dim=3) * right.norm(dim=3)).sum((1, 2))
    assert ((found.total - truth).abs() <= found.error * reach.square()).all()
    assert ((found.left - left.norm(dim=3)).abs() <= 1e-3 * left.norm(dim=3)).all()
    assert (found.left >= left.norm(dim=3)).all()
    assert (found.right >= right.norm(dim=3)).all()
    assert found.used.tolist() == [g * (t // 2)] + [g * t] * (b - 1)


@pytest.mark.parametrize("shape", [(3, 1, 256, 64, 96), (2, 2, 33, 16, 8), (2, 1, 130, 1160, 24)])
def test_the_bound_in_one_kernel(shape, precision):
    if precision == "exact":
        pytest.skip("exact products have no fused kernel")
    b, g, t, p, d = shape
    left, right = (torch.randn(b, g, t, k, device="cuda").to(dtype_of(precision)) for k in (p, d))
    right[0, :, t // 2 :] = 0
    left[1, 0, 3, 5] = float("nan")
    uses = [Outer(left, right), Outer(left, left), Outer(right, left), Outer(right, right), Outer(left, right)]
    more = torch.rand(5, 3, b, device="cuda", dtype=torch.float64)
    found = gram_bounds(uses, [precision] * 5, more)  # on several streams
    for row, use, added in zip(found, uses, more, strict=True):
        truth = gram(use, torch.float32, precision).bound(tuple(added))
        assert row.isnan().tolist() == [False, use.left is left or use.right is left] + [False] * (b - 2)
        assert torch.allclose(row, truth, rtol=1e-9, equal_nan=True)


def test_rows_that_begin_at_multiples_of_eight_are_not_copied():
    wide = torch.randn(3, 1, 40, 104, device="cuda").bfloat16()
    narrow, other = wide[..., :97], torch.randn(3, 1, 40, 48, device="cuda").bfloat16()
    assert aligned(narrow) is narrow
    assert aligned(narrow[..., 1:]).shape == (3, 1, 40, 96)
    assert aligned(narrow.contiguous()).shape == (3, 1, 40, 104)
    both = [Outer(narrow, other), Outer(aligned(narrow.contiguous()), other)]
    found, copied = gram_bounds(both, ["bfloat16"] * 2, torch.zeros(2, 3, 3, device="cuda", dtype=torch.float64))
    assert torch.allclose(found, copied, rtol=1e-3)  # the error term knows the width


@pytest.mark.parametrize("dropped", [(), (1,), (0, 3)])
@pytest.mark.parametrize("weigh_left", [False, True])
@pytest.mark.parametrize("sides", [(72, 200), (72, 3000), (72, 9000), (9000, 72)])  # beyond 8,192 in parts
def test_products_without_dropped_examples(precision, dropped, weigh_left, sides):
    left, right = (torch.randn(4 * 33, k, device="cuda").to(dtype_of(precision)) for k in sides)
    left, right = (cut(x) if precision == "tf32" else x for x in (left, right))
    keep, weights = torch.ones(4, dtype=torch.bool, device="cuda"), torch.rand(4, device="cuda")
    keep[list(dropped)] = False
    rows = keep.repeat_interleave(33)
    factor, other = (left, right) if weigh_left else (right, left)
    scaled = factor.float() * weights.repeat_interleave(33)[:, None]
    scaled = (cut(scaled) if precision == "tf32" else scaled.to(factor.dtype))[rows].double()
    kept = other[rows].double()
    truth = scaled.mT @ kept if weigh_left else kept.mT @ scaled
    clean = weighted_product(left, right, weights * keep, torch.ones_like(keep), weigh_left, precision)
    factor[~rows], other[~rows] = float("inf"), float("nan")
    before = other.clone()
    found = weighted_product(left, right, weights, keep, weigh_left, precision)
    assert found.dtype == torch.float32
    assert torch.equal(found, clean)  # the very same product
    assert (found.double() - truth).norm() <= 1e-5 * truth.norm()
    assert torch.equal(other.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize(
    ("b", "t", "p", "d"), [(32, 256, 768, 2304), (64, 196, 768, 768), (64, 256, 768, 3072), (256, 1024, 64, 576)]
)
def test_one_more_record_moves_how_others_round_within_the_room_for_it(precision, b, t, p, d):
    """All records alike: their sum is as long as can be. Tensor cores cut off some of it in each addition."""
    torch.manual_seed(0)
    one = [(torch.rand(1, 1, t, k, device="cuda") + 0.5).to(dtype_of(precision)) for k in (p, d)]
    one = [cut(x) if precision == "tf32" else x for x in one]
    grad = OuterGrad(Outer(*(x.repeat(b, 1, 1, 1) for x in one)), (p, d), precision=precision)
    own = one[0][0, 0].double().mT @ one[1][0, 0].double()
    weights, keep = torch.ones(b, device="cuda"), torch.ones(b, dtype=torch.bool, device="cuda")
    whole = grad.weighted_sum(weights, keep).double()
    for i in (0, b // 2, b - 1):
        others = keep.clone()
        others[i] = False
        moved = (whole - grad.weighted_sum(weights, others).double() - own).norm() / own.norm()
        assert moved <= 2**-24 * (ROUNDINGS * b + CHAIN), float(moved) * 2**24
        if precision != "exact" and b == 32:
            assert moved > 2**-24 * ROUNDINGS * b  # the room is needed


@pytest.mark.parametrize(("b", "t"), [(16384, 1), (8192, 2), (1024, 16)])
def test_a_record_that_is_gone_moves_how_others_round_within_the_room_for_it(precision, b, t):
    """Not dropped: its successors move up, to other groups of products that a tensor core adds at once."""
    torch.manual_seed(0)
    both = [(1 + 0.1 * torch.randn(b, 1, t, k, device="cuda")).to(dtype_of(precision)) for k in (64, 96)]
    both = [cut(x) if precision == "tf32" else x for x in both]
    weights, keep = torch.ones(b, device="cuda"), torch.ones(b, dtype=torch.bool, device="cuda")
    whole = OuterGrad(Outer(*both), (64, 96), precision=precision).weighted_sum(weights, keep)
    less = OuterGrad(Outer(*(x[1:] for x in both)), (64, 96), precision=precision).weighted_sum(weights[1:], keep[1:])
    own = both[0][0, 0].double().mT @ both[1][0, 0].double()
    moved = (whole.double() - less.double() - own).norm() / own.norm()
    assert moved <= 2**-24 * (ROUNDINGS * b + CHAIN), float(moved) * 2**24


@pytest.mark.parametrize(("b", "width"), [(7, 9001), (300, 36864), (64, 130)])
def test_gradients_in_rows(b, width):
    x, weights, keep = torch.randn(b, width, device="cuda"), torch.rand(b, device="cuda"), torch.rand(b) < 0.7
    truth = (weights * keep.cuda()).double() @ x.double()
    grad = DenseGrad(x)
    exact = x.double().square().sum(1)
    assert (grad.squared_norms() >= exact).all()
    assert (grad.squared_norms() <= (1 + 2e-5) * exact).all()
    x[~keep] = float("nan")
    assert torch.allclose(grad.weighted_sum(weights, keep.cuda()).double(), truth, atol=1e-4)
    assert grad.squared_norms().isnan().cpu().equal(~keep)


@pytest.mark.parametrize("kind", ["summed", "turned input", "turned output", "pooled"])
def test_factors_that_lie_otherwise_in_memory(precision, kind):
    """Expanded and transposed gradients and inputs, one record of them bad."""
    torch.manual_seed(0)
    model = nn.Linear(24, 80).cuda().to(dtype_of(precision))
    shape = {"turned input": (24, 6), "pooled": (6, 40, 24)}.get(kind, (6, 24))
    x = torch.randn(shape, device="cuda").to(dtype_of(precision))
    x = x.T if kind == "turned input" else x
    x[2] = float("nan")

    def loss(m, batch):
        out = m(batch.to(m.weight.dtype))
        out = out.T.square().sum(0) if kind == "turned output" else out.flatten(1).sum(1)
        return out.double() if m.weight.dtype == torch.float64 else out.float()

    out = cw.clipped_sum(model, loss, x, cw.AutoV(), 1.0)
    truth = cw.clipped_sum(model.double(), loss, x[[0, 1, 3, 4, 5]].double(), cw.AutoV(), 1.0)
    near = 1e-4 if precision == "exact" else 0.1
    for name, value in truth.grads.items():
        assert (out.grads[name].double() - value).norm() <= near * value.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_positions(dtype):
    x = torch.randn(5, 70, 208, device="cuda", dtype=dtype)[..., :200]
    torch.testing.assert_close(column_sums(x), x.float().sum(1), rtol=1e-5, atol=1e-4)
    model, rule = nn.LayerNorm(200).cuda().to(dtype), cw.AutoV()
    data = (x + 3, torch.randn_like(x))
    out = cw.clipped_sum(model, lambda m, b: (m(b[0]) * b[1]).float().sum((1, 2)), data, rule, 1.0)
    data, model = tuple(v.double() for v in data), model.double()
    truth = cw.clipped_sum(model, lambda m, b: (m(b[0]) * b[1]).sum((1, 2)), data, rule, 1.0)
    assert all((out.grads[n].double() - v).norm() <= 1e-5 * v.norm() for n, v in truth.grads.items())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("time_major", [False, True])
def test_sums_leave_dropped_examples_out(precision, groups, time_major):
    left, right = (torch.randn(5, groups, 9, k, device="cuda").to(dtype_of(precision)) for k in (16, 24))
    if time_major:
        left, right = (x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (left, right))
    left, right = (cut(x) if precision == "tf32" else x for x in (left, right))
    keep = torch.tensor([1, 1, 0, 1, 0], device="cuda").bool()
    truth = torch.einsum("bgtp,bgtd->gpd", left[keep].double(), right[keep].double()).reshape(groups * 16, 24)
    left[2], right[4] = float("nan"), float("inf")
    before = left.clone(), right.clone()
    grad = OuterGrad(Outer(left, right), (groups * 16, 24), precision=precision)
    out = grad.weighted_sum(torch.ones(5, device="cuda"), keep)
    assert (out.double() - truth).norm() <= 1e-5 * truth.norm()
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, (left, right), strict=True))


class Words(nn.Module):
    """A tied table, a norm and a two-layer net: 45 positions, widths that are no multiple of eight."""

    def __init__(self, words=57):
        super().__init__()
        self.table, self.norm = nn.Embedding(words, 36), nn.LayerNorm(36)
        self.up, self.down = nn.Linear(36, 100), nn.Linear(100, 36)

    def forward(self, x):
        h = self.table(x)
        return nn.functional.linear(self.norm(h + self.down(self.up(h).relu())), self.table.weight)


def losses(model, batch):
    out = model(batch[0]).float()
    return (
        nn.functional.cross_entropy(out.flatten(0, 1), batch[1].flatten(), reduction="none").view(len(out), -1).sum(1)
    )


def test_clipped_sums_against_float64(precision):
    torch.manual_seed(0)
    model = Words().cuda().to(dtype_of(precision))
    batch = tuple(torch.randint(0, 57, (6, 45), device="cuda") for _ in range(2))
    out = cw.clipped_sum(model, losses, batch, cw.Abadi(), 1.0)
    truth = cw.clipped_sum(model.double(), losses, batch, cw.Abadi(), 1.0)
    near = {"bfloat16": 0.05, "tf32": 0.01, "exact": 1e-3}[precision]
    assert (out.norms / truth.norms - 1).abs().max() < near
    assert (out.norms >= truth.norms * (1 - near)).all()
    for name, value in truth.grads.items():
        assert (out.grads[name].double() - value).norm() <= 2 * near * max(float(value.norm()), 0.1)


@pytest.mark.parametrize("compiled", [False, True])
def test_clipping_per_layer(precision, compiled):
    """Weights of a layer are a column of all weights. A linear layer, a convolution of each form, norms and biases."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(16, 24, 3, padding=1), nn.Conv2d(24, 32, 3, stride=2)
    model = nn.Sequential(first, nn.GroupNorm(4, 24), second, nn.Flatten(2), nn.Linear(9, 7))
    model = model.cuda().to(dtype_of(precision))
    x = torch.randn(6, 16, 8, 8) * torch.logspace(-2, 2, 6).reshape(-1, 1, 1, 1)
    x = x.cuda().to(dtype_of(precision))
    rule = cw.PerLayer(cw.Abadi())
    groups = rule.groups(list(trainable(model)))
    paths = {"2.weight": Path("outer", False), "0.weight": Path("dense", False)}

    def losses(m, batch):
        return m(batch).float().square().flatten(1).sum(1)

    def step(data, mask, scale):
        return clip(engine_gradients(model, losses, data, len(mask), paths=dict(paths)), rule, scale, groups, mask)

    run, mask = Compiled(model, step) if compiled else step, torch.ones(6, dtype=torch.bool)
    sums, _ = run(x, mask, 1.0)
    sums = {name: value.double() for name, value in sums.items()}
    for i in range(6):  # no layer of one record alone gets more than its share
        alone, _ = run(x, torch.arange(6) == i, 1.0)
        for group in groups:
            norm = torch.cat([alone[name].double().flatten() for name in group]).norm()
            assert norm <= (1 + 1e-3) * rule.sensitivity(1.0, len(groups)) / len(groups) ** 0.5
    truth = cw.clipped_sum(model.double(), losses_of_double, x.double(), rule, 1.0)
    for name, value in truth.grads.items():
        assert (sums[name] - value).norm() <= 0.05 * 6 * truth.sensitivity / len(groups) ** 0.5, name


def losses_of_double(m, batch):
    return m(batch).square().flatten(1).sum(1)


@pytest.mark.parametrize("compiled", [False, True])
def test_no_contribution_is_larger_than_the_sensitivity(precision, compiled):
    """Positions that cancel, constant rows whose roundings all go one way, ordinary ones; each alone in its batch."""
    torch.manual_seed(0)
    t, p, d = 64, 48, 72
    for shape in ((p, d), (d, p)):
        model = nn.Linear(*shape, bias=False).cuda().to(dtype_of(precision))
        rule = cw.AutoV()
        groups = rule.groups(["weight"])

        def step(data, mask, scale, model=model, rule=rule, groups=groups):
            found = engine_gradients(model, lambda m, b: (m(b[0]) * b[1]).float().sum((1, 2)), data, len(mask))
            return clip(found, rule, scale, groups, mask)

        run = Compiled(model, step) if compiled else step
        half = torch.randn(1, t // 2, shape[0]) * 1e3
        cases = [
            (torch.cat([half, -half * (1 + 1e-3)], 1), torch.ones(1, t, shape[1])),
            (torch.full((1, t, shape[0]), 1.0039), torch.full((1, t, shape[1]), 0.7129)),
            (torch.randn(1, t, shape[0]), torch.randn(1, t, shape[1])),
        ]
        for x, y in cases:
            data = tuple(v.cuda().to(dtype_of(precision)) for v in (x, y))
            sums, _ = run(data, torch.ones(1, dtype=torch.bool), 1.0)
            assert float(sums["weight"].double().norm()) <= 1 + 1e-6


def test_a_compiled_run_with_bad_records_and_random_batch_sizes(precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 10)).cuda().to(dtype_of(precision))
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.2, steps=6, expected_batch_size=20)
    x, y = torch.randn(100, 12, 40), torch.randint(0, 10, (100,))
    x[::7] = float("nan")
    before = x.clone()
    data = [(a.to(dtype_of(precision)), b) for a, b in zip(x, y, strict=True)]

    def loss(m, batch):
        return nn.functional.cross_entropy(m(batch[0]).mean(1).float(), batch[1], reduction="none")

    training = cw.privatize(model, torch.optim.SGD(model.parameters(), 0.1), plan, loss, compile=True, microbatch=16)
    for batch in training.batches(data, device="cuda"):
        training.step(batch)
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert torch.equal(torch.nan_to_num(before), torch.nan_to_num(x))
    assert training.warm_up > 0


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_a_dropped_record_changes_nothing_of_the_models_or_the_users(precision, compiled, kind):
    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.l, prompt = nn.Linear(64, 64), torch.ones(1, 3, 64, device="cuda", dtype=dtype_of(precision))
            self.register_buffer("prompt", prompt) if kind == "buffer" else setattr(self, "prompt", prompt)

        def forward(self, x):
            return self.l(torch.cat([self.l(self.prompt), x.clone()], 1))

    model, rule = Prompted().cuda().to(dtype_of(precision)), cw.PSAC()
    groups = rule.groups(list(trainable(model)))

    def step(data, mask, scale):
        found = engine_gradients(model, lambda m, b: m(b[0]).float().sum((1, 2)), data, len(mask))
        return clip(found, rule, scale, groups, mask)

    x = torch.full((1, 40, 64), float("nan"), device="cuda", dtype=dtype_of(precision))
    run = Compiled(model, step) if compiled else step
    sums, _ = run((x,), torch.ones(1, dtype=torch.bool, device="cuda"), 1.0)
    assert all((v == 0).all() for v in sums.values())
    assert model.prompt.sum() == 192
    assert torch.isnan(x).all()


@pytest.mark.parametrize("words", [57, 1030])
def test_compiled_sums_are_those_of_the_eager_engine(precision, words):
    torch.manual_seed(0)
    model, rule, paths = Words(words).cuda().to(dtype_of(precision)), cw.PSAC(), {}
    groups = rule.groups(list(trainable(model)))

    def step(data, mask, scale):
        return clip(engine_gradients(model, losses, data, len(mask), paths=paths), rule, scale, groups, mask)

    whole = Compiled(model, step)
    for seed in range(3):
        torch.manual_seed(seed)
        batch = tuple(torch.randint(0, 57, (6, 45), device="cuda") for _ in range(2))
        mask = torch.rand(6) < 0.8
        found, truth = whole(batch, mask, 1.0)[0], step(batch, mask.cuda(), 1.0)[0]
        for name, value in truth.items():
            near = 3e-2 if precision != "exact" else 1e-4
            assert (found[name] - value).norm() <= near * float(value.norm()) + 1e-6


def test_one_position_and_few():
    torch.manual_seed(0)
    for t in (1, 5, 16):
        grad = OuterGrad(
            Outer(*(torch.randn(4, 1, t, k, device="cuda").bfloat16() for k in (24, 40))),
            (24, 40),
            single=t == 1,
            precision="bfloat16",
        )
        left, right = grad.uses.left.double(), grad.uses.right.double()
        truth = torch.einsum("bgtp,bgtd->bpd", left, right).flatten(1).norm(dim=1)
        bound = grad.squared_norms().sqrt()
        assert (bound >= truth).all()
        assert (bound <= 1.05 * truth).all()


def test_a_part_of_a_tensor_gets_the_noise_of_the_whole():
    """Sharded parameters: noise is addressed by element, and agrees with the reference in float64."""
    from clipwise import chacha
    from clipwise.chacha_cuda import add_gaussians_

    keys = [bytes(range(32)), bytes(range(1, 33))]
    for offsets in ([0, 0], [1, 2047], [3000, 4096], [2048, 6143]):
        parts = [torch.zeros(5000, device="cuda"), torch.ones(701, device="cuda")]
        add_gaussians_(parts, keys, 2.0, offsets)
        for start, part, key, begun in zip(offsets, parts, keys, (0, 1), strict=True):
            expected = begun + 2 * chacha.gaussians(key, start, len(part)).float()
            assert torch.allclose(part.cpu(), expected, atol=1e-5)


def test_a_bad_record_does_not_move_what_the_others_contribute(precision):
    """It makes another kernel run, which must multiply the same numbers: weights, too, are cut beforehand."""
    torch.manual_seed(0)
    left, right = (torch.randn(5, 1, 200, k, device="cuda").to(dtype_of(precision)) for k in (64, 72))
    left, right = (cut(x) if precision == "tf32" else x for x in (left, right))
    weights, keep = torch.rand(5, device="cuda"), torch.tensor([1, 1, 1, 0, 1], device="cuda").bool()
    grads = [Outer(left[keep], right[keep]), Outer(left, right)]
    right[3] = float("nan")
    alone, beside = (OuterGrad(uses, (64, 72), precision=precision) for uses in grads)
    without = alone.weighted_sum(weights[keep], keep[keep]).double()
    assert (beside.weighted_sum(weights, keep).double() - without).norm() <= 2e-6 * without.norm()


WINDOWS = {  # images, height, width, channels, outputs, then the convolution
    "3×3": ((5, 8, 8, 16, 24), {"kernel_size": 3, "padding": 1}),
    "strides": ((4, 9, 7, 20, 70), {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0), "dilation": (1, 2)}),
    "1×1": ((3, 8, 8, 32, 130), {"kernel_size": 1, "stride": 2}),
    "same": ((6, 6, 6, 256, 16), {"kernel_size": 5, "padding": "same"}),
}


@pytest.mark.parametrize("form", ["dense", "outer"])
@pytest.mark.parametrize("name", WINDOWS)
def test_convolutions_whose_patches_are_never_made(name, form, precision):
    """Gradients, norms and sums against a loop over single examples in float64; a NaN record takes part in nothing."""
    if precision == "exact":
        pytest.skip("exact products unfold")
    (n, h, w, c, p), options = WINDOWS[name]
    model = nn.Conv2d(c, p, bias=False, device="cuda", **options).to(dtype_of(precision))
    x = torch.randn(n, c, h, w, device="cuda").to(dtype_of(precision))
    x, model.weight.data = (cut(x), cut(model.weight.data)) if precision == "tf32" else (x, model.weight.data)
    x[1, 0, 0, 0] = float("nan")

    def losses(m, batch):
        return m(batch).float().square().flatten(1).sum(1)

    paths = {"weight": Path(form, False)}
    found = engine_gradients(model, losses, x, n, paths=paths)
    assert isinstance(found.reduced["weight"], PatchGrad if form == "outer" else DenseGrad)
    norms = found.norms([["weight"]])[:, 0]
    truth = []
    for i in range(n):
        out = model(x[i : i + 1])
        grad = 2 * out.double()
        if precision == "tf32":
            grad = cut((2 * out).float()).double()
        wide = nn.functional.conv2d  # the same op in float64
        weight = model.weight.double().detach().requires_grad_()
        args = {k: v for k, v in options.items() if k != "kernel_size"}
        truth.append(
            torch.autograd.grad((wide(x[i : i + 1].double(), weight, **args) * grad.detach()).sum(), weight)[0]
        )
    truth = torch.stack(truth)
    exact = truth.flatten(1).norm(dim=1)
    assert norms.isnan().tolist() == [i == 1 for i in range(n)]
    kept = ~norms.isnan()
    assert (norms[kept] <= 1.02 * exact[kept]).all()
    assert (norms[kept] >= 0.998 * exact[kept]).all()  # of the gradient as the engine's own products round it
    weights = torch.rand(n, 1, device="cuda")
    total = found.weighted_sum(weights, kept, [["weight"]])["weight"]
    expected = (truth[kept] * weights[kept, :, None, None, None]).sum(0)
    assert (total - expected).norm() <= 6e-3 * expected.norm()


def test_one_more_record_moves_a_convolutions_sum_within_the_room_for_it():
    """As above, by strips.py."""
    torch.manual_seed(0)
    for b, c, p, side in ((256, 128, 128, 16), (256, 64, 64, 32), (300, 256, 256, 8)):
        window = Window((3, 3), (1, 1), (1, 1), (1, 1), (side, side))
        x, grads = torch.rand(1, side, side, c, device="cuda") + 0.5, torch.rand(1, side * side, p, device="cuda") + 0.5
        both = (cut(grads).repeat(b, 1, 1), cut(x).repeat(b, 1, 1, 1))
        own = torch.ops.clipwise.strip_gradients(both[0][:1], both[1][:1], True, 128, *window)[0][0].double()
        weights, keep = torch.ones(b, device="cuda"), torch.ones(b, dtype=torch.bool, device="cuda")
        whole = torch.ops.clipwise.strip_sum(*both, weights, keep, *window).double()
        keep[b // 3] = False
        others = torch.ops.clipwise.strip_sum(*both, weights, keep, *window).double()
        moved = (whole - others - own).norm() / own.norm()
        assert moved <= 2**-24 * (ROUNDINGS * b + CHAIN), float(moved) * 2**24


def test_copies_of_an_example_are_one_example_in_a_convolution(precision):
    if precision == "exact":
        pytest.skip("exact products unfold")
    model = nn.Conv2d(16, 24, 3, padding=1, bias=False, device="cuda").to(dtype_of(precision))
    x = torch.randn(4, 2, 16, 8, 8, device="cuda").to(dtype_of(precision))

    def losses(m, batch):
        return m(batch.flatten(0, 1)).float().square().flatten(1).sum(1).view(-1, 2).mean(1)

    norms = engine_gradients(model, losses, x, 4).norms([["weight"]])[:, 0]
    for i in range(4):
        alone = torch.autograd.grad(losses(model, x[i : i + 1]).sum(), model.weight)[0]
        assert torch.allclose(norms[i], alone.double().norm(), rtol=1e-2)
