"""Runs tests/interpreted: GPU kernels in Triton's interpreter, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import clipwise

ROOT = Path(__file__).parent.parent
TRITON = ROOT / ".kernels"
needs_triton = pytest.mark.skipif(not (TRITON / "triton").is_dir(), reason="needs Triton in .kernels (make kernels)")


def interpret(part: str, *options: str) -> None:
    here = Path(clipwise.__file__).parents[1]  # a mutant's copy, maybe
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(map(str, (TRITON, here)))}
    plain = ["-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    command = [sys.executable, "-P", "-m", "pytest", *plain, *options]
    done = subprocess.run(
        [*command, f"tests/interpreted/test_{part}.py"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
