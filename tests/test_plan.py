from __future__ import annotations

import dataclasses
import math

import pytest

import clipwise as cw
from clipwise.accounting.arithmetic import accounted
from clipwise.errors import CannotCertify

NUMBERS = {"delta": 1e-5, "sampling_prob": 0.1, "steps": 20, "expected_batch_size": 10}


def test_for_dataset_fills_in_what_people_mean():
    plan = cw.Plan.for_dataset(size=60_000, batch_size=2_048, epochs=40, noise_multiplier=1.9, delta=1e-5)
    assert plan.sampling_prob == 2048 / 60000
    assert plan.steps == 1171
    assert plan.expected_batch_size == 2048
    assert plan.rule == cw.PSAC()
    assert plan.accountant == "pld"


def test_epsilon_is_what_the_plan_achieves():
    plan = cw.Plan(epsilon=2.0, **NUMBERS)
    assert plan.target_epsilon == 2.0
    assert 2 - 1e-3 <= plan.epsilon <= 2
    numbers = {"noise_multiplier": plan.noise_multiplier, "sampling_prob": 0.1, "steps": 20}
    assert plan.epsilon == cw.epsilon(**numbers, delta=accounted(1e-5))
    assert plan.gradient_noise_multiplier == plan.noise_multiplier
    assert plan.epsilon_after(0) == 0
    assert plan.epsilon_after(10) < plan.epsilon


def test_a_plan_is_frozen():
    plan = cw.Plan(noise_multiplier=1.0, **NUMBERS)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.steps = 5


def test_the_statement_says_what_is_covered():
    plan = cw.Plan(epsilon=2.0, **NUMBERS)
    text = str(plan)
    for word in ("one example", "add-or-remove-one", "not covered", "Poisson", "PSAC(r=0.1)", "target 2", "1e-05"):
        assert word in text
    assert plan.statement()["epsilon"] == plan.epsilon
    assert "NOT covered" in plan.statement()["unit"]


def test_digest_tells_plans_apart():
    plan = cw.Plan(noise_multiplier=1.0, **NUMBERS)
    assert plan.digest == cw.Plan(noise_multiplier=1.0, **NUMBERS).digest
    for change in ({"noise_multiplier": 1.1}, {"rule": cw.Abadi()}, {"threshold": cw.FixedThreshold(2.0)}):
        assert plan.digest != cw.Plan(**({"noise_multiplier": 1.0} | NUMBERS | change)).digest


@pytest.mark.parametrize("both", [{}, {"epsilon": 1.0, "noise_multiplier": 1.0}])
def test_exactly_one_of_epsilon_and_sigma(both):
    with pytest.raises(ValueError, match="exactly one"):
        cw.Plan(**both, **NUMBERS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("delta", 0.0),
        ("delta", 2),
        ("sampling_prob", 0),
        ("sampling_prob", 1.1),
        ("steps", 0),
        ("steps", 2.5),
        ("steps", True),
        ("expected_batch_size", 0),
        ("expected_batch_size", math.inf),
        ("noise_multiplier", 0),
        ("noise_multiplier", math.nan),
        ("rule", "psac"),
        ("accountant", "prv"),
        ("adjacency", "zero_out"),
    ],
)
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises((ValueError, TypeError), match=name):
        cw.Plan(**({"noise_multiplier": 1.0} | NUMBERS | {name: value}))


def test_a_plan_takes_keywords_only():
    with pytest.raises(TypeError):
        cw.Plan(3.0, 1e-5)


def test_gdp_cannot_certify_a_plan():
    with pytest.raises(CannotCertify):
        cw.Plan(noise_multiplier=1.0, accountant="gdp", **NUMBERS)


def test_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="batch_size must not exceed size"):
        cw.Plan.for_dataset(size=10, batch_size=11, epochs=1, noise_multiplier=1.0, delta=1e-5)
