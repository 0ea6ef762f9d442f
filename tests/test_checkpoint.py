from __future__ import annotations

import pytest
import torch
from training_runs import X, Y, make, make_plan, weights

import clipwise as cw
from clipwise import errors


def test_checkpoints_resume_and_epsilon_never_falls(tmp_path):
    ledger, saved = tmp_path / "run.ledger", tmp_path / "run.pt"
    adam = {"make_optimizer": lambda p: torch.optim.Adam(p, lr=0.1)}
    first = make(ledger=ledger, sampling="asserted", **adam)
    first.step((X, Y))
    cw.save_checkpoint(first, saved)
    kept = weights(first)
    first.step((X, Y))
    first.step((X, Y))
    spent = first.epsilon
    first.ledger.close()
    second = make(ledger=ledger, sampling="asserted", **adam)
    cw.load_checkpoint(second, saved)
    assert torch.equal(weights(second), kept)
    assert second.epsilon == spent
    second.step((X, Y))
    assert not torch.equal(weights(second), weights(first))
    assert second.ledger.charges == 4


def test_checkpoints_refuse_an_older_ledger_another_plan_and_memory(tmp_path):
    ledger, saved = tmp_path / "run.ledger", tmp_path / "run.pt"
    first = make(ledger=ledger, sampling="asserted")
    first.step((X, Y))
    older = ledger.read_bytes()
    first.step((X, Y))
    cw.save_checkpoint(first, saved)
    first.ledger.close()
    ledger.write_bytes(older)
    with pytest.raises(errors.LedgerError, match="older than checkpoint"):
        cw.load_checkpoint(make(ledger=ledger, sampling="asserted"), saved)
    with pytest.raises(errors.PlanMismatch):
        cw.load_checkpoint(make(make_plan(steps=7), sampling="asserted"), saved)
    memory = make(sampling="asserted")
    cw.save_checkpoint(memory, tmp_path / "memory.pt")
    with pytest.raises(errors.LedgerError, match="lived in memory"):
        cw.load_checkpoint(make(sampling="asserted"), tmp_path / "memory.pt")
