"""One more record moves the clipped sum by at most `sensitivity`, measured in float64."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from brute import distance, gradients, norm
from hypothesis import given
from hypothesis import strategies as st
from test_ops import Module
from torch import nn
from ways import WAYS, by

import clipwise as cw
from clipwise.clipping import engine_gradients
from clipwise.engine import reduce
from clipwise.engine.contributions import Outer, materialise
from clipwise.engine.products import cut
from clipwise.engine.reduce import OuterGrad, reduce_uses, squares

RULES = [cw.PSAC(), cw.AutoS(), cw.AutoV(), cw.Abadi(), cw.Reparam(), cw.Global(), cw.PerLayer(cw.AutoS())]
T, D = 64, 6


@pytest.fixture(params=WAYS, autouse=True, scope="module")
def way(request):
    """Both, where there is native code."""
    with by(request.param):
        yield request.param


def cancelling(generator, scale=1e4):
    """64 positions of norm `scale` whose sum is small: with equal output gradients the Gram form cancels."""
    half = torch.randn(T // 2, D, generator=generator) * scale / math.sqrt(D)
    rest = -half + torch.randn(T // 2, D, generator=generator) * 1e-3
    return torch.cat([half, rest])


def records(generator):
    ordinary = torch.randn(T, D, generator=generator)
    return {
        "ordinary": ordinary,
        "zero": torch.zeros(T, D),
        "tiny": ordinary * 1e-22,
        "denormal": ordinary * 1e-40,
        "large": ordinary * 1e6,
        "squares overflow": ordinary * 1e20,
        "huge": ordinary.sign() * 3e38,
        "cancelling": cancelling(generator),
        "cancelling more": cancelling(generator, 1e7),
        "nan": ordinary.index_fill(0, torch.tensor([3]), math.nan),
        "inf": ordinary.index_fill(0, torch.tensor([3]), math.inf),
    }


RECORDS = records(torch.Generator().manual_seed(0))


def models():
    torch.manual_seed(0)
    return {
        "linear, Gram": Module(lambda m, x: m.a(x).sum(1), a=nn.Linear(D, 4000, bias=False)),
        "linear, materialised": Module(lambda m, x: m.a(x).sum(1), a=nn.Linear(D, 8)),
        "conv": Module(lambda m, x: m.c(x.mT).sum(2), c=nn.Conv1d(D, 8, 3)),
        "two layers": Module(lambda m, x: m.b(m.a(x).mean(1)), a=nn.Linear(D, 8), b=nn.Linear(8, 4)),
    }


def losses(model, batch):
    return model(batch[0]).flatten(1).sum(1)


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_one_more_record_stays_within_sensitivity(name, rule):
    model = models()[name]
    others = torch.randn(7, T, D, generator=torch.Generator().manual_seed(1))
    without = cw.clipped_sum(model, losses, (others,), rule, 0.5)
    for kind, record in RECORDS.items():
        for place in (0, 7):
            batch = torch.cat([others[:place], record[None], others[place:]])
            out = cw.clipped_sum(model, losses, (batch,), rule, 0.5)
            assert all(torch.isfinite(g).all() for g in out.grads.values()), kind
            moved = distance(dict(out.grads), dict(without.grads))
            assert moved <= out.sensitivity, f"{kind}: {moved / out.sensitivity}"


@pytest.mark.parametrize("kind", ["nan", "inf", "huge", "squares overflow"])
@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_non_finite_record_contributes_exactly_zero(rule, kind):
    model = models()["two layers"]
    others = torch.randn(5, T, D, generator=torch.Generator().manual_seed(1))
    bad = torch.full((T, D), math.nan) if kind == "nan" else RECORDS[kind]
    batch = torch.cat([others[:2], bad[None], others[2:]])
    padded = torch.cat([others[:2], torch.zeros(1, T, D), others[2:]])
    out = cw.clipped_sum(model, losses, (batch,), rule, 0.5)
    from clipwise.clipping import clip, engine_gradients

    mask = torch.tensor([True, True, False, True, True, True])
    groups = rule.groups([n for n, _ in model.named_parameters()])
    expected, _ = clip(engine_gradients(model, losses, (padded,), 6), rule, 0.5, groups, mask)
    finite = bool(torch.isfinite(out.norms.reshape(6, -1)[2]).all())
    assert not finite or kind == "squares overflow"
    if not finite:
        for name, value in out.grads.items():
            assert torch.equal(value, expected[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", [cw.AutoV(), cw.Abadi(), cw.PSAC()], ids=repr)
def test_half_precision_contributions_stay_within_sensitivity(rule, dtype):
    torch.manual_seed(0)
    model = nn.Linear(300, 300).to(dtype)
    for scale in (1e-3, 1.0, 30.0):
        x = (torch.randn(1, 300) * scale).to(dtype)
        out = cw.clipped_sum(model, lambda m, b: m(b[0]).float().square().sum(1), (x,), rule, 1.0)
        assert norm(dict(out.grads)) <= out.sensitivity
        assert out.grads["weight"].dtype == torch.float32


def test_fp16_norms_do_not_underflow():
    model = nn.Linear(100, 1, bias=False).half()
    x = torch.full((1, 100), 9.5e-5, dtype=torch.float16)
    out = cw.clipped_sum(model, lambda m, b: m(b[0])[:, 0], (x,), cw.Abadi(), 1.0)
    assert float(out.norms) == pytest.approx(float(x.double().norm()), rel=1e-3)


@given(
    seed=st.integers(0, 10**6),
    t=st.integers(2, 80),
    p=st.integers(1, 300),
    d=st.integers(1, 300),
    cancel=st.sampled_from([0.0, 1e-6, 1e-3, 1.0]),
    scale=st.sampled_from([1e-30, 1e-12, 1.0, 1e8]),
    wide=st.booleans(),
)
def test_gram_products_never_undercut_the_norm_of_the_sum(seed, t, p, d, cancel, scale, wide):
    """The bound for float32 products, as large layers use them, against the float64 truth and the float32 sum."""
    g = torch.Generator().manual_seed(seed)
    left = torch.ones(1, 1, t, p) + cancel * torch.randn(1, 1, t, p, generator=g)
    right = torch.randn(1, 1, t, d, generator=g) * scale
    right[:, :, t // 2 : 2 * (t // 2)] = -right[:, :, : t // 2] * (1 + cancel)
    grad = OuterGrad(Outer(left, right), (p, d), wide=wide)
    bound = float(grad.squared_norms().sqrt())
    truth = float(torch.einsum("bgtp,bgtd->pd", left.double(), right.double()).norm())
    added = grad.weighted_sum(torch.ones(1), torch.ones(1, dtype=torch.bool)).double().norm()
    assert bound >= truth
    assert bound >= float(added) * (1 - 1e-6)


def test_without_its_error_term_the_gram_form_would_undercut():
    """The row that made the bound necessary: T = 64, inputs of norm 1e4, true norm 10."""
    g = torch.Generator().manual_seed(0)
    worst = 0.0
    for _ in range(20):
        half = torch.randn(1, 1, 32, 50, generator=g)
        half = half / half.norm(dim=-1, keepdim=True) * 1e4
        right = torch.cat([half, -half[:, :, torch.randperm(32, generator=g)] * (1 + 1e-6)], dim=2)
        right[..., 0, 0] += 10
        left = torch.ones(1, 1, 64, 7) / 7**0.5
        grad = OuterGrad(Outer(left, right), (7, 50))
        truth = float(right.double().sum(2).norm())
        worst = max(worst, truth / float(grad.gram().total.clamp(min=1e-20).sqrt()))
        assert float(grad.squared_norms().sqrt()) >= truth
    assert worst > 1.3  # the bare estimate lets more than 1.3·C through here


def _nearest(x):
    return ((x.view(torch.int32) + 4096) & -8192).view(torch.float32)


@given(
    seed=st.integers(0, 10**6),
    t=st.integers(2, 80),
    p=st.integers(1, 200),
    d=st.integers(1, 200),
    cancel=st.sampled_from([0.0, 1e-3, 1.0]),
    scale=st.sampled_from([1e-12, 1.0, 1e8]),
    weight=st.floats(0.5, 2.0),
    coherent=st.booleans(),
    precision=st.sampled_from(["bfloat16", "tf32"]),
)
def test_norms_cover_the_rounding_of_the_weighted_factor(seed, t, p, d, cancel, scale, weight, coherent, precision):
    """The sum of rounded factors, whichever way a device cuts float32, against the norm of the others."""
    g = torch.Generator().manual_seed(seed)
    draw = (lambda *s: torch.ones(s) * torch.rand(1, generator=g)) if coherent else partial(torch.randn, generator=g)
    left, right = draw(1, 1, t, p), draw(1, 1, t, d) * scale
    right[:, :, t // 2 : 2 * (t // 2)] *= -(1 + cancel) if cancel else 1
    weights, keep = torch.tensor([weight]), torch.ones(1, dtype=torch.bool)
    if precision == "bfloat16":
        left, right = left.bfloat16(), right.bfloat16()
        grad = OuterGrad(Outer(left, right), (p, d), precision=precision)
        added = [grad.weighted_sum(weights, keep)]
    else:
        left, right = cut(left), cut(right)
        grad = OuterGrad(Outer(left, right), (p, d), precision=precision)
        sides = (weight, 1.0) if p <= d else (1.0, weight)
        added = [
            torch.einsum("bgtp,bgtd->pd", f(left * sides[0]).double(), f(right * sides[1]).double())
            for f in (cut, _nearest)
        ]
    bound = float(grad.squared_norms().sqrt())
    for total in added:
        assert float(total.double().norm()) <= weight * bound * (1 + 1e-6)


class Tied(nn.Module):
    """A table whose two uses nearly cancel: their difference is a few last digits."""

    def __init__(self, words, d):
        super().__init__()
        self.table = nn.Embedding(words, d)

    def forward(self, batch):
        ids, c, z, hot = batch
        out = nn.functional.linear(z, self.table.weight)
        return (self.table(ids) * c).sum((1, 2)) - (out * hot).sum((1, 2))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(("words", "d"), [(4, 4), (16, 24), (64, 64)])
def test_tied_uses_that_nearly_cancel(rule, words, d):
    """What one use loses by rounding must be covered though the norm of the two together is tiny."""
    model = Tied(words, d)
    ids = torch.tensor([[0, 1]])
    hot = nn.functional.one_hot(ids, words).float()
    for seed in range(60):
        g = torch.Generator().manual_seed(seed)
        value, digits = 1 + torch.rand((), generator=g), int(torch.randint(2, 16, (), generator=g))
        for scale in (1.0, 2.0**22):
            c, z = torch.zeros(1, 2, d), torch.zeros(1, 2, d)
            c[0, 0], z[0, 0] = value * scale, (value - digits * 2**-23) * scale
            out = cw.clipped_sum(model, lambda m, b: m(b), (ids, c, z, hot), rule, 1.0)
            assert norm(dict(out.grads)) <= out.sensitivity


def test_a_longer_example_does_not_change_the_norms_of_the_others():
    """The way is chosen for one position; then a batch comes that is padded to two."""
    d, paths = 512, {}
    model = nn.Linear(d, d, bias=False)
    loss_fn = lambda m, b: (m(b[0]) * b[1]).sum((1, 2))  # noqa: E731

    def norms(x, y):
        return engine_gradients(model, loss_fn, (x, y), len(x), paths=paths).norms([["weight"]])[:, 0]

    x, y = torch.randn(6, 1, d), torch.randn(6, 1, d)
    short = norms(x, y)
    assert paths["weight"].single
    padded = [nn.functional.pad(v, (0, 0, 0, 1)) for v in (x, y)]
    for v in padded:
        v[5, 1] = 0.1
    long = norms(*padded)
    torch.testing.assert_close(long[:5], short[:5], rtol=1e-12, atol=0)
    truth = torch.einsum("btp,btd->bpd", padded[1].double(), padded[0].double()).flatten(1).norm(dim=1)
    assert (long >= truth * (1 - 1e-12)).all()


def test_the_preflights_float64_copy_does_not_decide_the_precision_of_a_run(monkeypatch):
    """It fixes the path; what the device multiplies by is decided where the real factors are."""
    paths = {}
    wide, half = (
        Outer(*(torch.randn(2, 1, 4, 300, dtype=t) for _ in range(2))) for t in (torch.float64, torch.bfloat16)
    )
    assert reduce_uses([wide], (300, 300), "w", paths).precision == "exact"
    monkeypatch.setattr(reduce, "precision_of", lambda left, right: "bfloat16")
    assert reduce_uses([half], (300, 300), "w", paths).precision == "bfloat16"


def test_long_sums_are_made_of_parts():
    """One chain of all positions would round more than the room for it."""
    g = torch.Generator().manual_seed(0)
    left, right = torch.randn(40, 1, 500, 12, generator=g), torch.randn(40, 1, 500, 9, generator=g)
    weights, keep = torch.rand(40, generator=g), torch.arange(40) % 7 != 3
    found = OuterGrad(Outer(left, right), (12, 9)).weighted_sum(weights, keep)
    kept = (weights * keep).double()
    truth = torch.einsum("b,bgtp,bgtd->pd", kept, left.double(), right.double())
    torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-3)


def test_the_room_for_rounded_factors_is_small():
    g = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 1, 256, 300, generator=g), torch.randn(2, 1, 256, 300, generator=g)
    truth = torch.einsum("bgtp,bgtd->bpd", left.double(), right.double()).flatten(1).norm(dim=1)
    for precision in ("bfloat16", "tf32"):
        bound = OuterGrad(Outer(left, right), (300, 300), precision=precision).squared_norms().sqrt()
        assert (bound >= truth).all()
        assert (bound <= 1.04 * truth).all()


@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=200),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_sum_of_squares_is_an_upper_bound(values, dtype):
    x = torch.tensor([values], dtype=torch.float32).to(dtype)
    truth = float(torch.tensor(values, dtype=torch.float64).square().sum())
    assert float(squares(x)) >= truth


def test_many_tiny_numbers_do_not_pass_for_zero():
    x = torch.full((1, 10**6), 1e-23)
    x[0, 0] = 2e-22
    assert float(squares(x).sqrt()) >= float(x.double().norm())


def test_adversarial_rounding_of_a_sum_of_squares():
    x = torch.full((1, 100_001), math.sqrt(2**-25))  # every square is lost against 1 in a naive float32 sum
    x[0, 0] = 1.0
    assert float(squares(x)) >= float(x.double().square().sum())


def test_aligned_examples_do_not_exceed_the_allowance_for_rounding():
    """The worst case for the accumulated sum: all contributions point the same way."""
    torch.manual_seed(0)
    model = nn.Linear(500, 20, bias=False)
    x = torch.rand(512, 500) + 0.5
    loss = lambda m, b: m(b[0]).sum(1)  # noqa: E731
    one = x[:1].expand(512, -1).contiguous()
    for data in (x, one):
        with_, without = (cw.clipped_sum(model, loss, (d,), cw.AutoV(), 1.0) for d in (data, data[:-1]))
        assert distance(dict(with_.grads), dict(without.grads)) <= without.sensitivity


def test_brute_force_norms_of_cancelling_records_are_bounded():
    model = models()["linear, Gram"]
    x = torch.stack([RECORDS["cancelling"], RECORDS["ordinary"]])
    out = cw.clipped_sum(model, losses, (x,), cw.AutoS(), 1.0)
    truth = [norm(g) for g in gradients(model, losses, (x,))]
    assert all(float(n) >= t * (1 - 1e-9) for n, t in zip(out.norms, truth, strict=True))


# -- more ways to go wrong ----------------------------------------------------------------------------


def tokens(model, batch):
    """The gradient of a linear layer is Σ_t y_t ⊗ x_t."""
    return (model(batch[0]) * batch[1]).sum((1, 2))


def moved_by_one(model, x, y, rule=None, clip_norm=1.0):
    with_, without = (cw.clipped_sum(model, tokens, (x[i:], y[i:]), rule, clip_norm) for i in (0, 1))
    return distance(dict(with_.grads), dict(without.grads)) / without.sensitivity


@pytest.mark.parametrize("size", [26, 27, 28, 29])
def test_a_records_norm_does_not_depend_on_the_batch_size(size):
    g = torch.Generator().manual_seed(0)
    model = nn.Linear(300, 300, bias=False)
    u, v = torch.randn(1, 8, 300, generator=g), torch.randn(1, 8, 300, generator=g)
    x = torch.cat([u, u + 0.01 * torch.randn(1, 8, 300, generator=g)], 1).repeat(size, 1, 1)
    y = torch.cat([v, -v], 1).repeat(size, 1, 1)
    assert moved_by_one(model, x, y) <= 1
    assert moved_by_one(model, x, y, cw.Abadi()) <= 1


@pytest.mark.parametrize("rule", RULES, ids=repr)
@pytest.mark.parametrize(("t", "d", "big", "small"), [(64, 512, 7e17, 2.6e-23), (128, 300, 5.5e17, 1e-22)])
def test_underflow_in_gram_products_does_not_hide_a_gradient(rule, t, d, big, small):
    model = nn.Linear(d, d, bias=False)
    x, y = torch.randn(4, t, d), torch.randn(4, t, d) * 1e-2
    x[0], y[0] = big, small
    assert moved_by_one(model, x, y, rule, 0.1) <= 1


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_rounding_that_always_goes_the_same_way_stays_within_sensitivity(rule):
    model = nn.Linear(500, 500, bias=False)
    c = torch.full((120,), 0.51 * 2**-23)
    c[0], c[-1] = 1, -1
    for scale in (1.0, 2.0**14, 1.5 * 2**14):
        x, y = torch.ones(1, 120, 500), (c * scale)[None, :, None].expand(1, 120, 500).contiguous()
        out = cw.clipped_sum(model, tokens, (x, y), rule, 1.0)
        assert norm(dict(out.grads)) <= out.sensitivity


@pytest.mark.parametrize("t", [1, 4, 100])
def test_ambient_autocast_does_not_reach_the_engine(t):
    model = nn.Linear(300, 200, bias=False)
    x, y = torch.randn(1, t, 300), torch.randn(1, t, 200)
    plain = cw.clipped_sum(model, tokens, (x, y), cw.AutoV(), 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        out = cw.clipped_sum(model, tokens, (x, y), cw.AutoV(), 1.0)
    assert norm(dict(out.grads)) <= out.sensitivity
    assert distance(dict(out.grads), dict(plain.grads)) < 0.1


def test_auto_v_does_not_turn_a_zero_gradient_into_nan():
    model = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    out = cw.clipped_sum(model, lambda m, b: torch.relu(m(b)[:, 0] * b.sum(1)), x, cw.AutoV(), 100.0)
    assert torch.isfinite(out.grads["weight"]).all()
    x, y = torch.full((2, 2, 40), 1e-41), torch.full((2, 2, 40), 1e26)
    assert moved_by_one(nn.Linear(40, 40, bias=False), x, y, cw.AutoV()) <= 1


def test_weights_are_not_rounded_up_for_huge_gradients():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    for scale in torch.logspace(18, 23, 300):
        out = cw.clipped_sum(model, lambda m, b: m(b)[:, 0] ** 2, scale.reshape(1, 1), cw.Abadi(), 1.0)
        assert norm(dict(out.grads)) <= out.sensitivity


@pytest.mark.parametrize("bad", [1e-42, 1e39, 1e20])
def test_clip_norms_that_floats_cannot_bear_are_refused(bad):
    with pytest.raises(ValueError, match="clip_norm must lie in"):
        cw.FixedThreshold(bad)


def test_float32_norms_of_wide_layers_are_bounds_within_one_percent():
    g = torch.Generator().manual_seed(0)
    for t, d, p in ((64, 512, 512), (64, 256, 5000)):
        left, right = torch.randn(2, 1, t, p, generator=g), torch.randn(2, 1, t, d, generator=g)
        bound = OuterGrad(Outer(left, right), (p, d)).squared_norms().sqrt()
        truth = torch.einsum("bgtp,bgtd->bpd", left.double(), right.double()).flatten(1).norm(dim=1)
        assert (bound >= truth).all()
        assert (bound <= truth * 1.01).all()


@pytest.mark.parametrize("rule", [cw.Abadi(), cw.Global(), cw.PSAC()], ids=repr)
@pytest.mark.parametrize("size", [3, 7, 11])
def test_copies_of_one_record_at_the_clip_norm(rule, size):
    """Norms round differently in batches of another size: no rule may turn that into a jump of everybody."""
    from clipwise.recipes.digits import cross_entropy, digits_model

    torch.manual_seed(0)
    model = digits_model()
    record, label = torch.randn(1, 64), torch.tensor([1])

    def found(count, clip_norm):
        batch = (record.expand(count, -1).contiguous(), label.expand(count).contiguous())
        return cw.clipped_sum(model, cross_entropy, batch, rule, clip_norm)

    norms = [float(found(n, 1.0).norms[0]) for n in (size, size + 1)]
    for clip_norm in (*norms, sum(norms) / 2):
        less, more = found(size, clip_norm), found(size + 1, clip_norm)
        change = sum(float((more.grads[k] - less.grads[k]).double().square().sum()) for k in less.grads) ** 0.5
        assert change <= more.sensitivity


def test_one_record_alone_has_the_gradient_that_it_has_among_others():
    torch.manual_seed(0)
    for p, d, t in ((6, 25, 784), (3, 7, 9), (16, 64, 196), (1, 1, 2)):
        right, own = torch.randn(5, 1, t, d), torch.randn(5, 1, t, p)
        for left in (own, own[:1].expand(5, -1, -1, -1)):  # a gradient may be one row for all
            whole = materialise(Outer(left, right), (p, d))
            torch.testing.assert_close(whole, left[:, 0].mT @ right[:, 0], rtol=1e-4, atol=1e-4)
            for rows in (1, 2, 3):
                assert torch.equal(materialise(Outer(left[-rows:], right[-rows:]), (p, d)), whole[-rows:])
