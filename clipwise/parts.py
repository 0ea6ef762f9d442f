"""What a run holds while it works on a batch, and the settings that it works by."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ._types import Engine
from .engine import OpRule, Tape
from .engine.state import beside_parameters
from .errors import CrossExampleOp
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

    def __init__(self, model: nn.Module, allowed: Collection[str]) -> None:
        """As it is before the step."""
        self._model, self._allowed = model, allowed
        self._before = self._marks()

    def _marks(self) -> dict[str, tuple[int, int]]:
        held = dict(beside_parameters(self._model))
        return {name: (id(x), x._version) for name, x in held.items() if name not in self._allowed}

    def check(self) -> None:
        """Raise where something of a batch may have stayed."""
        after = self._marks()
        if changed := [name for name in {**self._before, **after} if self._before.get(name) != after.get(name)]:
            raise CrossExampleOp(
                f"The forward pass wrote into the model, which no probe of the preflight made it do: "
                f"{', '.join(changed[:5])}. That is never noised, and would be published with the model. Turn it off."
            )


@dataclass
class Step:
    """One batch under way. The clip norm and the sensitivity are read once, so that they cannot drift apart."""

    threshold: State
    sensitivity: float
    size: int = field(repr=False)
    parts: list[Microbatch]
    sums: dict[str, Tensor] = field(default_factory=dict)
    observed: Tensor | None = None
    recording: tuple[Tape, Microbatch] | None = None
    memory: Memory | None = None
