"""The ledger: an append-only, hash-chained record of what has been spent.

A JSON-lines file. Line 0 holds the plan; every further line is one charge. A charge is written and
fsynced BEFORE its release, so whatever happens afterwards, the ledger's ε is at least what was
released. Each line carries the hash of the line before it: an edited, removed or reordered line is
seen. A torn last line (a crash in the middle of a write) counts as charged. One process at a time.
What a single file cannot show is that it was put back to an older state of itself, whole lines gone
from its end: only a checkpoint, which remembers the ledger's last line, sees that.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any, Literal, Protocol

from ._show import shown_delta, shown_epsilon
from .errors import BudgetExhausted, LedgerError, PlanMismatch
from .ledger_file import LedgerState, hashed, read_ledger

VERSION = 1
Kind = Literal["charge", "look"]
_HERE = threading.local()  # charges that this thread has made, to whatever ledger
_OPEN: weakref.WeakValueDictionary[str, Ledger] = weakref.WeakValueDictionary()


class Budget(Protocol):
    """What a ledger guards: the plan of a run, or of a search over runs."""

    @property
    def most_charges(self) -> int:
        """How many charges are allowed."""

    @property
    def epsilon(self) -> float:
        """ε of all of them."""

    @property
    def delta(self) -> float:
        """δ."""

    @property
    def accountant(self) -> str:
        """Whose ε it is."""

    @property
    def digest(self) -> str:
        """A fingerprint of every public number."""

    @property
    def most_looks(self) -> int:
        """How many evaluations on private records are allowed."""

    def epsilon_after(self, steps: int, looks: int = 0) -> float:
        """ε of the first `steps` charges and `looks` evaluations."""

    def as_dict(self) -> dict[str, Any]:
        """All public numbers."""


def charges_of_this_thread() -> int:
    """How many charges this thread has made so far, to any ledger."""
    return int(getattr(_HERE, "charges", 0))


class Ledger:
    """The gate: holds the budget and refuses. With `path=None` it lives in memory, and a crash forgets it.

    Guarantee: `commit` returns only after the charge is on disk; `reserve` refuses a charge beyond the plan
    before any data is touched.

    >>> from clipwise import Plan
    >>> plan = Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.1, steps=1, expected_batch_size=10)
    >>> ledger = Ledger(plan)
    >>> ledger.reserve(); ledger.commit()
    1
    >>> ledger.reserve()
    Traceback (most recent call last):
    clipwise.errors.BudgetExhausted: Budget exhausted: step 2 would reach epsilon=... > ... (pld, delta=1e-05). ...
    """

    def __init__(
        self,
        plan: Budget,
        path: str | Path | None = None,
        assertions: dict[str, Any] | None = None,
        noise: str = "secure",
    ) -> None:
        """Open or create. `assertions` are what the user vouches for; `noise` says how values are noised."""
        self.plan = plan
        self.path = None if path is None else Path(path).absolute()  # the same file, wherever the process goes
        self._given = "memory" if path is None else str(path)
        self._file: int | None = None
        self._reserved = {"charge": 0, "look": 0}
        self._lock = threading.RLock()
        self._size = 0
        self._process = os.getpid()
        self._closing: weakref.finalize[..., Any] | None = None
        self._lines = 1
        self.notes: list[str] = []
        head = {"kind": "plan", "version": VERSION, "plan": plan.as_dict(), "digest": plan.digest}
        self.head = hashed("", {**head, "assertions": assertions or {}, "noise": noise})
        self._hash = self.head["hash"]
        self.charges = self.looks = 0
        if self.path is not None:
            self._open()

    @property
    def persistent(self) -> bool:
        """Whether the ledger survives this process."""
        return self.path is not None

    @property
    def spent(self) -> float:
        """ε of everything charged so far, never understated."""
        return self.plan.epsilon_after(self.charges, self.looks)

    def _open(self) -> None:
        assert self.path is not None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self.path.exists():
                self._create()
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise LedgerError(f"Ledger {self.path} cannot be opened for writing: {error.strerror}.") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            mine = str(self.path.resolve()) in _OPEN
            os.close(self._file)
            self._file = None
            who = "an earlier run in this process (close it: training.ledger.close())" if mine else "another process"
            raise LedgerError(
                f"Ledger {self.path} is in use by {who}. Two runs on one ledger would each see half of what is spent. "
                "Wait for the other, or give this run a ledger of its own."
            ) from error
        try:
            self._resume(read_ledger(self.path))
            self._size = os.fstat(self._file).st_size
        except BaseException:
            self.close()
            raise
        _OPEN[str(self.path.resolve())] = self
        self._closing = weakref.finalize(self, os.close, self._file)  # a run that is gone holds no lock
        self._closing.atexit = False

    def _create(self) -> None:
        """A new ledger appears with its head or not at all: an empty file is never a fresh one."""
        assert self.path is not None
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(json.dumps(self.head, sort_keys=True).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(draft, self.path)
        except FileExistsError:
            pass  # another process was first; its head is checked like any other
        finally:
            os.unlink(draft)
        self._sync_folder()

    def _resume(self, state: LedgerState) -> None:
        if state.head.get("digest") != self.plan.digest:
            raise PlanMismatch(
                f"Ledger {self.path} belongs to another plan ({_difference(state.head.get('plan', {}), self.plan)}). "
                "What was spent under one plan cannot be charged to another: use the same plan, or a new ledger."
            )
        if state.head.get("assertions") != self.head["assertions"]:
            raise PlanMismatch(
                f"Ledger {self.path} was begun with other assertions ({state.head.get('assertions')}, now "
                f"{self.head['assertions']}): sampling, noise and seed must stay what they were."
            )
        if state.head.get("noise") != self.head["noise"]:
            raise PlanMismatch(
                f"Ledger {self.path} was begun with noise={state.head.get('noise')!r}, now {self.head['noise']!r}: one "
                "statement covers all of its steps, so the noise must stay what it was."
            )
        self.head, self._hash, self.charges, self.looks = state.head, state.last_hash, state.charges, state.looks
        self._lines = len(state.entries)
        if state.torn:
            self._repair(state)
        self.notes = state.notes

    def _repair(self, state: LedgerState) -> None:
        """Replace a torn last line by a whole one that says so: it counts as charged either way."""
        assert self._file is not None
        assert self.path is not None
        whole = sum(len(json.dumps(e, sort_keys=True).encode()) + 1 for e in state.entries)
        entry = hashed(self._hash, {"kind": "charge", "line": self._lines, "torn": True})
        line = json.dumps(entry, sort_keys=True).encode() + b"\n"
        # Written over the torn bytes, then cut: at no instant does the file hold fewer charges than before.
        with open(self.path, "r+b") as file:
            file.seek(whole)
            file.write(line)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
        self._hash, self._lines = entry["hash"], self._lines + 1

    def _sync_folder(self) -> None:
        assert self.path is not None
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _write(self, entry: dict[str, Any]) -> None:
        """Append one line and make it durable, or fail closed."""
        assert self._file is not None
        line = json.dumps(entry, sort_keys=True).encode() + b"\n"
        try:
            if os.write(self._file, line) != len(line):
                raise OSError("short write")
            os.fsync(self._file)
            self._size += len(line)
        except OSError as error:
            self.close()
            raise LedgerError(
                f"Ledger {self.path} could not be written ({error}). Without a durable charge nothing is released; "
                "this run is over. Make room on the disk and resume."
            ) from error
        except BaseException:  # interrupted: the line may be on disk, so this object no longer knows its last line
            self.close()
            raise

    def _check(self) -> None:
        """This process, an open file, and the same file that was opened, as long as it was left."""
        if os.getpid() != self._process:
            raise LedgerError(
                "This ledger belongs to the parent process: after a fork, both would charge the same file. "
                "Open a ledger of its own in the child."
            )
        if self.path is None:
            return
        if self._file is None:
            raise LedgerError(f"Ledger {self.path} is closed; nothing can be charged to it.")
        try:
            there, mine = os.stat(self.path), os.fstat(self._file)
            same = (there.st_dev, there.st_ino, there.st_size) == (mine.st_dev, mine.st_ino, self._size)
        except OSError:
            same = False
        if not same:
            self.close()
            raise LedgerError(
                f"Ledger {self.path} was removed, replaced or changed while the run was using it, so what is on disk "
                "is no longer what was spent. Restore it; this run is over."
            )

    def reserve(self, kind: Kind = "charge") -> None:
        """Refuse, before the data is touched, a charge (or a look) that the plan does not allow."""
        with self._lock:
            self._check()
            used, most = {
                "charge": (self.charges, self.plan.most_charges),
                "look": (self.looks, self.plan.most_looks),
            }[kind]
            if used + self._reserved[kind] >= most:
                raise BudgetExhausted(self._exhausted(kind))
            self._reserved[kind] += 1

    def _exhausted(self, kind: Kind) -> str:
        if kind == "look":
            return (
                f"The plan allows {self.plan.most_looks} evaluation(s) on private records, and no more: each spends "
                "privacy. Plan(evaluations=…) pays for them before the run begins; public records cost nothing."
            )
        step = self.charges + self._reserved[kind] + 1
        reached = self.plan.epsilon_after(step, max(self.looks, self.plan.most_looks))
        return (
            f"Budget exhausted: step {step} would reach epsilon={shown_epsilon(reached)} > "
            f"{shown_epsilon(self.plan.epsilon)} ({self.plan.accountant}, delta={shown_delta(self.plan.delta)}). "
            "Stop here, or plan more steps before the run begins."
        )

    def commit(self, kind: Kind = "charge", **details: str) -> int:
        """Charge the reserved step or look; returns its number once the charge is durable. A `remark` is a note."""
        with self._lock:
            self._check()
            if not self._reserved[kind]:
                raise LedgerError("commit without reserve: a step must be allowed before it is charged.")
            self._reserved[kind] -= 1
            self._append({"kind": kind, **details})
            self.notes += [details["remark"]] if "remark" in details else []
            _HERE.charges = charges_of_this_thread() + 1
            if kind == "look":
                self.looks += 1
                return self.looks
            self.charges += 1
            return self.charges

    def _append(self, body: dict[str, Any]) -> None:
        entry = hashed(self._hash, {**body, "line": self._lines})
        if self.persistent:
            self._write(entry)
        self._hash, self._lines = entry["hash"], self._lines + 1

    @property
    def position(self) -> dict[str, Any]:
        """How far this ledger has come: its number of lines and the hash of the last, for checkpoints."""
        return {"lines": self._lines, "hash": self._hash}

    def holds(self, position: dict[str, Any]) -> bool:
        """Whether this ledger passed through `position`: an older copy of it did not."""
        if self.path is None or position["lines"] > self._lines:
            return False
        return bool(read_ledger(self.path).entries[position["lines"] - 1]["hash"] == position["hash"])

    def note(self, text: str) -> None:
        """Put a remark on record, such as a check that lies outside the guarantee."""
        with self._lock:
            self._check()
            self._append({"kind": "note", "text": text})
            self.notes.append(text)

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            if self._closing is None or self._closing.detach() is not None:
                os.close(self._file)
            self._file = None
            _OPEN.pop(str(self.path.resolve()) if self.path else "", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        """Copies of a run charge the same ledger."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A pickled ledger would be a second one."""
        raise LedgerError(
            "A ledger cannot be pickled: there must be one record of what is spent. Pass its path instead."
        )

    def __repr__(self) -> str:
        """Where it lives and what it holds."""
        where = self._given if self.persistent else "in memory, lost when this process ends"
        return f"Ledger({where}; {self.charges} of {self.plan.most_charges} steps charged)"


def _difference(written: dict[str, Any], plan: Budget) -> str:
    mine = plan.as_dict()
    changed = [f"{k}: {written.get(k)!r} there, {mine[k]!r} here" for k in mine if written.get(k) != mine[k]]
    return "; ".join(changed) or "unknown differences"
