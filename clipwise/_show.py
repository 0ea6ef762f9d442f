"""How ε and δ are written: never smaller than they are."""

from __future__ import annotations

import math


def shown_epsilon(epsilon: float) -> str:
    """ε with four decimals (four digits below 0.01), rounded up.

    >>> shown_epsilon(2.9999375), shown_epsilon(0.00011404)
    ('3.0000', '0.0001141')
    """
    if not math.isfinite(epsilon) or epsilon <= 0:
        return f"{epsilon:g}"
    digits = 4 if epsilon >= 0.01 else 3 - math.floor(math.log10(epsilon))
    scaled = math.ceil(epsilon * 10**digits - 1e-9)
    return f"{scaled / 10**digits:.{digits}f}"


def shown_delta(delta: float) -> str:
    """δ in short, if that is exact, else in full.

    >>> shown_delta(1e-5), shown_delta(1.2345649e-5)
    ('1e-05', '1.2345649e-05')
    """
    short = f"{delta:g}"
    return short if float(short) == delta else repr(delta)
