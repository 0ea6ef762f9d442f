"""Rows 31 to 38: state that survives, or refuses."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import warnings

import pytest
import torch
from forked import refused_in_a_fork
from kills import charge_milliseconds, kill_trials
from small_runs import X, Y, losses, network, plan, run, weights
from torch import nn

import clipwise as cw
from clipwise import errors


def stepped(training, steps=1):
    for _, batch in zip(range(steps), training.batches((X, Y)), strict=False):
        training.step(batch)
    return training


def test_31_200_kills(tmp_path):
    found = kill_trials(tmp_path, 200, seed=int.from_bytes(os.urandom(4), "little"))
    assert found["ledger below what was released"] == 0
    assert found["released steps"] > 100
    assert found["ledger above it (killed between charge and release)"] > 0  # some kills hit between the two
    assert charge_milliseconds(tmp_path) < 1000  # durable; how fast is measured elsewhere


def test_31_the_charge_is_on_disk_before_anything_is_released(tmp_path):
    path = tmp_path / "run.ledger"
    training = run(ledger=path)
    seen = []
    training._noise.add_ = lambda values, **_: seen.append(cw.read_ledger(path).charges) or dict(values)
    stepped(training, 3)
    assert seen == [1, 2, 3]


def test_32_resume_from_an_old_checkpoint_never_lowers_epsilon(tmp_path):
    path, saved = tmp_path / "run.ledger", tmp_path / "run.checkpoint"
    training = stepped(run(ledger=path), 2)
    cw.save_checkpoint(training, saved)
    stepped(training, 2)
    spent, old = training.epsilon, training.plan.epsilon_after(2)
    training.ledger.close()
    again = run(ledger=path)
    cw.load_checkpoint(again, saved)
    assert again.epsilon == spent > old
    assert again.plan.steps - again.ledger.charges == 2


def releases(training, data=None):
    """What one step added to the weights."""
    before = weights(training)
    stepped(training) if data is None else training.step(data)
    return weights(training) - before


def test_33_a_step_run_again_has_new_noise_and_is_charged_again(tmp_path):
    """Empty batches make the release pure noise: were it repeated, it would be seen."""
    path, saved = tmp_path / "run.ledger", tmp_path / "run.checkpoint"
    numbers = {"sampling_prob": 1e-12, "preflight": False}
    training = stepped(run(ledger=path, **numbers))
    cw.save_checkpoint(training, saved)
    first = releases(training)
    training.ledger.close()
    again = run(ledger=path, **numbers)
    cw.load_checkpoint(again, saved)
    assert not torch.equal(first, releases(again))
    assert again.ledger.charges == 3
    again.ledger.close()


def test_33_copies_and_forks_never_share_noise():
    training = run(sampling_prob=1e-12, preflight=False)
    twin = copy.deepcopy(training)
    assert not torch.equal(releases(training), releases(twin))
    assert training.ledger is twin.ledger
    assert training.ledger.charges == 2
    reader, writer = os.pipe()
    source = training._noise

    def one_draw(source=source):
        return source.add_({"w": torch.zeros(4)}, sensitivity=1.0, noise_multiplier=1.0, sequence=9, stream="gradient")[
            "w"
        ]

    assert torch.equal(one_draw(), one_draw())  # the address decides
    for other in (copy.copy(source), copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert not torch.equal(one_draw(), one_draw(other))
    if not (child := os.fork()):
        os.write(writer, pickle.dumps(one_draw()))
        os._exit(0)
    os.waitpid(child, 0)
    assert not torch.equal(pickle.loads(os.read(reader, 65536)), one_draw())
    assert refused_in_a_fork(lambda: stepped(training))


def damaged(text: bytes):
    lines = text.splitlines(keepends=True)
    yield "reordered", b"".join([lines[0], lines[2], lines[1], *lines[3:]])
    yield "removed", b"".join([*lines[:2], *lines[3:]])
    yield "repeated", b"".join([*lines, lines[-1]])
    yield "edited", text.replace(b'"noise_multiplier": 1.0', b'"noise_multiplier": 9.0')
    yield "headless", b"".join(lines[1:])
    yield "empty", b""
    yield "garbage", os.urandom(300)


def test_34_a_damaged_ledger_fails_closed(tmp_path):
    path = tmp_path / "run.ledger"
    stepped(run(ledger=path), 4).ledger.close()
    whole = path.read_bytes()
    for _, harmed in damaged(whole):
        path.write_bytes(harmed)
        with pytest.raises(errors.LedgerError):
            run(ledger=path)
        assert path.read_bytes() == harmed  # looked at, not touched
    path.write_bytes(whole)
    assert run(ledger=path).ledger.charges == 4


def test_34_every_flipped_byte_is_seen_and_torn_lines_are_charged(tmp_path):
    path = tmp_path / "run.ledger"
    stepped(run(ledger=path), 2).ledger.close()
    whole = path.read_bytes()
    last = len(whole) - whole.rstrip(b"\n").rfind(b"\n") - 1
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ (1 + i % 255)]) + whole[i + 1 :])
        try:
            assert cw.read_ledger(path).charges >= 2  # only where the last line seems torn by it
        except errors.LedgerError:
            continue
        assert i == len(whole) - 1
    for cut in range(1, last):
        path.write_bytes(whole[:-cut])
        assert cw.read_ledger(path).charges == 2


@pytest.mark.parametrize("failure", ["full", "read-only"])
def test_34_no_charge_no_step(tmp_path, monkeypatch, failure):
    training = run(ledger=tmp_path / "run.ledger")
    batch = next(iter(training.batches((X, Y))))
    before = weights(training)

    def fails(*_):
        raise OSError(28 if failure == "full" else 30, "no")

    monkeypatch.setattr(os, "write" if failure == "full" else "fsync", fails)
    with pytest.raises(errors.LedgerError, match="could not be written"):
        training.step(batch)
    monkeypatch.undo()
    assert torch.equal(before, weights(training))
    assert all(p.grad is None for p in training.model.parameters())


def test_34_a_checkpoint_refuses_an_older_ledger_and_memory(tmp_path):
    path, saved, old = tmp_path / "run.ledger", tmp_path / "run.checkpoint", tmp_path / "old"
    training = stepped(run(ledger=path))
    shutil.copy(path, old)
    cw.save_checkpoint(stepped(training), saved)
    training.ledger.close()
    shutil.copy(old, path)
    with pytest.raises(errors.LedgerError, match="older than checkpoint"):
        cw.load_checkpoint(run(ledger=path), saved)
    in_memory = stepped(run())
    cw.save_checkpoint(in_memory, saved)
    with pytest.raises(errors.LedgerError, match="lived in memory"):
        cw.load_checkpoint(run(), saved)


def test_34_damaged_checkpoints_are_refused_and_change_nothing(tmp_path):
    path, saved = tmp_path / "run.ledger", tmp_path / "run.checkpoint"
    training = stepped(run(ledger=path))
    cw.save_checkpoint(training, saved)
    whole, before = saved.read_bytes(), weights(training)
    for harmed in (b"", whole[:50], whole[:-1], os.urandom(200), pickle.dumps({"model": 1}), whole[8:]):
        saved.write_bytes(harmed)
        with pytest.raises(errors.CheckpointError):
            cw.load_checkpoint(training, saved)
        assert torch.equal(before, weights(training))


def test_35_two_runs_on_one_ledger(tmp_path):
    path = tmp_path / "run.ledger"
    first = run(ledger=path)
    with pytest.raises(errors.LedgerError, match="in use"):
        run(ledger=path)
    assert refused_in_a_fork(lambda: run(ledger=path))
    first.ledger.close()
    run(ledger=path).ledger.close()


def test_36_another_plan_is_refused(tmp_path):
    path, saved = tmp_path / "run.ledger", tmp_path / "run.checkpoint"
    training = stepped(run(ledger=path))
    cw.save_checkpoint(training, saved)
    training.ledger.close()
    with pytest.raises(errors.PlanMismatch, match=r"noise_multiplier: 1\.0 there, 2\.0 here"):
        run(ledger=path, noise_multiplier=2.0)
    other = run(ledger=tmp_path / "other.ledger", noise_multiplier=2.0)
    with pytest.raises(errors.PlanMismatch, match="another plan"):
        cw.load_checkpoint(other, saved)


def test_36_other_noise_is_refused(tmp_path):
    stepped(run(ledger=tmp_path / "run.ledger")).ledger.close()
    with pytest.raises(errors.PlanMismatch, match="must stay what it was"):
        run(ledger=tmp_path / "run.ledger", noise="hardened")


def test_34_a_refused_checkpoint_leaves_the_run_as_it_was(tmp_path):
    """Files that read well and do not fit: other shapes, settings, thresholds, positions."""
    from clipwise import checkpoint

    path, saved = tmp_path / "run.ledger", tmp_path / "run.checkpoint"
    training = stepped(run(ledger=path, rule=cw.Abadi(), threshold=cw.MinErrorThreshold(1.0), expected_batch_size=400))
    cw.save_checkpoint(training, saved)
    whole = checkpoint.read_checkpoint(saved)
    before, settings = weights(training), copy.deepcopy(training.optimizer.state_dict())

    def spoilt(part, change):
        content = copy.deepcopy(whole)
        change(content[part])
        return content

    cases = [
        spoilt("threshold", lambda t: t.update(range=0.0)),
        spoilt("optimizer", lambda o: o["param_groups"][0].update(lr="boom")),
        spoilt("optimizer", lambda o: o.update(state={0: {"momentum_buffer": torch.zeros(7)}})),
        spoilt("optimizer", lambda o: o.update(param_groups=[])),
        spoilt("model", lambda m: m.update(extra=torch.zeros(1))),
    ]
    for content in cases:
        content["model"] = {k: v + 1 for k, v in content["model"].items()}
        original, checkpoint.read_checkpoint = checkpoint.read_checkpoint, lambda _, content=content: content
        try:
            with pytest.raises(errors.CheckpointError):
                cw.load_checkpoint(training, saved)
        finally:
            checkpoint.read_checkpoint = original
        assert torch.equal(before, weights(training))
        assert training.optimizer.state_dict() == settings


def test_37_a_spent_budget_refuses_before_the_step():
    training = run(steps=2)
    batches = training.batches((X, Y))
    extra = next(iter(run(steps=2).batches((X, Y))))
    for batch in batches:
        training.step(batch)
    before = weights(training)
    training._issued.add(extra)  # even if a batch were left
    with pytest.raises(errors.BudgetExhausted, match="step 3 would reach"):
        training.step(extra)
    assert torch.equal(before, weights(training))
    assert training.epsilon == training.plan.epsilon


def test_38_copies_pickles_and_swapped_optimizers():
    training = run()
    for refused in (lambda: pickle.dumps(training), lambda: torch.save(training, os.devnull)):
        with pytest.raises((errors.WrongOrder, errors.LedgerError)):
            refused()
    with pytest.raises(AttributeError):
        training.optimizer = torch.optim.SGD(training.model.parameters(), lr=1.0)
    other = torch.optim.SGD(training.model.parameters(), lr=1.0)
    stepped(training)
    before = weights(training)
    other.step()  # has no gradient to step with: the library leaves none behind
    assert torch.equal(before, weights(training))
    with pytest.raises(errors.ParameterMismatch, match="already trained"):
        cw.privatize(training.model, other, plan(), losses)


def test_38_grad_scaler_and_wrappers():
    training = run()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(losses(training.model, (X, Y)).mean()).backward()
    with pytest.raises(errors.WrongOrder, match="neither clipped nor noised"):
        scaler.step(training.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.compile imports what warns of itself
        compiled = torch.compile(network())
    for wrapped in (torch.nn.DataParallel(network()), compiled):
        with pytest.raises(errors.UnsupportedOp, match="Pass the plain module"):
            run(wrapped)


def test_38_a_parameter_inside_the_loss_counts_for_every_example():
    def penalised(model, batch):
        return losses(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())

    import brute

    brute.assert_matches(network(), penalised, (X[:6], Y[:6]), cw.PSAC())


def test_38_a_script_that_calls_backward_itself_is_stopped():
    model = nn.Linear(6, 3)
    training = run(model)
    batch = next(iter(training.batches((X, Y))))
    losses(model, (X, Y)).mean().backward()
    with pytest.raises(errors.WrongOrder):
        training.optimizer.step()
    with pytest.raises(errors.ParameterMismatch):
        training.step(batch)
    assert training.ledger.charges == 0
