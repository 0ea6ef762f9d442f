"""The code and the numbers of the README; test_docs.py has the pages."""

from __future__ import annotations

import re
from pathlib import Path

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
