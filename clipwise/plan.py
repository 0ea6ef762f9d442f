"""The plan: every public number of a run, frozen before the data is touched."""

from __future__ import annotations

import hashlib
import json
import math
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from ._check import between, count, one_of, open_unit, positive, probability
from ._show import shown_delta, shown_epsilon
from .accounting.accountants import CERTIFYING, epsilon_of
from .accounting.arithmetic import accounted
from .accounting.calibrate import solve
from .accounting.events import ADJACENCIES, Event, decayed, decaying
from .errors import CannotCertify
from .rules import PSAC, Rule
from .thresholds import DecayThreshold, Facts, FixedThreshold, Release, Threshold


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every public number of a run. Give `epsilon` (σ is solved) or `noise_multiplier` (ε is computed), not both.

    Guarantee: a run of at most `steps` steps, each on a Poisson sample with `sampling_prob`, is
    (`plan.epsilon`, `delta`)-differentially private for one example under `adjacency`; `plan.epsilon` never
    exceeds the target that was given. Nothing here may be computed from the data: `expected_batch_size` is a
    declared constant, the divisor of every step.

    A threshold that looks at the data releases something of its own from the same batch. Both releases are one
    Gaussian mechanism with the total `noise_multiplier` σ; the gradient gets σ_T = (σ⁻² − σ_H⁻²)^(−1/2).
    `noise_decay` ρ lets σ fall to ρ·σ over the run (Du et al.), in at most 50 stairs; σ is then the first step's.
    `evaluations` pays beforehand for as many looks at private records (`private_score`), each a sum of scores in
    [0, 1] with noise of standard deviation `evaluation_noise`; ε covers them whether or not they are used.
    δ covers what finite arithmetic adds: ε is computed at a δ smaller by 0.01%.

    >>> plan = Plan(noise_multiplier=1.5, delta=1e-5, sampling_prob=0.04, steps=2250, expected_batch_size=100)
    >>> round(plan.epsilon, 3)
    6.769
    """

    epsilon: float = None  # type: ignore[assignment]  # after construction: what the plan achieves
    noise_multiplier: float = None  # type: ignore[assignment]  # after construction: the total σ
    delta: float
    sampling_prob: float
    steps: int
    expected_batch_size: float
    rule: Rule = field(default_factory=PSAC)
    threshold: Threshold = field(default_factory=FixedThreshold)
    noise_decay: float = 1.0
    evaluations: int = 0
    evaluation_noise: float = 20.0
    accountant: str = "pld"
    adjacency: str = "add_or_remove_one"
    target_epsilon: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Check every number, then solve for the one that is missing."""
        self._set("delta", open_unit(delta=self.delta))
        self._set("sampling_prob", probability(sampling_prob=self.sampling_prob))
        self._set("steps", count(steps=self.steps))
        self._set("expected_batch_size", positive(expected_batch_size=self.expected_batch_size))
        if self.accountant == "gdp":
            raise CannotCertify("accountant='gdp' is an estimate below the true epsilon; a plan needs 'pld' or 'rdp'.")
        one_of(CERTIFYING, accountant=self.accountant)
        one_of(ADJACENCIES, adjacency=self.adjacency)
        if isinstance(self.rule, type) or not isinstance(self.rule, Rule):
            raise TypeError(f"rule must be a clipping rule such as PSAC(), got {self.rule!r}.")
        if isinstance(self.threshold, type) or not isinstance(self.threshold, Threshold):
            raise TypeError(f"threshold must be a threshold such as FixedThreshold(1.0), got {self.threshold!r}.")
        if (reason := self.threshold.why_not(self.rule)) is not None:
            raise ValueError(f"threshold does not go with the rule: {reason}")
        self._set("noise_decay", probability(noise_decay=self.noise_decay))
        self._set("evaluations", count(minimum=0, evaluations=self.evaluations))
        self._set("evaluation_noise", between(1e-10, 1e10, evaluation_noise=self.evaluation_noise))
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("Give exactly one of epsilon (the target) and noise_multiplier.")
        if self.epsilon is not None:
            self._set("target_epsilon", positive(epsilon=self.epsilon))
            self._set("noise_multiplier", self._solved(self.epsilon))
        self._set("noise_multiplier", positive(noise_multiplier=self.noise_multiplier))
        self._set("epsilon", self.epsilon_after(self.steps, self.evaluations))
        if not math.isfinite(self.epsilon):
            raise ValueError(f"No finite epsilon at delta={self.delta:g}: delta is too small for {self.accountant}.")
        self._check_release()

    def _check_release(self) -> None:
        """What the threshold releases must leave noise for the gradient, and should not drown in its own."""
        release = self.release
        if release is None:
            return
        if release.noise_multiplier <= self.noise_multiplier:
            raise ValueError(
                f"{self.threshold!r} has noise {release.noise:g} on a release of sensitivity {release.sensitivity:g}, "
                f"a multiplier of {release.noise_multiplier:g}, which is not above the total noise multiplier "
                f"{self.noise_multiplier:.4g}: it alone would spend the whole budget. Give it more noise "
                "(histogram_noise, count_noise)."
            )
        if release.size > 1 and self.expected_batch_size < release.size * release.noise:
            warnings.warn(
                f"{self.threshold!r}: {self.expected_batch_size:g} expected examples in {release.size} bins with noise "
                f"{release.noise:g} each: the histogram is mostly noise, and C will hardly move. Use larger batches or "
                "fewer bins.",
                stacklevel=4,
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _solved(self, epsilon: float) -> float:
        return solve(
            lambda sigma: self._event(sigma, self.steps, self.evaluations),
            epsilon,
            accounted(self.delta),
            self.accountant,
        )

    def _event(self, sigma: float, steps: int, looks: int) -> Event:
        seen = looks / self.evaluation_noise**2
        return decaying(sigma, self.noise_decay, steps, self.steps, self.sampling_prob, self.adjacency, seen)

    @classmethod
    def for_dataset(cls, *, size: int, batch_size: int, epochs: float, **others: Any) -> Plan:
        """A plan from words that people use. `size` is declared public: never pass a secret count.

        sampling_prob = batch_size/size, steps = ⌊epochs·size/batch_size⌋, divisor = batch_size.

        >>> Plan.for_dataset(size=60_000, batch_size=2_048, epochs=40, noise_multiplier=1.9, delta=1e-5).steps
        1171
        """
        return cls(**declared(size, batch_size, epochs), **others)

    @property
    def most_charges(self) -> int:
        """One for every step."""
        return self.steps

    @property
    def most_looks(self) -> int:
        """One for every evaluation."""
        return self.evaluations

    @property
    def release(self) -> Release | None:
        """What the threshold releases in every step beside the gradient."""
        return self.threshold.release(self.expected_batch_size, self.noise_multiplier)

    @property
    def gradient_noise_multiplier(self) -> float:
        """σ_T: what the gradient gets of σ (of the first step's, if it decays); all of it under a fixed threshold."""
        return self.gradient_noise_multiplier_at(0)

    def noise_multiplier_at(self, step: int) -> float:
        """The total σ of step `step`, counted from 0."""
        return decayed(self.noise_multiplier, self.noise_decay, step, self.steps)

    def gradient_noise_multiplier_at(self, step: int) -> float:
        """σ_T = (σ⁻² − σ_H⁻²)^(−1/2) of step `step`, counted from 0."""
        total, release = self.noise_multiplier_at(step), self.release
        if release is None:
            return total
        return float((total**-2 - release.noise_multiplier**-2) ** -0.5)

    def facts(self, step: int, dimension: int) -> Facts:
        """The public numbers that a threshold may use, before step `step`, counted from 0."""
        return Facts(
            step=step,
            steps=self.steps,
            expected_batch_size=self.expected_batch_size,
            gradient_noise_multiplier=self.gradient_noise_multiplier_at(min(step, self.steps - 1)),
            dimension=dimension,
        )

    def event(self, steps: int, looks: int = 0) -> Event:
        """What `steps` steps and `looks` evaluations do to the data: the joint release of each, accounted once."""
        return self._event(self.noise_multiplier, steps, looks)

    def epsilon_after(self, steps: int, looks: int = 0) -> float:
        """ε of the first `steps` steps and `looks` evaluations."""
        return self.epsilon_at(self.delta, steps, looks)

    def epsilon_at(self, delta: float, steps: int, looks: int = 0) -> float:
        """As epsilon_after, at another δ: one run is (ε, δ)-private for every pair at once."""
        if not steps and not looks:
            return 0.0
        return epsilon_of(self.event(max(steps, 1), looks), accounted(delta), self.accountant)

    def as_dict(self) -> dict[str, Any]:
        """All public numbers, for ledgers and reports."""
        plain = {name: value for name, value in asdict(self).items() if name not in ("rule", "threshold")}
        return {**plain, "rule": repr(self.rule), "threshold": repr(self.threshold)}

    @property
    def digest(self) -> str:
        """A fingerprint of what was given: two plans with the same digest promise the same."""
        given = {k: v for k, v in self.as_dict().items() if k not in ("epsilon", "target_epsilon")}
        return hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()

    def statement(self) -> dict[str, Any]:
        """The privacy statement in machine-readable form, for the whole planned run."""
        return {
            "guarantee": f"({shown_epsilon(self.epsilon)}, {shown_delta(self.delta)})-differential privacy",
            "epsilon": self.epsilon,
            "delta": self.delta,
            "unit": "one example; a person with several examples is NOT covered as one",
            "adjacency": self.adjacency,
            "mechanism": "Poisson-sampled Gaussian, every step's clipped gradient sum"
            + (" and the threshold's release, jointly" if self.release is not None else ""),
            "noise_multiplier": self.noise_multiplier,
            "gradient_noise_multiplier": self.gradient_noise_multiplier,
            "threshold_noise_multiplier": None if self.release is None else self.release.noise_multiplier,
            "noise_decay": self.noise_decay,
            "sampling_prob": self.sampling_prob,
            "steps": self.steps,
            "expected_batch_size": self.expected_batch_size,
            "accountant": self.accountant,
            "rule": repr(self.rule),
            "threshold": repr(self.threshold),
            "evaluations": {"at most": self.evaluations, "noise": self.evaluation_noise} if self.evaluations else None,
        }

    def __str__(self) -> str:
        """A privacy statement that can be read aloud."""
        target = f" (target {self.target_epsilon:g})" if self.target_epsilon is not None else ""
        lines = [
            f"Plan: ({shown_epsilon(self.epsilon)}, {shown_delta(self.delta)})-DP after {self.steps} steps{target}",
            f"  privacy unit    one example, {self.adjacency.replace('_', '-')}",
            "                  a person with several examples is not covered as one",
            f"  mechanism       Gaussian, noise multiplier {self.noise_multiplier:.4f}, by {self.accountant}",
            *self._noise_lines(),
            f"  sampling        Poisson, each example joins with probability {self.sampling_prob:.6g}",
            f"  batch           {self.expected_batch_size:g} expected (the divisor), sizes vary from step to step",
            f"  clipping        {self.rule!r}, {self.threshold!r}",
        ]
        if self.evaluations:
            noise = f"noise {self.evaluation_noise:g} on the sum of scores"
            lines.append(f"  evaluations     at most {self.evaluations} on private records, {noise}")
        if isinstance(self.threshold, DecayThreshold):
            shown = (self.threshold.init(self.facts(t, 1)).clip_norm for t in self._shown_steps())
            lines.append(f"                  clip norm {_schedule(shown)} over the run")
        return "\n".join(lines)

    def _noise_lines(self) -> list[str]:
        lines = []
        if self.release is not None:
            parts = f"gradient {self.gradient_noise_multiplier:.4f}, threshold {self.release.noise_multiplier:.4f}"
            lines.append(f"                  of one joint release: {parts}")
        if self.noise_decay != 1:
            totals = _schedule(self.noise_multiplier_at(t) for t in self._shown_steps())
            lines.append(f"                  falls {totals} over the run, composed step by step")
        return lines

    def _shown_steps(self) -> list[int]:
        return sorted({0, self.steps // 2, self.steps - 1})


def declared(size: int, batch_size: int, epochs: float) -> dict[str, Any]:
    """The numbers of a plan from a size that is declared public."""
    size, batch_size, epochs = count(size=size), count(batch_size=batch_size), positive(epochs=epochs)
    if batch_size > size:
        raise ValueError(f"batch_size must not exceed size, got {batch_size} > {size}.")
    steps = math.floor(epochs * size / batch_size + 1e-9)
    return {"sampling_prob": batch_size / size, "steps": steps, "expected_batch_size": batch_size}


def _schedule(values: Iterable[float]) -> str:
    return " → ".join(f"{value:.4g}" for value in values)
