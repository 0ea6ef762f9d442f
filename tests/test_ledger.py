from __future__ import annotations

import copy
import errno
import json
import os
import pickle
import random
import signal
import threading

import pytest
from forked import refused_in_a_fork
from hypothesis import given
from hypothesis import strategies as st

import clipwise as cw
from clipwise import errors

PLAN = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.1, steps=5, expected_batch_size=10)


def charged(path, count, plan=PLAN):
    ledger = cw.Ledger(plan, path)
    for _ in range(count):
        ledger.reserve()
        ledger.commit()
    ledger.close()


def test_charges_survive_and_add_up(tmp_path):
    path = tmp_path / "run.ledger"
    charged(path, 2)
    ledger = cw.Ledger(PLAN, path)
    assert ledger.charges == 2
    ledger.reserve()
    assert ledger.commit() == 3
    assert ledger.spent == PLAN.epsilon_after(3)
    ledger.close()
    assert cw.read_ledger(path).charges == 3


def test_a_spent_budget_refuses_before_anything_happens(tmp_path):
    path = tmp_path / "run.ledger"
    charged(path, 5)
    before = path.read_bytes()
    ledger = cw.Ledger(PLAN, path)
    with pytest.raises(errors.BudgetExhausted, match=r"step 6 would reach epsilon=\d+\.\d+ > "):
        ledger.reserve()
    with pytest.raises(errors.LedgerError, match="without reserve"):
        ledger.commit()
    assert path.read_bytes() == before


def test_every_flipped_byte_is_seen(tmp_path):
    path = tmp_path / "run.ledger"
    charged(path, 3)
    whole = path.read_bytes()
    for i in range(len(whole)):
        broken = bytearray(whole)
        broken[i] ^= 1
        path.write_bytes(broken)
        try:
            state = cw.read_ledger(path)
        except errors.LedgerError:
            continue
        assert state.charges >= 3, i  # only the last newline may go: then the last line counts as torn


def test_removed_reordered_and_repeated_lines_are_seen(tmp_path):
    path = tmp_path / "run.ledger"
    charged(path, 4)
    lines = path.read_bytes().splitlines(keepends=True)
    for order in ([0, 2, 3, 4], [0, 1, 3, 2, 4], [0, 1, 1, 2, 3, 4], [1, 2, 3, 4], [0, 0, 1, 2]):
        path.write_bytes(b"".join(lines[i] for i in order))
        with pytest.raises(errors.LedgerError):
            cw.read_ledger(path)


def test_a_torn_last_line_counts_as_charged_at_every_length(tmp_path):
    path = tmp_path / "run.ledger"
    charged(path, 3)
    whole = path.read_bytes()
    start = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(start + 1, len(whole)):
        path.write_bytes(whole[:cut])
        ledger = cw.Ledger(PLAN, path)
        assert ledger.charges == 3
        ledger.reserve()
        assert ledger.commit() == 4
        ledger.close()
        assert cw.read_ledger(path).charges == 4


def test_a_torn_head_is_refused(tmp_path):
    path = tmp_path / "run.ledger"
    charged(path, 0)
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(errors.LedgerError, match="does not begin with a plan"):
        cw.Ledger(PLAN, path)


