from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import clipwise as cw

ALL = [cw.PSAC(), cw.PSAC(r=1.0), cw.PSAC(r=1e-3), cw.AutoS(), cw.AutoV(), cw.Abadi(), cw.Reparam(), cw.Global()]
norms_ = st.floats(min_value=0, allow_infinity=True) | st.just(math.nan)
clip_norms = st.floats(min_value=1e-6, max_value=1e6)


@pytest.mark.parametrize("rule", [*ALL, cw.PerLayer(cw.PSAC()), cw.PerLayer(cw.Reparam())], ids=repr)
def test_rule_conforms(rule):
    cw.check_rule(rule)


@pytest.mark.parametrize("rule", ALL, ids=repr)
@given(n=norms_, c=clip_norms, dtype=st.sampled_from([torch.float32, torch.float64]))
def test_weighted_norm_never_exceeds_sensitivity(rule, n, c, dtype):
    norms = torch.tensor([n], dtype=torch.float64).to(dtype)
    weight = rule.weights(norms, c)
    assert torch.isfinite(weight).all()
    if math.isfinite(float(norms)):
        assert float(norms.double()) * float(weight.double()) <= rule.sensitivity(c)
    else:
        assert float(weight) == 0


def test_a_broken_rule_is_found():
    class TooLarge(cw.Abadi):
        def weights(self, norms, clip_norm):
            return super().weights(norms, clip_norm) * 1.001

    with pytest.raises(AssertionError, match="exceeds its sensitivity"):
        cw.check_rule(TooLarge())


@pytest.mark.parametrize("r", [0.001, 0.1, 0.5, 1.0])
def test_psac_is_non_monotonic_and_bounded(r):
    n = torch.linspace(0, 3, 30_001, dtype=torch.float64)
    w = cw.PSAC(r=r).weights(n, 1.0)
    assert float(w.max()) <= 1 / (2 * math.sqrt(r) - r) + 1e-12
    assert abs(float(n[w.argmax()]) - (math.sqrt(r) - r)) < 1e-3
    assert float(w[0]) == pytest.approx(1.0)


def test_auto_s_reaches_one_over_gamma_where_psac_stays_bounded():
    zero = torch.zeros(1, dtype=torch.float64)
    assert float(cw.AutoS(gamma=0.01).weights(zero, 1.0)) == pytest.approx(100)
    assert float(cw.PSAC(r=0.01).weights(zero, 1.0)) == pytest.approx(1)


def test_auto_v_gives_zero_at_zero_and_where_it_overflows():
    tiny = torch.tensor([0.0, 1e-45, 1e-39], dtype=torch.float32)
    assert cw.AutoV().weights(tiny, 10.0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("rule", [cw.PSAC(), cw.AutoS(), cw.AutoV()], ids=repr)
def test_automatic_rules_only_scale_with_the_clip_norm(rule):
    n = torch.logspace(-6, 6, 50, dtype=torch.float64)
    torch.testing.assert_close(rule.weights(n, 7.0), 7.0 * rule.weights(n, 1.0))


def layers_sensitivity(rule, clip_norm):
    return rule.sensitivity(clip_norm, len(rule.groups(["weight", "bias"])))


def _trajectory(rule, clip_norm, make_optimizer, steps=8):
    """Noise included: the same standard normal draws, scaled by the sensitivity."""
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2).double()
    optimizer = make_optimizer(model)
    data = torch.randn(16, 3, dtype=torch.float64)
    draws = torch.Generator().manual_seed(2)
    for _ in range(steps):
        out = cw.clipped_sum(model, lambda m, x: m(x).square().sum(1), data, rule, clip_norm)
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=draws, dtype=p.dtype) * layers_sensitivity(rule, clip_norm)
            p.grad = (out.grads[name] + noise) / len(data)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("rule", [cw.PSAC(), cw.AutoS(), cw.AutoV()], ids=repr)
def test_theorem_1_sgd_absorbs_the_clip_norm_into_the_learning_rate(rule):
    def sgd(lr, decay):
        return lambda m: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9, weight_decay=decay)

    a = _trajectory(rule, 4.0, sgd(0.05, 0.1))
    b = _trajectory(rule, 1.0, sgd(0.05 * 4, 0.1 / 4))
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("rule", [cw.PSAC(), cw.AutoS(), cw.AutoV()], ids=repr)
def test_theorem_2_adam_cancels_the_clip_norm(rule):
    def adam(kind, decay):
        return lambda m: kind(m.parameters(), lr=0.05, eps=1e-30, weight_decay=decay)

    adamw = [_trajectory(rule, c, adam(torch.optim.AdamW, 0.1)) for c in (4.0, 1.0)]
    torch.testing.assert_close(*adamw, rtol=1e-7, atol=1e-10)
    coupled = [_trajectory(rule, c, adam(torch.optim.Adam, 0.1 * c)) for c in (4.0, 1.0)]
    torch.testing.assert_close(*coupled, rtol=1e-7, atol=1e-10)


def test_fact_b1_one_layers_threshold_alone_breaks_the_coupling():
    def sgd(m):
        return torch.optim.SGD(m.parameters(), lr=0.1)

    layer_of = {"weight": "w", "bias": "b"}
    even = _trajectory(cw.PerLayer(cw.AutoV(), shares=(1.0, 1.0), layer_of=layer_of), 1.0, sgd)
    odd = _trajectory(cw.PerLayer(cw.AutoV(), shares=(1.0, 3.0), layer_of=layer_of), 1.0, sgd)
    assert (even - odd).norm() > 1e-3


def test_per_layer_sensitivity_is_that_of_all_layers_together():
    assert cw.PerLayer(cw.PSAC()).sensitivity(2.0, 9) == pytest.approx(2.0)
    assert cw.PerLayer(cw.Reparam()).sensitivity(2.0, 9) == pytest.approx(3.0)
    assert cw.PerLayer(cw.Abadi(), shares=(3.0, 4.0)).sensitivity(2.0, 2) == pytest.approx(2.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: cw.PSAC(r=0),
        lambda: cw.PSAC(r=1.5),
        lambda: cw.PSAC(r=float("nan")),
        lambda: cw.AutoS(gamma=0),
        lambda: cw.AutoS(gamma=-1),
        lambda: cw.FixedThreshold(0),
        lambda: cw.FixedThreshold(float("inf")),
        lambda: cw.PerLayer(cw.Abadi(), shares=(1.0, -1.0)),
        lambda: cw.PerLayer(cw.Abadi(), shares=(1.0,)).sensitivity(1.0, 2),
    ],
)
def test_bad_numbers_are_refused(make):
    with pytest.raises(ValueError):  # noqa: PT011 - the wording is tested in test_check
        make()


@pytest.mark.parametrize("value", [True, "1", None])
def test_bool_and_str_are_not_numbers(value):
    with pytest.raises(TypeError, match="must be a number"):
        cw.FixedThreshold(value)


def test_check_rule_finds_a_jump():
    class Jumping(cw.Abadi):
        def weights(self, norms, clip_norm):
            return torch.where(norms <= clip_norm, 1.0, 0.0).to(norms.dtype) * (1 - 1e-6)

    with pytest.raises(AssertionError, match="jumps near"):
        cw.check_rule(Jumping())
