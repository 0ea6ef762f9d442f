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
    try:
        return float(given)
    except OverflowError:
        return math.inf


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


def between(low: float, high: float, **value: object) -> float:
    """A number in [low, high]: outside, floating-point arithmetic no longer does what the formulas say.

    >>> between(1e-15, 1e15, clip_norm=1e20)
    Traceback (most recent call last):
    ValueError: clip_norm must lie in [1e-15, 1e+15], got 1e+20.
    """
    ((name, given),) = value.items()
    x = positive(**value)
    if not low <= x <= high:
        raise ValueError(f"{name} must lie in [{low:g}, {high:g}], got {given!r}.")
    return x


def clip_norm(**value: object) -> float:
    """A clip norm, in the range in which sums of float32 neither overflow nor lose their bound."""
    return between(1e-15, 1e15, **value)


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


def count(minimum: int = 1, **value: object) -> int:
    """A whole number of at least `minimum`.

    >>> count(steps=0)
    Traceback (most recent call last):
    ValueError: steps must be a whole number of at least 1, got 0.
    """
    name, given = _one(value)
    if isinstance(given, bool) or not isinstance(given, Integral):
        kind = type(given).__name__
        raise TypeError(f"{name} must be a whole number of at least {minimum}, got {given!r} of type {kind}.")
    if given < minimum:
        raise ValueError(f"{name} must be a whole number of at least {minimum}, got {given!r}.")
    return int(given)


def seed_or_none(**value: object) -> int | None:
    """A whole number from 0 to 2¹²⁸ − 1, or None."""
    name, given = _one(value)
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, Integral) or not 0 <= int(given) < 2**128:
        raise ValueError(f"{name} must be a whole number from 0 to 2**128 - 1, or None, got {given!r}.")
    return int(given)


def one_of(choices: tuple[str, ...], **value: object) -> str:
    """One of a few words."""
    name, given = _one(value)
    if not isinstance(given, str) or given not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {given!r}.")
    return given
