"""The plan: every public number of a run, frozen before the data is touched."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ._check import count, one_of, open_unit, positive, probability
from ._show import shown_delta, shown_epsilon
from .accounting import calibrate
from .accounting.accountants import CERTIFYING, epsilon_of
from .accounting.events import ADJACENCIES, StepEvent
from .errors import CannotCertify
from .rules import PSAC, Rule
from .thresholds import FixedThreshold


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every public number of a run. Give `epsilon` (σ is solved) or `noise_multiplier` (ε is computed), not both.

    Guarantee: a run of at most `steps` steps, each on a Poisson sample with `sampling_prob`, is
    (`plan.epsilon`, `delta`)-differentially private for one example under `adjacency`; `plan.epsilon` never
    exceeds the target that was given. Nothing here may be computed from the data: `expected_batch_size` is a
    declared constant, the divisor of every step.

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
    threshold: FixedThreshold = field(default_factory=FixedThreshold)
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
        if not isinstance(self.threshold, FixedThreshold):
            raise TypeError(f"threshold must be a threshold such as FixedThreshold(1.0), got {self.threshold!r}.")
        if (self.epsilon is None) == (self.noise_multiplier is None):
            raise ValueError("Give exactly one of epsilon (the target) and noise_multiplier.")
        if self.epsilon is not None:
            self._set("target_epsilon", positive(epsilon=self.epsilon))
            self._set("noise_multiplier", self._solved(self.epsilon))
        self._set("noise_multiplier", positive(noise_multiplier=self.noise_multiplier))
        self._set("epsilon", self.epsilon_after(self.steps))
        if not math.isfinite(self.epsilon):
            raise ValueError(f"No finite epsilon at delta={self.delta:g}: delta is too small for {self.accountant}.")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _solved(self, epsilon: float) -> float:
        return calibrate(
            epsilon=epsilon,
            delta=self.delta,
            sampling_prob=self.sampling_prob,
            steps=self.steps,
            accountant=self.accountant,
            adjacency=self.adjacency,
        )

    @classmethod
    def for_dataset(cls, *, size: int, batch_size: int, epochs: float, **others: Any) -> Plan:
        """A plan from words that people use. `size` is declared public: never pass a secret count.

        sampling_prob = batch_size/size, steps = ⌊epochs·size/batch_size⌋, divisor = batch_size.

        >>> Plan.for_dataset(size=60_000, batch_size=2_048, epochs=40, noise_multiplier=1.9, delta=1e-5).steps
        1171
        """
        size, batch_size, epochs = count(size=size), count(batch_size=batch_size), positive(epochs=epochs)
        if batch_size > size:
            raise ValueError(f"batch_size must not exceed size, got {batch_size} > {size}.")
        steps = math.floor(epochs * size / batch_size + 1e-9)
        return cls(sampling_prob=batch_size / size, steps=steps, expected_batch_size=batch_size, **others)

    @property
    def gradient_noise_multiplier(self) -> float:
        """σ_T: what the gradient gets of σ; all of it under a fixed threshold."""
        return self.noise_multiplier

    def event(self, steps: int) -> StepEvent:
        """What `steps` steps of this plan do to the data."""
        return StepEvent(
            noise_multiplier=self.noise_multiplier,
            sampling_prob=self.sampling_prob,
            steps=steps,
            adjacency=self.adjacency,
        )

    def epsilon_after(self, steps: int) -> float:
        """ε of the first `steps` steps."""
        return epsilon_of(self.event(steps), self.delta, self.accountant) if steps else 0.0

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
            "mechanism": "Poisson-sampled Gaussian, every step's clipped gradient sum",
            "noise_multiplier": self.noise_multiplier,
            "sampling_prob": self.sampling_prob,
            "steps": self.steps,
            "expected_batch_size": self.expected_batch_size,
            "accountant": self.accountant,
            "rule": repr(self.rule),
            "threshold": repr(self.threshold),
        }

    def __str__(self) -> str:
        """A privacy statement that can be read aloud."""
        target = f" (target {self.target_epsilon:g})" if self.target_epsilon is not None else ""
        return "\n".join(
            (
                f"Plan: ({shown_epsilon(self.epsilon)}, {shown_delta(self.delta)})-DP after {self.steps} steps{target}",
                f"  privacy unit    one example, {self.adjacency.replace('_', '-')}",
                "                  a person with several examples is not covered as one",
                f"  mechanism       Gaussian, noise multiplier {self.noise_multiplier:.4f}, by {self.accountant}",
                f"  sampling        Poisson, each example joins with probability {self.sampling_prob:.6g}",
                f"  batch           {self.expected_batch_size:g} expected (the divisor), sizes vary from step to step",
                f"  clipping        {self.rule!r}, {self.threshold!r}",
            )
        )