@given(st.binary(max_size=400))
def test_random_bytes_never_pass_for_a_ledger(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("fuzz") / "run.ledger"
    path.write_bytes(content)
    with pytest.raises(errors.LedgerError):
        cw.read_ledger(path)


def test_another_plan_is_refused_and_the_difference_named(tmp_path):
    path = tmp_path / "run.ledger"
    charged(path, 1)
    other = cw.Plan(noise_multiplier=2.0, delta=1e-5, sampling_prob=0.1, steps=5, expected_batch_size=10)
    with pytest.raises(errors.PlanMismatch, match=r"noise_multiplier: 1\.0 there, 2\.0 here"):
        cw.Ledger(other, path)


def test_other_assertions_are_refused(tmp_path):
    path = tmp_path / "run.ledger"
    charged(path, 1)
    with pytest.raises(errors.PlanMismatch, match="assertions"):
        cw.Ledger(PLAN, path, {"sampling": "asserted"})


def test_two_processes_cannot_share_a_ledger(tmp_path):
    path = tmp_path / "run.ledger"
    ledger = cw.Ledger(PLAN, path)
    with pytest.raises(errors.LedgerError, match="in use"):
        cw.Ledger(PLAN, path)
    ledger.close()
    cw.Ledger(PLAN, path).close()


def test_a_fork_cannot_charge(tmp_path):
    ledger = cw.Ledger(PLAN, tmp_path / "run.ledger")
    assert refused_in_a_fork(ledger.reserve)


def test_copies_share_the_ledger_and_pickles_are_refused(tmp_path):
    ledger = cw.Ledger(PLAN, tmp_path / "run.ledger")
    assert copy.deepcopy(ledger) is ledger
    with pytest.raises(errors.LedgerError, match="pickled"):
        pickle.dumps(ledger)


@pytest.mark.parametrize("failure", ["write", "fsync", "short"])
def test_a_full_disk_fails_closed(tmp_path, monkeypatch, failure):
    ledger = cw.Ledger(PLAN, tmp_path / "run.ledger")
    ledger.reserve()
    real = os.write

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    if failure == "short":
        monkeypatch.setattr(os, "write", lambda file, line: real(file, line[:10]))
    else:
        monkeypatch.setattr(os, failure, full)
    with pytest.raises(errors.LedgerError, match="could not be written"):
        ledger.commit()
    monkeypatch.undo()
    with pytest.raises(errors.LedgerError, match="closed"):
        ledger.reserve()
    if failure == "short":
        assert cw.read_ledger(tmp_path / "run.ledger").charges == 1


def test_unreadable_places_are_refused(tmp_path):
    with pytest.raises(errors.LedgerError, match="cannot be opened"):
        cw.Ledger(PLAN, tmp_path)
    with pytest.raises(errors.LedgerError, match="cannot be read"):
        cw.read_ledger(tmp_path / "absent")


def test_the_file_is_json_lines_with_the_plan_in_its_head(tmp_path):
    path = tmp_path / "run.ledger"
    charged(path, 2)
    head, *rest = [json.loads(line) for line in path.read_text().splitlines()]
    assert head["plan"]["noise_multiplier"] == 1.0
    assert [entry["kind"] for entry in rest] == ["charge", "charge"]
    assert oct(path.stat().st_mode)[-3:] == "600"


def test_in_memory_says_so():
    assert "in memory" in repr(cw.Ledger(PLAN))
    assert not cw.Ledger(PLAN).persistent


def test_kill_9_never_loses_a_charge_that_was_released(tmp_path):
    """Children forked from a warm parent charge as fast as they can and are killed at a random instant."""
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.1, steps=10**6, expected_batch_size=10)
    path, seen = tmp_path / "run.ledger", random.Random(0)
    for _ in range(25):
        reader, writer = os.pipe()
        if not (child := os.fork()):
            ledger = cw.Ledger(plan, path)
            while True:
                ledger.reserve()
                os.write(writer, f"{ledger.commit()}\n".encode())
        os.close(writer)
        released = b""
        for _ in range(seen.randint(1, 15)):
            released += os.read(reader, 64)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while more := os.read(reader, 4096):
            released += more
        os.close(reader)
        last = int(released[: released.rfind(b"\n")].split(b"\n")[-1])
        assert cw.read_ledger(path).charges >= last


def test_an_emptied_removed_or_replaced_file_is_seen(tmp_path):
    path = tmp_path / "run.ledger"
    charged(path, 3)
    whole = path.read_bytes()
    path.write_bytes(b"")
    with pytest.raises(errors.LedgerError, match="does not begin with a plan"):
        cw.Ledger(PLAN, path)
    for harm in (lambda: path.unlink(), lambda: path.write_bytes(whole), lambda: path.write_bytes(whole[:-1])):
        path.write_bytes(whole)
        ledger = cw.Ledger(PLAN, path)
        ledger.reserve()
        ledger.commit()
        harm()
        with pytest.raises(errors.LedgerError, match="removed, replaced or changed"):
            ledger.reserve()


def test_threads_cannot_spend_beyond_the_plan(tmp_path):
    ledger = cw.Ledger(PLAN, tmp_path / "run.ledger")
    outcomes = []

    def spend():
        for _ in range(4):
            try:
                ledger.reserve()
                outcomes.append(ledger.commit())
            except errors.BudgetExhausted:
                outcomes.append(None)

    threads = [threading.Thread(target=spend) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(n for n in outcomes if n is not None) == [1, 2, 3, 4, 5]
    ledger.close()
    assert cw.read_ledger(tmp_path / "run.ledger").charges == 5


def test_an_interrupted_write_ends_the_run_and_counts(tmp_path, monkeypatch):
    ledger = cw.Ledger(PLAN, tmp_path / "run.ledger")
    ledger.reserve()

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ledger.commit()
    monkeypatch.undo()
    with pytest.raises(errors.LedgerError, match="closed"):
        ledger.reserve()
    assert cw.Ledger(PLAN, tmp_path / "run.ledger").charges == 1


def test_a_fork_between_reserve_and_commit_cannot_release_twice():
    ledger = cw.Ledger(PLAN)
    ledger.reserve()
    assert refused_in_a_fork(ledger.commit)
    assert ledger.commit() == 1
