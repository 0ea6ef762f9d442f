"""The ledger: an append-only, hash-chained record of what has been spent.

A JSON-lines file. Line 0 holds the plan; every further line is one charge. A charge is written and
fsynced BEFORE its release, so whatever happens afterwards, the ledger's ε is at least what was
released. Each line carries the hash of the line before it: an edited, truncated or reordered line is
seen. A torn last line (a crash in the middle of a write) counts as charged. One process at a time.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import BudgetExhausted, LedgerError, PlanMismatch
from .plan import Plan

VERSION = 1


def _hashed(previous: str, body: dict[str, Any]) -> dict[str, Any]:
    text = json.dumps({**body, "previous": previous}, sort_keys=True)
    return {**body, "previous": previous, "hash": hashlib.sha256(text.encode()).hexdigest()}


@dataclass(frozen=True)
class LedgerState:
    """What a ledger file says: its head, the number of charges, and the hash of its last line."""

    head: dict[str, Any]
    charges: int
    last_hash: str
    torn: bool = False
    entries: tuple[dict[str, Any], ...] = field(default=(), repr=False)


def read_ledger(path: str | Path) -> LedgerState:
    """Read and verify a ledger file; raise LedgerError if a single byte is not as it was written.

    A torn last line counts as one charge.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise LedgerError(f"Ledger {path} cannot be read: {error.strerror}. Nothing is released without it.") from error
    lines = raw.split(b"\n")
    tail = lines.pop()
    entries: list[dict[str, Any]] = []
    previous = ""
    for number, line in enumerate(lines):
        entry = _parsed(path, number, line)
        body = {key: value for key, value in entry.items() if key not in ("previous", "hash")}
        if entry != _hashed(previous, body) or json.dumps(entry, sort_keys=True).encode() != line:
            raise LedgerError(
                f"Ledger {path}, line {number + 1}: the hash chain is broken, so the line, or one before it, was "
                "edited, removed or reordered. Restore the file from a backup: what was spent is not known otherwise."
            )
        if number and (entry.get("kind") not in ("charge", "note") or entry.get("line") != number):
            raise LedgerError(f"Ledger {path}, line {number + 1}: not a charge.")
        entries.append(entry)
        previous = entry["hash"]
    if not entries or entries[0].get("kind") != "plan":
        raise LedgerError(f"Ledger {path} does not begin with a plan: it is not a ledger, or its start was lost.")
    charges = sum(entry["kind"] == "charge" for entry in entries) + bool(tail)
    return LedgerState(entries[0], charges, previous, bool(tail), tuple(entries))


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict):
        raise LedgerError(
            f"Ledger {path}, line {number + 1} is not valid JSON, so what was spent cannot be known. "
            "Restore the file from a backup."
        )
    return entry


