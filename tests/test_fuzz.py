"""Random models against a loop over single examples, random plans against the accountant, random bytes."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import brute
import pytest
import torch
from fuzz import losses, random_case
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch import nn

import clipwise as cw
from clipwise import errors
from clipwise.checkpoint import read_checkpoint


@settings(max_examples=250)
@given(st.integers(0, 2**32 - 1))
@example(25537)
def test_random_models_match_a_loop_over_single_examples(seed):
    model, data = random_case(seed)
    model = model.double()
    data = brute.double(data)
    rule = (cw.PSAC(), cw.Abadi(), cw.AutoS())[seed % 3]
    try:
        grads = brute.gradients(model, losses, data)
    except (RuntimeError, ValueError) as error:  # a few models do not run in plain PyTorch either:
        # what autograd needs is changed in place, or a single pixel has no variance
        assert re.search("modified by an inplace operation|^Expected more than 1", str(error))  # noqa: PT017
        with pytest.raises((RuntimeError, ValueError, errors.ClipwiseError)):
            cw.clipped_sum(model, losses, data, rule, 0.3)
        return
    out = cw.clipped_sum(model, losses, data, rule, 0.3)
    total, norms = brute.clipped(grads, type(rule).__name__, 0.3)
    assert torch.allclose(out.norms, norms, rtol=1e-9, atol=1e-12)
    assert brute.distance(dict(out.grads), total) <= 1e-9 * (1 + brute.norm(total))


@settings(max_examples=25, phases=[Phase.explicit, Phase.generate])  # a failure is slow enough without shrinking
@given(
    sigma=st.floats(0.5, 20),
    q=st.floats(1e-4, 1),
    steps=st.integers(1, 500),
    delta=st.floats(1e-9, 1e-2),
    adjacency=st.sampled_from(["add_or_remove_one", "replace_one"]),
)
def test_random_plans_are_never_below_the_reference(sigma, q, steps, delta, adjacency):
    import dp_accounting

    numbers = {"noise_multiplier": sigma, "sampling_prob": q, "steps": steps, "delta": delta, "adjacency": adjacency}
    try:
        plan = cw.Plan(expected_batch_size=7, **numbers)
    except ValueError as error:
        assert "No finite epsilon" in str(error)  # noqa: PT017
        return
    relation = getattr(dp_accounting.NeighboringRelation, adjacency.upper())
    release = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    if plan.epsilon > 30:
        return
    width = 1e-5 if plan.epsilon < 1 else 5e-5
    truth = dp_accounting.pld.PLDAccountant(relation, value_discretization_interval=width)
    reference = truth.compose(release, steps).get_epsilon(delta)
    assert plan.epsilon >= reference - 2e-4 * reference - 1e-6  # two pessimistic grids
    assert plan.epsilon <= max(reference * 1.002, reference + 2e-3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = nn.Linear(2, 1)
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.5, steps=3, expected_batch_size=4)
    optimizer = torch.optim.Adam(model.parameters())
    training = cw.privatize(model, optimizer, plan, lambda m, x: m(x)[:, 0] ** 2, ledger=folder / "run.ledger")
    for batch in training.batches(torch.ones(8, 2)):
        training.step(batch)
    cw.save_checkpoint(training, folder / "run.checkpoint")
    training.ledger.close()
    return (folder / "run.ledger").read_bytes(), (folder / "run.checkpoint").read_bytes()


def harmed(whole, data):
    """The bytes with a few changed, cut, or put in."""
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "noise"]))
    at = data.draw(st.integers(0, len(whole) - 1))
    if kind == "flip":
        return whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    if kind == "cut":
        return whole[:at] + whole[at + data.draw(st.integers(1, 200)) :]
    if kind == "insert":
        return whole[:at] + data.draw(st.binary(min_size=1, max_size=50)) + whole[at:]
    return data.draw(st.binary(max_size=400))


@settings(max_examples=300)
@given(data=st.data())
def test_random_bytes_never_lower_a_ledger(saved, data):
    whole, _ = saved
    content = harmed(whole, data)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.ledger"
        path.write_bytes(content)
        try:
            state = cw.read_ledger(path)
        except errors.LedgerError:
            return
    # What still reads is a prefix of the truth with something torn behind it: the torn part is charged.
    lines = content.split(b"\n")[:-1]
    assert b"\n".join(lines) == b"\n".join(whole.split(b"\n")[: len(lines)])
    assert state.charges == len(lines) - 1 + (not content.endswith(b"\n"))


@settings(max_examples=300)
@given(data=st.data())
def test_random_bytes_never_run_or_crash_the_checkpoint_reader(saved, data):
    _, whole = saved
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.checkpoint"
        path.write_bytes(harmed(whole, data))
        try:
            content = read_checkpoint(path)
        except errors.CheckpointError:
            return
    assert set(content) == {"model", "optimizer", "threshold", "plan", "ledger"}


@given(st.binary(max_size=300))
@example(b"")
@example(b"\x08\x00\x00\x00\x00\x00\x00\x00{}      ")
def test_garbage_is_not_a_checkpoint(content):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_bytes(content)
        with pytest.raises(errors.CheckpointError):
            read_checkpoint(path)
