"""What a run holds while it works on a batch, and the settings that it works by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ._types import Engine
from .engine import OpRule, Tape
from .engine.state import Untouched, Writes, beside_parameters
from .errors import CrossExampleOp
from .noise import NoiseSource
from .plan import Plan
from .thresholds import State


@dataclass(eq=False)
class Microbatch:
    """A physical slice of a batch, padded to a fixed size; `mask` marks the real rows. Secret."""

    data: Any = field(repr=False)
    mask: Tensor = field(repr=False)


@dataclass(frozen=True)
class Settings:
    """Knobs that change speed or what is checked, never the guarantee."""

    microbatch: int | None = None
    engine: Engine = "bookkeeping"
    preflight: bool | str = True
    probe: Any = None
    sampling: str = "poisson"
    op_rules: Mapping[Any, OpRule] | None = None
    compile: bool = False


class Memory:
    """What the model holds beside its parameters: in a step nothing may be written to it but what the preflight saw."""

    def __init__(self, model: nn.Module, known: Writes) -> None:
        """As it is before the step."""
        held = lambda: ((name, x) for name, x in beside_parameters(model) if name not in known.changing)  # noqa: E731
        self._held = Untouched(held, {name: x.detach().clone() for name, x in held() if name in known.same})

    def check(self) -> None:
        """Raise where something of a batch may have stayed."""
        if written := self._held.written():
            raise CrossExampleOp(
                f"The forward pass wrote into the model, which no probe of the preflight made it do: "
                f"{', '.join(written[:5])}. That is never noised, and would be published with the model. Turn it off."
            )


@dataclass
class Step:
    """One batch under way. The clip norm and the sensitivity are read once, so that they cannot drift apart."""

    threshold: State
    sensitivity: float
    size: int = field(repr=False)
    parts: list[Microbatch]
    sums: dict[str, Tensor] = field(default_factory=dict, repr=False)
    observed: Tensor | None = field(default=None, repr=False)
    recording: tuple[Tape, Microbatch] | None = None
    memory: Memory | None = None

    def noised(
        self, plan: Plan, source: NoiseSource, number: int, offsets: Mapping[str, int] | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """What leaves the private side: the sum, and what the threshold observed, each with its noise."""
        sums = source.add_(
            self.sums,
            sequence=number,
            sensitivity=self.sensitivity,
            noise_multiplier=plan.gradient_noise_multiplier_at(number - 1),
            stream="gradient",
            offsets=offsets,
        )
        release = plan.release
        if release is None or self.observed is None:
            return sums, None
        observed = source.add_(
            {"observed": self.observed},
            sequence=number,
            sensitivity=release.sensitivity,
            noise_multiplier=release.noise_multiplier,
            stream="threshold",
        )
        return sums, observed["observed"]
