"""Every page of the docs, and README, runs as it stands; every link and every name in them exists.

A page is run as one program: its ```python blocks, in order, share one namespace, in an empty folder, with warnings as
errors. What a block says of itself:

    ```python                           runs
    ```python title="refused: Name"     must raise exactly Name, with the text of the ```text block that follows
    ```python title="Opacus"            is another library's code: compiled, not run
    ```text title="prints"              is what the block before it prints

In such texts `…` stands for anything, and white space does not count.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
import yaml

import clipwise
from clipwise.cli import app

ROOT = Path(__file__).parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", *DOCS]
CODE = [path for path in PAGES if "```python" in path.read_text()]


@dataclass(frozen=True)
class Block:
    """One fenced block; `line` is the number of its opening fence, from 0."""

    line: int
    language: str
    title: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def blocks_of(page: str) -> list[Block]:
    found, opened = [], None
    lines = page.split("\n")
    for number, line in enumerate(lines):
        assert not re.match(r"\s+```", line), f"line {number + 1}: an indented block would not be seen here"
        if opened is None and line.startswith("```"):
            opened = number
        elif opened is not None and line == "```":
            language, _, rest = lines[opened][3:].partition(" ")
            title = re.search(r'title="([^"]*)"', rest)
            found.append(Block(opened, language, title[1] if title else "", tuple(lines[opened + 1 : number])))
            opened = None
    assert opened is None, f"the block of line {opened} does not end"
    return found


def program_of(page: str) -> str:
    """The page as a program with the same line numbers: all but the code is blank, fences become checks."""
    program = [""] * len(page.split("\n"))
    program[0] = "import torch; from test_docs import prints, refused; torch.manual_seed(0); torch.set_num_threads(1)"
    blocks = blocks_of(page)
    for block, after in zip(blocks, [*blocks[1:], Block(0, "", "", ())], strict=True):
        if block.language != "python" or block.title == "Opacus":
            continue
        kind, _, name = block.title.partition(": ")
        check = ""
        if kind == "refused":
            assert after.language == "text", f"line {block.line + 1}: the page does not show what {name} says"
            check = f"with refused({name!r}, {after.text!r}):"
        elif (after.language, after.title) == ("text", "prints"):
            check = f"with prints({after.text!r}):"
        program[block.line] = check or program[block.line]
        code = textwrap.indent(block.text, "    ") if check else block.text
        program[block.line + 1 : block.line + 1 + len(block.lines)] = code.split("\n")
    return "\n".join(program)


def check_text(shown: str, said: str) -> None:
    """`…` in what the page shows is anything."""
    pattern = ".*?".join(re.escape(" ".join(part.split())) for part in shown.split("…"))
    plain = " ".join(said.split())
    assert re.fullmatch(r"\s*".join(pattern.split("\\ ")), plain), f"the page shows\n{shown}\nbut it is\n{said}"


@contextlib.contextmanager
def refused(name: str, message: str) -> Iterator[None]:
    """The block raises exactly this error, with the message that the page shows."""
    raised: Exception | None = None
    try:
        yield
    except Exception as error:
        raised = error
    assert raised is not None, f"nothing was refused; {name} expected"
    assert type(raised).__name__ == name, f"{type(raised).__name__}, not {name}: {raised}"
    check_text(message, str(raised))


@contextlib.contextmanager
def prints(expected: str) -> Iterator[None]:
    """The block prints what the page shows."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        yield
    check_text(expected, out.getvalue())


# -- code ---------------------------------------------------------------------------------------------------------


WARNINGS = "error,ignore::FutureWarning:lightning.pytorch.utilities._pytree"  # theirs, not ours


@pytest.mark.parametrize("path", CODE, ids=lambda p: p.stem)
def test_code_runs(path, tmp_path):
    script = tmp_path / f"{path.stem.replace('-', '_')}_page.py"
    script.write_text(program_of(path.read_text()))
    settings = {"PYTHONPATH": str(Path(__file__).parent), "PYTHONWARNINGS": WARNINGS}
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env={**os.environ, **settings}, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{path.name} (the line numbers are those of the page)\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("path", CODE, ids=lambda p: p.stem)
def test_code_of_other_libraries_compiles(path):
    for block in blocks_of(path.read_text()):
        if block.language == "python" and block.title == "Opacus":
            compile(block.text, f"{path.name}:{block.line + 1}", "exec")


def test_a_page_that_shows_something_else_is_seen():
    for shown in ("a mean is refused", "one loss … example"):
        check_text(shown, shown.replace("…", "per"))
    with pytest.raises(AssertionError, match="but it is"):
        check_text("one loss", "one loss per example")
    with pytest.raises(AssertionError, match="nothing was refused"), refused("ValueError", ""):
        pass
    with pytest.raises(AssertionError, match="TypeError, not ValueError"), refused("ValueError", "no"):
        raise TypeError("no")
    page = '# T\n```python title="refused: ValueError"\nint("x")\n```\n```text\ninvalid literal …\n```\n'
    exec(compile(program_of(page), "page", "exec"), {})
    with pytest.raises(AssertionError, match="but it is"):
        exec(compile(program_of(page.replace("invalid", "valid")), "page", "exec"), {})


def command_lines() -> list[str]:
    languages = ("", "bash", "console")
    blocks = [b for path in PAGES for b in blocks_of(path.read_text()) if b.language in languages]
    return sorted({line.split("#")[0].strip() for b in blocks for line in b.lines if line.startswith("clipwise ")})


@pytest.mark.parametrize("line", command_lines())
def test_commands_and_options_exist(line):
    command, words = typer.main.get_command(app), line.split()[1:]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts}
    assert not getattr(command, "commands", None), f"{line}: no such command"
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known | {"--help"}


# -- links and names ----------------------------------------------------------------------------------------------


def without_code(page: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE))


def anchors_of(page: str) -> set[str]:
    """As GitHub and the site make them, lower case with words and hyphens only; and the names of the reference."""
    page = re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_relative_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{path.name}: {target}"
        if path.parent.name == "docs":
            assert there.is_relative_to(path.parent), f"{path.name}: {target} is not a part of the site"
        if anchor:
            assert anchor in anchors_of(there.read_text()), f"{path.name}: {target}"


def pages_in(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for item in (nav.values() if isinstance(nav, dict) else nav) for page in pages_in(item)]


def test_the_site_has_every_page_and_no_other():
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), yaml.BaseLoader)  # takes Python tags as plain values
    listed = pages_in(site["nav"])
    assert len(listed) == len(set(listed))
    assert set(listed) == {path.name for path in DOCS}
    assert site["strict"] == "true"


def test_the_reference_has_every_public_name():
    listed = re.findall(
        r"^::: clipwise(?:\.privatize)?\.(\w+)$", (ROOT / "docs/reference.md").read_text(), re.MULTILINE
    )
    public = re.findall(r"import \w+ as (\w+)$", Path(clipwise.__file__).read_text(), re.MULTILINE)
    assert sorted(listed) == sorted({*public, "errors"})
