"""A ledger's file, read and verified. Nothing here writes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import LedgerError


def hashed(previous: str, body: dict[str, Any]) -> dict[str, Any]:
    """A line: its body, the hash of the line before it, and a hash of both."""
    text = json.dumps({**body, "previous": previous}, sort_keys=True)
    return {**body, "previous": previous, "hash": hashlib.sha256(text.encode()).hexdigest()}


_LOST = "a crash tore a line of the ledger: it counts as charged, and what it remarked, if anything, is lost"


@dataclass(frozen=True)
class LedgerState:
    """What a ledger file says: its head, the number of charges, and the hash of its last line."""

    head: dict[str, Any]
    charges: int
    looks: int
    last_hash: str
    torn: bool = False
    entries: tuple[dict[str, Any], ...] = field(default=(), repr=False)

    @property
    def notes(self) -> list[str]:
        """Remarks on record; of a torn line, that it may have held one."""
        found = [_LOST if e.get("torn") else e.get("text", e.get("remark")) for e in self.entries[1:]]
        return [text for text in found if text is not None] + [_LOST] * self.torn


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
        if entry != hashed(previous, body) or json.dumps(entry, sort_keys=True).encode() != line:
            raise LedgerError(
                f"Ledger {path}, line {number + 1}: the hash chain is broken, so the line, or one before it, was "
                "edited, removed or reordered. Restore the file from a backup: what was spent is not known otherwise."
            )
        words = entry.get("text") if entry.get("kind") == "note" else entry.get("remark", "")
        if number and not isinstance(words, str):
            raise LedgerError(f"Ledger {path}, line {number + 1}: a note without words.")
        if number and (entry.get("kind") not in ("charge", "look", "note") or entry.get("line") != number):
            raise LedgerError(f"Ledger {path}, line {number + 1}: not a charge.")
        entries.append(entry)
        previous = entry["hash"]
    if not entries or entries[0].get("kind") != "plan" or not isinstance(entries[0].get("plan"), dict):
        raise LedgerError(f"Ledger {path} does not begin with a plan: it is not a ledger, or its start was lost.")
    torn = [{"kind": "charge", "torn": True}] if tail else []
    return LedgerState(entries[0], *_counted([*entries, *torn]), previous, bool(tail), tuple(entries))


def _counted(entries: list[dict[str, Any]]) -> tuple[int, int]:
    """Charges and looks. A torn line may have been either, so it counts as both where the plan allows looks."""
    looks_allowed = bool(entries[0]["plan"].get("evaluations"))
    torn = sum(bool(entry.get("torn")) for entry in entries) if looks_allowed else 0
    kinds = [entry["kind"] for entry in entries]
    return kinds.count("charge"), kinds.count("look") + torn


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