class Ledger:
    """The gate: holds the budget and refuses. With `path=None` it lives in memory, and a crash forgets it.

    Guarantee: `commit` returns only after the charge is on disk; `reserve` refuses a charge beyond the plan
    before any data is touched.

    >>> plan = Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.1, steps=1, expected_batch_size=10)
    >>> ledger = Ledger(plan)
    >>> ledger.reserve(); ledger.commit()
    1
    >>> ledger.reserve()
    Traceback (most recent call last):
    clipwise.errors.BudgetExhausted: Budget exhausted: step 2 would reach epsilon=... > ... (pld, delta=1e-05). ...
    """

    def __init__(self, plan: Plan, path: str | Path | None = None, assertions: dict[str, Any] | None = None) -> None:
        """Open or create. `assertions` are what the user vouches for (own sampler, fast noise, a seed)."""
        self.plan = plan
        self.path = None if path is None else Path(path)
        self._file: int | None = None
        self._reserved = False
        self._process = os.getpid()
        self._lines = 1
        self.notes: list[str] = []
        head = {"kind": "plan", "version": VERSION, "plan": plan.as_dict(), "digest": plan.digest}
        self.head = _hashed("", {**head, "assertions": assertions or {}})
        self._hash = self.head["hash"]
        self.charges = 0
        if self.path is not None:
            self._open()

    @property
    def persistent(self) -> bool:
        """Whether the ledger survives this process."""
        return self.path is not None

    @property
    def spent(self) -> float:
        """ε of everything charged so far, never understated."""
        return self.plan.epsilon_after(self.charges)

    def _open(self) -> None:
        assert self.path is not None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise LedgerError(f"Ledger {self.path} cannot be opened for writing: {error.strerror}.") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise LedgerError(
                f"Ledger {self.path} is in use by another process. Two runs on one ledger would each see half of what "
                "is spent. Wait for the other, or give this run a ledger of its own."
            ) from error
        try:
            if os.fstat(self._file).st_size == 0:
                self._write(self.head)
                self._sync_folder()
            else:
                self._resume(read_ledger(self.path))
        except Exception:
            self.close()
            raise

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
        self.head, self._hash, self.charges = state.head, state.last_hash, state.charges
        self._lines = len(state.entries)
        self.notes = [entry["text"] for entry in state.entries if entry["kind"] == "note"]
        if state.torn:
            self._repair(state)

    def _repair(self, state: LedgerState) -> None:
        """Replace a torn last line by a whole one that says so: it counts as charged either way."""
        assert self._file is not None
        assert self.path is not None
        whole = sum(len(json.dumps(e, sort_keys=True).encode()) + 1 for e in state.entries)
        entry = _hashed(self._hash, {"kind": "charge", "line": self._lines, "torn": True})
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
        except OSError as error:
            self.close()
            raise LedgerError(
                f"Ledger {self.path} could not be written ({error}). Without a durable charge nothing is released; "
                "this run is over. Make room on the disk and resume."
            ) from error

    def reserve(self) -> None:
        """Refuse, before the data is touched, a charge that the plan does not allow."""
        if self.persistent and self._file is None:
            raise LedgerError(f"Ledger {self.path} is closed; nothing can be charged to it.")
        if os.getpid() != self._process:
            raise LedgerError(
                "This ledger belongs to the parent process: after a fork, both would charge the same file. "
                "Open a ledger of its own in the child."
            )
        if self.charges >= self.plan.steps:
            step = self.charges + 1
            raise BudgetExhausted(
                f"Budget exhausted: step {step} would reach epsilon={self.plan.epsilon_after(step):.4f} > "
                f"{self.plan.epsilon:.4f} ({self.plan.accountant}, delta={self.plan.delta:g}). "
                "Stop here, or plan more steps before the run begins."
            )
        self._reserved = True

    def commit(self) -> int:
        """Charge the reserved step; returns its number once the charge is durable."""
        if not self._reserved:
            raise LedgerError("commit without reserve: a step must be allowed before it is charged.")
        self._reserved = False
        entry = _hashed(self._hash, {"kind": "charge", "line": self._lines})
        if self.persistent:
            self._write(entry)
        self._hash, self._lines, self.charges = entry["hash"], self._lines + 1, self.charges + 1
        return self.charges

    def note(self, text: str) -> None:
        """Put a remark on record, such as a check that lies outside the guarantee."""
        self.notes.append(text)
        entry = _hashed(self._hash, {"kind": "note", "line": self._lines, "text": text})
        if self.persistent:
            self._write(entry)
        self._hash, self._lines = entry["hash"], self._lines + 1

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

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
        where = str(self.path) if self.persistent else "in memory, lost when this process ends"
        return f"Ledger({where}; {self.charges} of {self.plan.steps} steps charged)"


def _difference(written: dict[str, Any], plan: Plan) -> str:
    mine = plan.as_dict()
    changed = [f"{k}: {written.get(k)!r} there, {mine[k]!r} here" for k in mine if written.get(k) != mine[k]]
    return "; ".join(changed) or "unknown differences"
