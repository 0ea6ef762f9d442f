"""Whether the engine runs under a tracer: then nothing may depend on values, only on shapes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_HERE = threading.local()


def is_static() -> bool:
    """Under a tracer, in this thread."""
    return bool(getattr(_HERE, "static", False))


@contextmanager
def static() -> Iterator[None]:
    """While tracing."""
    before = is_static()
    _HERE.static = True
    try:
        yield
    finally:
        _HERE.static = before
