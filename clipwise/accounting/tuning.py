"""What it costs to run a training several times and keep the best: three ways to pay.

- "composition": all `runs` runs, composed; their scores may all be seen.
- "liu-talwar": after every run stop with probability γ = 1/(2·runs), keep the best (Liu & Talwar 2019).
- "negative-binomial", "poisson": a secret random number of runs with mean `runs` (Papernot & Steinke 2022), by
  dp-accounting's RepeatAndSelect event.

In the last three only the winner is ever seen; the number of runs and the losers stay secret.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .._check import count, one_of, open_unit, positive
from .accountants import CERTIFYING, FOURIER, dp_events, epsilon_of, pld_accountant, rdp_accountant, rdp_epsilon
from .calibrate import solve_for
from .events import StepEvent

METHODS = ("composition", "liu-talwar", "negative-binomial", "poisson")
_LEAST_DELTA = 1e-12
_LT_DELTA = 1e-20  # δ₂: the chance that Liu & Talwar's loop is cut off


@dataclass(frozen=True, kw_only=True)
class Search:
    """How many runs there are, and how their number is chosen.

    Attributes:
        runs: how many with "composition"; G with "liu-talwar" (2·G on average); else the mean of a random number.
        method: one of METHODS.
        shape: of the negative binomial: 1 is geometric, 0 logarithmic.
        accountant: "pld" or "rdp" for "composition"; the others exist for RDP only.
    """

    runs: float = 10
    method: str = "negative-binomial"
    shape: float = 1.0
    accountant: str = "rdp"

    def __post_init__(self) -> None:
        """Refuse numbers that no search has."""
        one_of(METHODS, method=self.method)
        one_of(CERTIFYING, accountant=self.accountant)
        if self.method in ("composition", "liu-talwar"):
            count(runs=self.runs)
        elif not 1 <= positive(runs=self.runs) <= 500:
            raise ValueError(f"runs, the mean number of runs, must lie in [1, 500], got {self.runs!r}.")
        if isinstance(self.shape, bool) or not (self.shape == 0 or 1e-6 <= self.shape <= 100):
            raise ValueError(f"shape must be 0 or lie in [1e-6, 100], got {self.shape!r}.")
        if self.accountant != "rdp" and self.method != "composition":
            raise ValueError(f"method={self.method!r} is accounted by RDP only: leave accountant='rdp'.")

    @property
    def secret_runs(self) -> bool:
        """Whether the number of runs is drawn in secret and must stay so."""
        return self.method != "composition"

    def number_of_runs(self, coin: float) -> int:
        """The number of runs for a uniform `coin` in [0, 1): the inverse of its distribution."""
        if self.method == "composition":
            return int(self.runs)
        if self.method == "liu-talwar":
            gamma = 1 / (2 * self.runs)
            return min(_quantile(coin, 1, gamma, lambda k: 1 - gamma), self._longest)
        if self.method == "poisson":
            return _quantile(coin, 0, math.exp(-self.runs), lambda k: self.runs / k)
        gamma = self._gamma
        if gamma == 1:
            return 1
        if self.shape == 0:
            first = (1 - gamma) / math.log(1 / gamma)
        else:
            first = self.shape * (1 - gamma) / math.expm1(-self.shape * math.log(gamma))
        return _quantile(coin, 1, first, lambda k: (1 - gamma) * (k - 1 + self.shape) / k)

    @property
    def _longest(self) -> int:
        """T of Liu & Talwar: no search is longer."""
        return math.floor(2 * self.runs * math.log(1 / _LT_DELTA))

    @property
    def _gamma(self) -> float:
        """The parameter of the negative binomial whose mean is at most `runs`."""
        if self.runs < 1 + 1e-6:
            return 1.0
        if self.shape == 1:
            return 1 / self.runs
        low, high = 0.0, 1.0  # the mean falls with γ, from infinity to 1
        for _ in range(200):
            middle = (low + high) / 2
            if self._mean(middle) > self.runs:
                low = middle
            else:
                high = middle
        return high

    def _mean(self, gamma: float) -> float:
        if gamma >= 1:
            return 1.0
        if gamma <= 0:
            return math.inf
        if self.shape == 0:
            return (1 / gamma - 1) / math.log(1 / gamma)
        return self.shape * (1 / gamma - 1) / -math.expm1(self.shape * math.log(gamma))


def _quantile(coin: float, start: int, first: float, ratio: Any) -> int:
    """The least k with P[K ≤ k] > coin, where P[k + 1] = P[k]·ratio(k + 1)."""
    k, mass, total = start, first, first
    while coin >= total:
        k += 1
        mass *= ratio(k)
        if total + mass == total and k > start + 2 and ratio(k) < 1:  # the rest is below the resolution of a coin
            break
        total += mass
    return k


def tuning_epsilon(
    search: Search,
    *,
    noise_multiplier: float,
    sampling_prob: float,
    steps: int,
    delta: float,
    score_noise: float | None = None,
) -> float:
    """ε at `delta` of the whole search, each run being `steps` Poisson-sampled Gaussian releases.

    Guarantee: never below the true ε of releasing the winner (all runs, under "composition").

    Args:
        search: how many runs, and how their number is chosen.
        noise_multiplier: σ of every run.
        sampling_prob: q of every run.
        steps: T of every run.
        delta: δ of the whole search.
        score_noise: noise multiplier of a score that is itself released from private data; None if it is public.

    >>> numbers = {"noise_multiplier": 1.0, "sampling_prob": 0.01, "steps": 100, "delta": 1e-5}
    >>> one, ten = (tuning_epsilon(Search(runs=n, method="composition"), **numbers) for n in (1, 10))
    >>> round(one, 2), round(ten, 2)
    (1.21, 2.1)
    """
    events = [StepEvent(noise_multiplier=noise_multiplier, sampling_prob=sampling_prob, steps=steps)]
    if score_noise is not None:
        events.append(StepEvent(noise_multiplier=score_noise, sampling_prob=1.0, steps=1))
    return search_epsilon(search, tuple(events), delta)


def search_epsilon(search: Search, run: tuple[StepEvent, ...], delta: float) -> float:
    """As `tuning_epsilon`, for a run made of several events."""
    from dp_accounting import dp_event

    open_unit(delta=delta)
    if search.method == "composition":
        return _composed(run, int(search.runs), delta, search.accountant)
    if delta < _LEAST_DELTA:  # the number of runs is drawn with 53 bits
        raise ValueError(f"delta must be at least {_LEAST_DELTA:g} where the number of runs is secret, got {delta:g}.")
    if search.method == "liu-talwar":
        return _liu_talwar(search, run, delta)
    release = dp_event.ComposedDpEvent(
        [dp_event.SelfComposedDpEvent(e, n) for event in run for e, n in dp_events(event)]
    )
    shape = math.inf if search.method == "poisson" else search.shape
    accountant = rdp_accountant()
    accountant.compose(dp_event.RepeatAndSelectDpEvent(release, search.runs, shape))
    return float(accountant.get_epsilon(delta))


def _composed(run: tuple[StepEvent, ...], runs: int, delta: float, by: str) -> float:
    if by == "pld" and len(run) == 1:
        ((sigma, steps),) = run[0].levels
        return epsilon_of(
            StepEvent(noise_multiplier=sigma, sampling_prob=run[0].sampling_prob, steps=steps * runs), delta
        )
    accountant, times = rdp_accountant() if by == "rdp" else pld_accountant(), 0
    for event in run:
        for release, steps in dp_events(event):
            accountant.compose(release, steps * runs)
            times += steps * runs
    certain = delta if by == "rdp" else delta - FOURIER * times
    if certain < delta / 2:
        return _composed(run, runs, delta, "rdp")
    return rdp_epsilon(accountant, times, delta) if by == "rdp" else float(accountant.get_epsilon(certain))


def _liu_talwar(search: Search, run: tuple[StepEvent, ...], delta: float) -> float:
    """ε' = 3ε₁ + 3√(2δ₁), δ' = 3√(2δ₁)·T + δ₂ with T = ln(1/δ₂)/γ, γ = 1/(2G): δ₁ follows from δ' = δ."""
    longest = 2 * search.runs * math.log(1 / _LT_DELTA)
    root = (delta - _LT_DELTA) / (3 * longest)  # √(2δ₁)
    return 3 * _composed(run, 1, root**2 / 2, "rdp") + 3 * root


def calibrate_search(
    search: Search,
    *,
    epsilon: float,
    delta: float,
    sampling_prob: float,
    steps: int,
    score_noise: float | None = None,
) -> float:
    """The noise multiplier of each run for which the whole search stays within (`epsilon`, `delta`).

    Guarantee: `tuning_epsilon` of the result is at most `epsilon`, and at most 1e-3 below it.
    """
    target = positive(epsilon=epsilon)

    def spent(sigma: float) -> float:
        return tuning_epsilon(
            search,
            noise_multiplier=sigma,
            sampling_prob=sampling_prob,
            steps=steps,
            delta=delta,
            score_noise=score_noise,
        )

    if (least := spent(1e5)) > target:
        raise ValueError(
            f"The search alone costs epsilon={least:.3g} at delta={delta:g}, whatever the noise of its runs: more than "
            f"{target:g}. Ask for fewer runs, a larger epsilon, or more noise on the score."
        )
    return solve_for(spent, target)
