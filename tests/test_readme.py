"""The code of README and docs runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_ten_lines_run(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "one example" in printed


def test_numbers_come_from_the_committed_result_file():
    import json

    results = json.loads((Path(__file__).parent.parent / "benchmarks/results/step.json").read_text())["results"]
    for name, found in results.items():
        assert f"| {name} | {found['plain_ms']:.0f} ms | **{found['clipwise']:.2f}×**" in README


DOCS = {
    f"{path.name}-{number}": code
    for path in sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL))
}


@pytest.mark.parametrize("name", DOCS)
def test_code_of_the_docs_runs(name, tmp_path):
    (tmp_path / "example.py").write_text(DOCS[name])
    done = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_page_of_the_docs_is_linked():
    for path in (Path(__file__).parent.parent / "docs").glob("*.md"):
        assert f"docs/{path.name}" in README, path.name
