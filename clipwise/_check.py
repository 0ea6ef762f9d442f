"""One wording for bad numbers. Each check takes exactly one keyword and returns its value as a float or int."""

from __future__ import annotations

import math
from numbers import Integral, Real


def _one(value: dict[str, object]) -> tuple[str, object]:
    ((name, given),) = value.items()
    return name, given


def _real(name: str, given: object, wanted: str) -> float:
    if isinstance(given, bool) or not isinstance(given, Real):
        raise TypeError(f"{name} must be {wanted}, got {given!r} of type {type(given).__name__}.")
    return float(given)


def positive(**value: object) -> float:
    """A finite number above zero.

    >>> positive(clip_norm=1)
    1.0
    >>> positive(clip_norm=-1)
    Traceback (most recent call last):
    ValueError: clip_norm must be a finite number above 0, got -1.
    """
    name, given = _one(value)
    x = _real(name, given, "a number above 0")
    if not (math.isfinite(x) and x > 0):
        raise ValueError(f"{name} must be a finite number above 0, got {given!r}.")
    return x


def probability(**value: object) -> float:
    """A number in (0, 1]."""
    name, given = _one(value)
    x = _real(name, given, "a probability in (0, 1]")
    if not 0 < x <= 1:
        raise ValueError(f"{name} must be a probability in (0, 1], got {given!r}.")
    return x


def open_unit(**value: object) -> float:
    """A number strictly between 0 and 1."""
    name, given = _one(value)
    x = _real(name, given, "a number strictly between 0 and 1")
    if not 0 < x < 1:
        raise ValueError(f"{name} must lie strictly between 0 and 1, got {given!r}.")
    return x


def count(**value: object) -> int:
    """A whole number of at least one.

    >>> count(steps=0)
    Traceback (most recent call last):
    ValueError: steps must be a whole number of at least 1, got 0.
    """
    name, given = _one(value)
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise TypeError(f"{name} must be a whole number of at least 1, got {given!r} of type {type(given).__name__}.")
    if given < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {given!r}.")
    return int(given)


def one_of(choices: tuple[str, ...], **value: object) -> str:
    """One of a few words."""
    name, given = _one(value)
    if not isinstance(given, str) or given not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {given!r}.")
    return given
