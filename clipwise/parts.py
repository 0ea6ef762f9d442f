"""What a run holds while it works on a batch, and the settings that it works by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ._types import Engine
from .engine import OpRule, Tape
from .engine.state import Writes, beside_parameters, marks, same_values, written_to
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

    def __init__(self, model: nn.Module, known: Writes) -> None:
        """As it is before the step."""
        self._model, self._known = model, known
        self._before = marks(self._held())
        self._values = {name: x.detach().clone() for name, (x, _) in self._before.items() if name in known.same}

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, x) for name, x in beside_parameters(self._model) if name not in self._known.changing)

    def check(self) -> None:
        """Raise where something of a batch may have stayed."""
        after = marks(self._held())
        written = [name for name in written_to(self._before, after) if not self._as_it_was(name, after.get(name))]
        if written:
            raise CrossExampleOp(
                f"The forward pass wrote into the model, which no probe of the preflight made it do: "
                f"{', '.join(written[:5])}. That is never noised, and would be published with the model. Turn it off."
            )

    def _as_it_was(self, name: str, now: tuple[Tensor, int | None] | None) -> bool:
        """Whether the probes wrote the same values over it, and so did this batch."""
        return now is not None and name in self._values and same_values(self._values[name], now[0])


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
