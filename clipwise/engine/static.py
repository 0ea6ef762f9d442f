"""Whether the engine runs under a tracer: then nothing may depend on values, only on shapes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_HERE = threading.local()


def is_static() -> bool:
    """Under a tracer, in this thread."""
    return bool(getattr(_HERE, "static", False))


def assume() -> None:
    """A value could not be looked at: whoever traces must run the same once where it can be."""
    _HERE.assumed = True


def take_assumed() -> bool:
    """Whether something was assumed since the last time this was asked, in this thread."""
    found, _HERE.assumed = bool(getattr(_HERE, "assumed", False)), False
    return found


@contextmanager
def static() -> Iterator[None]:
    """While tracing."""
    before = is_static()
    _HERE.static = True
    try:
        yield
    finally:
        _HERE.static = before
