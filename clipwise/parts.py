"""What a run holds while it works on a batch, and the settings that it works by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ._types import Engine
from .engine import OpRule, Tape
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
