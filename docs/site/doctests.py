"""For mkdocstrings: the doctests of docstrings become code blocks, which Markdown would show as quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>>.*?(?=^[ \t]*$|\Z)", re.MULTILINE | re.DOTALL)


class Doctests(griffe.Extension):
    """Fences every run of lines that begins with `>>>`."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of `obj`, if it has one."""
        if obj.docstring is not None:
            text = obj.docstring.value
            obj.docstring.value = _DOCTEST.sub(lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", text)
