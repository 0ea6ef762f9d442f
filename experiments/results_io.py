"""Result files: one JSON per run, in experiments/results unless told otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def save(name: str, content: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Write folder/name.json."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def load(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """Read folder/name.json, or say how to make it."""
    path = folder / f"{name}.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: make it with `python -m experiments run {name}`.")
    content: dict[str, Any] = json.loads(path.read_text())
    return content
