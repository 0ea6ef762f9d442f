"""Rows 14 to 19 of the fault list: losses, microbatches, the order of calls, the unit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from small_runs import X, Y, losses, network, plan, run, weights

import clipwise as cw
from clipwise import errors


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
    training = run(sampling_prob=1.0, expected_batch_size=48)
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
