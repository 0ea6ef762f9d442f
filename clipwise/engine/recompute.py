"""Activation checkpointing, switched off while the tape records.

A checkpointed function runs again in the backward pass, where the tape cannot see it. The tape keeps the inputs of all
recorded ops anyway, so there is little memory to save: inside a tape the function simply runs once. What is switched
are two names that torch.utils.checkpoint looks up when it is called; another thread that meets them meanwhile gets the
same values, with more memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint as checkpointing

_LOCK, _DEPTH = threading.Lock(), [0]
_ORIGINALS: dict[str, Any] = {}


class _RunOnce:
    """In place of the reentrant kind."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _nothing_before_or_after(*args: Any, **kwargs: Any) -> Iterator[None]:
    """In place of the other kind: the caller runs the function between two `next`s."""
    yield


_PLAIN = {"CheckpointFunction": _RunOnce, "_checkpoint_without_reentrant_generator": _nothing_before_or_after}


@contextmanager
def no_recompute() -> Iterator[None]:
    """Checkpointed functions run once, under both kinds of torch.utils.checkpoint."""
    with _LOCK:
        _DEPTH[0] += 1
        if _DEPTH[0] == 1:
            for name, plain in _PLAIN.items():
                _ORIGINALS[name] = getattr(checkpointing, name)
                setattr(checkpointing, name, plain)
    try:
        yield
    finally:
        with _LOCK:
            _DEPTH[0] -= 1
            if not _DEPTH[0]:
                for name, original in _ORIGINALS.items():
                    setattr(checkpointing, name, original)
