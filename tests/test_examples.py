"""Every example runs, as its first lines say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
FEW = {"tied_lstm.py": ["--steps", "20"]}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_it_runs(path):
    assert f"python examples/{path.name}" in path.read_text()
    done = subprocess.run([sys.executable, path, *FEW[path.name]], capture_output=True, text=True, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr[-2000:]
    if path.name == "tied_lstm.py":
        before, after = map(float, re.findall(r"([\d.]+) (?:before|after)", done.stdout))
        assert after < before - 0.5
