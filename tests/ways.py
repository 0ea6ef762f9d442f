"""With native code and without it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1]))
from clipwise import chacha_cpu, native
from hatch_build import COMPILERS

CHECKS = (native.library, native.has_gram, native.has_products, chacha_cpu.is_native)
WAYS = ("native", "without")


def forget() -> None:
    """What was found is asked anew."""
    for check in CHECKS:
        check.cache_clear()


@contextmanager
def by(way: str) -> Iterator[None]:
    """One of WAYS; skipped where there is no native code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLIPWISE_NATIVE", "0" if way == "without" else "1")
        forget()
        if way == "native" and not (native.has_gram() and native.has_products() and chacha_cpu.is_native()):
            if any(map(shutil.which, COMPILERS)):
                pytest.fail("There is a compiler, but no native code that is up to date: `make setup` builds it.")
            pytest.skip("no native code here")
        try:
            yield
        finally:
            patch.undo()
            forget()
