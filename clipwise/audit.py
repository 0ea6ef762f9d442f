"""Empirical lower bounds on ε: what an attacker who sees everything but the noise can show about a release.

An audit can refute a claim and never prove one: "audited ≤ claimed" is what must hold, and how near the two are says
how sharp the audit is. Three kinds:

- `audit_draws`: one release, many times, with and without one record, white-box. The sharpest: a Gaussian shift is
  measured, so its μ bounds ε at every δ. audit_training.py makes such draws with a real model, rule and threshold.
- `clopper_pearson_epsilon`: any test with counted errors.
- `audit_run`: canaries, each in or out by a coin, in a single training run; ε from how many coins can be guessed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ._check import count, open_unit, positive
from .accounting.accountants import gaussian_epsilon

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class Audit:
    """What an audit found, in public numbers.

    Attributes:
        kind: which audit.
        lower: the lower bound on ε, right with probability 1 − `alpha`.
        claimed: the ε of the accountant for the same release, at the same δ.
        delta: δ of both.
        alpha: how often such a bound may be wrong by chance.
        draws: per world, or the number of canaries.
        details: further numbers of the kind.
    """

    kind: str
    lower: float
    claimed: float
    delta: float
    alpha: float
    draws: int
    details: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Lower / claimed: 1 would be a perfectly sharp audit; above 1 the claim is refuted."""
        return self.lower / self.claimed if self.claimed > 0 else 0.0

    @property
    def refuted(self) -> bool:
        """Whether the claim cannot stand."""
        return self.lower > self.claimed

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ratio": self.ratio, "refuted": self.refuted}


def upper_rate(errors: int, trials: int, alpha: float) -> float:
    """Clopper–Pearson: the error rate is below this with probability 1 − alpha/2.

    >>> round(upper_rate(0, 100, 0.05), 4)
    0.0362
    """
    from scipy.stats import beta

    return 1.0 if errors >= trials else float(beta.ppf(1 - alpha / 2, errors + 1, trials - errors))


def clopper_pearson_epsilon(
    false_positives: int, false_negatives: int, trials: int, delta: float, alpha: float = 0.05
) -> float:
    """A lower bound on ε from a test's errors in `trials` runs of each world.

    >>> round(clopper_pearson_epsilon(0, 0, 1000, 1e-5), 2)
    5.6
    """
    fpr, fnr = (upper_rate(errors, count(trials=trials), alpha) for errors in (false_positives, false_negatives))
    bounds = [math.log((1 - delta - b) / a) for a, b in ((fpr, fnr), (fnr, fpr)) if 1 - delta - b > 0 and a > 0]
    return max([0.0, *bounds])


def gaussian_shift(without: Floats, with_record: Floats, cut: float, alpha: float = 1e-6) -> float:
    """A lower bound μ_L on the distance of two Gaussian worlds in standard deviations, from the errors at `cut`.

    The cut must not be chosen by the draws: a white-box attacker knows where the middle of the two worlds lies.
    """
    from scipy.special import ndtri

    fpr = upper_rate(int((without > cut).sum()), len(without), alpha)
    fnr = upper_rate(int((with_record <= cut).sum()), len(with_record), alpha)
    return max(0.0, float(ndtri(1 - fpr) - ndtri(fnr)))


def audit_draws(
    without: Sequence[float] | Floats,
    with_record: Sequence[float] | Floats,
    cut: float,
    *,
    claimed: float,
    delta: float,
    alpha: float = 1e-6,
) -> Audit:
    """Audit a Gaussian release by draws of one number from either world, such as the likelihood ratio of the two."""
    out, into = np.asarray(without, dtype=np.float64), np.asarray(with_record, dtype=np.float64)
    mu = gaussian_shift(out, into, cut, alpha)
    false = int((out > cut).sum()), int((into <= cut).sum())
    details = {"mu": mu, "by_counts_alone": clopper_pearson_epsilon(*false, len(out), delta, alpha)}
    return Audit("step", gaussian_epsilon(mu, delta), positive(claimed=claimed), delta, alpha, len(out), details)


def one_run_epsilon(guesses: int, right: int, canaries: int, delta: float, alpha: float = 0.05) -> float:
    """The largest ε that `right` of `guesses` guesses about `canaries` coins refute (Steinke et al. 2023).

    >>> round(one_run_epsilon(100, 100, 1000, 0.0), 2)
    3.49
    """
    from scipy.stats import binom

    guesses, canaries = count(minimum=0, guesses=guesses), count(canaries=canaries)
    if right <= guesses / 2:
        return 0.0

    def p_value(eps: float) -> float:
        q = 1 / (1 + math.exp(-eps))
        f = binom.sf(np.arange(-1, right), guesses, q)  # f[v] = P[Bin ≥ v]
        steps = np.arange(1, right + 1)
        spread = float(((f[right - steps] - f[right]) / steps).max()) if right else 0.0
        return float(f[right]) + 2 * canaries * delta * max(spread, 0.0)

    if p_value(0.0) >= alpha:
        return 0.0
    low, high = 0.0, 1.0
    while p_value(high) < alpha:
        low, high = high, high * 2
        if high > 100:
            return high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) < alpha else (low, middle)
    return low


def audit_run(
    scores: Sequence[float] | Floats,
    included: Sequence[bool] | np.ndarray[Any, Any],
    *,
    claimed: float,
    delta: float,
    alpha: float = 0.05,
    guesses: int | None = None,
) -> Audit:
    """Audit one run: `scores[i]` is high if canary i seems to have been in the data, `included[i]` says whether it was.

    The highest scores are guessed "in", as many of the lowest "out", and the rest are left out. How many are guessed
    must not depend on the outcome: `guesses` is declared beforehand (default: one in twenty).
    """
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    if values.shape != truth.shape or values.ndim != 1:
        raise ValueError("audit_run needs one score and one coin for every canary.")
    made = max(2, len(values) // 20) if guesses is None else count(minimum=2, guesses=guesses)
    if made > len(values):
        raise ValueError(f"guesses must not exceed the number of canaries, got {made} > {len(values)}.")
    order = np.argsort(values, kind="stable")
    each = made // 2
    right = int(truth[order[-each:]].sum() + (~truth[order[:each]]).sum())
    lower = one_run_epsilon(2 * each, right, len(values), open_unit(delta=delta), alpha)
    details = {"guesses": 2 * each, "right": right}
    return Audit("one run", lower, positive(claimed=claimed), delta, alpha, len(values), details)
