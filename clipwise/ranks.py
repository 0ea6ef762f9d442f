"""What a run needs of the processes that make it together. One process is the usual case, and needs nothing.

    each rank clips its own share of the Poisson batch
    agree ─► total (sum over ranks) ─► charge (rank 0, durable; the others wait) ─► the same noise on every rank

`integrations/distributed.py` fills this in for several; nothing else knows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from torch import Tensor, nn

from .ledger import Ledger
from .noise import Mode, NoiseSource

T = TypeVar("T", int, bool)


class Ranks(Protocol):
    """The processes of one run, in step with each other. Whatever they send each other stays on the private side."""

    @property
    def share(self) -> tuple[int, int]:
        """(rank, ranks): this rank draws from every ranks-th record."""

    @property
    def in_step(self) -> bool:
        """Whether the forward pass itself needs all ranks, so that each must run as many microbatches as the others."""

    @property
    def offsets(self) -> Mapping[str, int]:
        """Where this rank's part of a parameter begins, in the flat parameter; empty where every rank has all."""

    def same(self, what: str, facts: str) -> None:
        """Refuse, on every rank, if the facts are not the same on all."""

    def as_checked(self, collate_fn: object, modes: list[bool]) -> None:
        """Refuse batches that are made otherwise than when the model was checked."""

    def noise(self, mode: Mode, seed: int | None) -> NoiseSource:
        """One key for all ranks."""

    def ledger(self, opened: Callable[[], Ledger], mirror: Callable[[], Ledger]) -> Ledger:
        """The ledger on the first rank; on the others a mirror in memory, with the same numbers."""

    def lead(self, action: Callable[[], T]) -> T:
        """Run on the first rank; all get its answer, and all fail if it fails."""

    def rounds(self, microbatches: int) -> int:
        """How many microbatches every rank must run."""

    def agree(self, fine: bool) -> bool:
        """Whether all ranks are fine; a rank that cannot be asked is not."""

    def examples(self, here: int) -> int:
        """How many examples the batch has on all ranks together. Secret."""

    def total(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sum over ranks of each tensor, or this rank's part of it. Still secret."""

    def observed(self, seen: Tensor) -> Tensor:
        """The sum over ranks of what the threshold observed. Still secret."""

    def charge(self, commit: Callable[[], int]) -> int:
        """Charge on the first rank; the others go on only after that charge is durable."""

    def as_gradient(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """A released value in the form of the parameter's gradient."""

    def whole(self, x: Tensor) -> Tensor:
        """A tensor of model or optimizer with all its parts, for a checkpoint."""

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's part of it, in the form of `like`."""


class Alone:
    """One process."""

    share = (0, 1)
    in_step = False
    offsets: Mapping[str, int] = {}

    def same(self, what: str, facts: str) -> None:
        """They are."""

    def as_checked(self, collate_fn: object, modes: list[bool]) -> None:
        """The preflight comes with the batches."""

    def noise(self, mode: Mode, seed: int | None) -> NoiseSource:
        """A key of its own."""
        return NoiseSource(mode, seed)

    def ledger(self, opened: Callable[[], Ledger], mirror: Callable[[], Ledger]) -> Ledger:
        """The ledger."""
        return opened()

    def lead(self, action: Callable[[], T]) -> T:
        """At once."""
        return action()

    def rounds(self, microbatches: int) -> int:
        """As many as there are."""
        return microbatches

    def agree(self, fine: bool) -> bool:
        """With itself."""
        return fine

    def examples(self, here: int) -> int:
        """All are here."""
        return here

    def total(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of one."""
        return sums

    def observed(self, seen: Tensor) -> Tensor:
        """By one."""
        return seen

    def charge(self, commit: Callable[[], int]) -> int:
        """At once."""
        return commit()

    def as_gradient(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """As it is."""
        return value

    def whole(self, x: Tensor) -> Tensor:
        """It is."""
        return x

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """All of it."""
        return whole
