"""Clipping rules: pure functions from per-example norms to per-example weights.

A rule promises n·w(n) ≤ sensitivity for every norm n from zero to the largest float, and weight 0 for
inf and NaN. Norms have shape [b, layers] (layers = 1 unless the rule is PerLayer) or any other shape:
all rules but PerLayer act elementwise. Formulas: DP-PSAC (Xia et al., AAAI 2023), Automatic Clipping
(Bu et al., NeurIPS 2023), Abadi et al. 2016.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ._check import positive
from ._types import unit_roundoff

Groups = tuple[tuple[str, ...], ...]


@runtime_checkable
class Rule(Protocol):
    """What a clipping rule is. `check_rule` tells whether an object really is one."""

    def weights(self, norms: Tensor, clip_norm: float) -> Tensor:
        """Weights of the shape and dtype of `norms`."""

    def sensitivity(self, clip_norm: float, layers: int = 1) -> float:
        """The largest norm that a weighted example can have."""

    def groups(self, names: Sequence[str]) -> Groups:
        """A partition of the parameters; each group has a norm and a weight of its own."""


def _guarded(norms: Tensor, formula: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `formula` in float64, shrink by a few roundings so that n·w(n) ≤ S exactly, select usable values.

    `where`, not multiplication: 0·inf and 0·NaN are NaN. Weights below the smallest normal number, whose
    rounding is not relative, become 0.
    """
    usable = torch.isfinite(norms) & (norms >= 0)
    wide = torch.where(usable, norms, torch.ones_like(norms)).double()
    weights = (formula(wide) * (1 - 4 * unit_roundoff(norms.dtype))).to(norms.dtype)
    usable &= torch.isfinite(weights) & (weights >= torch.finfo(norms.dtype).tiny)
    return torch.where(usable, weights, torch.zeros_like(weights))


class _AllLayers:
    """One group that holds every parameter, and S = C."""

    def groups(self, names: Sequence[str]) -> Groups:
        """All parameters share one norm."""
        return (tuple(names),)

    def sensitivity(self, clip_norm: float, layers: int = 1) -> float:
        """S = C."""
        return positive(clip_norm=clip_norm)


@dataclass(frozen=True)
class PSAC(_AllLayers):
    """w(n) = C / (n + r/(n + r)), the default: DP-PSAC, eq. 5.

    Guarantee: n·w(n) < C. The weight is non-monotonic, C at n = 0 and at most C/(2√r − r) at n = √r − r,
    so that small gradients are not blown up as by AUTO-S.

    >>> PSAC(r=0.25).weights(torch.tensor([0.0, 0.25, 1.0]), 1.0)
    tensor([1.0000, 1.3333, 0.8333])
    """

    r: float = 0.1

    def __post_init__(self) -> None:
        """0 < r ≤ 1."""
        if positive(r=self.r) > 1:
            raise ValueError(f"r must lie in (0, 1], got {self.r!r}.")

    def weights(self, norms: Tensor, clip_norm: float) -> Tensor:
        """The weights of DP-PSAC."""
        return _guarded(norms, lambda n: clip_norm / (n + self.r / (n + self.r)))


@dataclass(frozen=True)
class AutoS(_AllLayers):
    """w(n) = C / (n + γ): AUTO-S, also called NSGD. Guarantee: n·w(n) < C.

    >>> AutoS(gamma=0.5).weights(torch.tensor([0.0, 0.5]), 1.0)
    tensor([2.0000, 1.0000])
    """

    gamma: float = 0.01

    def __post_init__(self) -> None:
        """γ > 0; γ = 0 is AutoV."""
        positive(gamma=self.gamma)

    def weights(self, norms: Tensor, clip_norm: float) -> Tensor:
        """The weights of AUTO-S."""
        return _guarded(norms, lambda n: clip_norm / (n + self.gamma))


@dataclass(frozen=True)
class AutoV(_AllLayers):
    """w(n) = C / n, and 0 where that is not a finite number: AUTO-V. Guarantee: n·w(n) ≤ C.

    >>> AutoV().weights(torch.tensor([0.0, 4.0]), 1.0)
    tensor([0.0000, 0.2500])
    """

    def weights(self, norms: Tensor, clip_norm: float) -> Tensor:
        """The weights of AUTO-V."""
        return _guarded(norms, lambda n: clip_norm / n)


@dataclass(frozen=True)
class Abadi(_AllLayers):
    """w(n) = min(1, C/n): DP-SGD. Guarantee: n·w(n) ≤ C.

    >>> Abadi().weights(torch.tensor([0.0, 4.0]), 1.0)
    tensor([1.0000, 0.2500])
    """

    def weights(self, norms: Tensor, clip_norm: float) -> Tensor:
        """The weights of DP-SGD."""
        return _guarded(norms, lambda n: (clip_norm / n).clamp(max=1.0))


@dataclass(frozen=True)
class Reparam(_AllLayers):
    """w(n) = min(1/C, 1/n): Abadi with the threshold absorbed by the learning rate. Guarantee: n·w(n) ≤ 1.

    >>> Reparam().weights(torch.tensor([0.0, 4.0]), 2.0)
    tensor([0.5000, 0.2500])
    """

    def weights(self, norms: Tensor, clip_norm: float) -> Tensor:
        """The weights of the re-parameterised DP-SGD."""
        return _guarded(norms, lambda n: (1 / n).clamp(max=1 / clip_norm))

    def sensitivity(self, clip_norm: float, layers: int = 1) -> float:
        """S = 1, whatever C."""
        positive(clip_norm=clip_norm)
        return 1.0


@dataclass(frozen=True)
class Global(_AllLayers):
    """w(n) = 1 if n ≤ C, falling to 0 at n = C·17/16. Guarantee: n·w(n) ≤ C.

    A jump from 1 to 0 would let one example, whose presence changes how the others' norms round, switch all of those
    at C on or off.

    >>> Global().weights(torch.tensor([1.0, 2.0, 4.0]), 2.0)
    tensor([1.0000, 1.0000, 0.0000])
    """

    @property
    def steepness(self) -> float:
        """A relative change x of the norm changes the contribution by up to 17·x·C."""
        return 17.0

    def weights(self, norms: Tensor, clip_norm: float) -> Tensor:
        """Keep or drop."""
        return _guarded(norms, lambda n: (17 - 16 * (n / clip_norm)).clamp(0.0, 1.0))


def steepness_of(rule: Rule) -> float:
    """By how much more than the norm itself a contribution changes with it: 1 for smooth rules."""
    inner = rule.rule if isinstance(rule, PerLayer) else rule
    return float(getattr(inner, "steepness", 1.0))


def by_module(name: str) -> str:
    """The module that owns a parameter: `encoder.0.weight` belongs to `encoder.0`."""
    return name.rpartition(".")[0]


@dataclass(frozen=True, repr=False)
class PerLayer:
    """`rule` on each layer's own norm, with C_l = C·a_l and Σ a_l² = 1 (a_l = 1/√L unless told).

    Guarantee: the whole weighted gradient has norm ≤ √Σ S_l², which is C (√L under Reparam).
    Layers are the modules that own the parameters, unless `layer_of` (parameter name → layer) is given.

    >>> PerLayer(AutoV()).groups(["a.weight", "a.bias", "b.weight"])
    (('a.weight', 'a.bias'), ('b.weight',))
    """

    rule: Rule = field(default_factory=PSAC)
    shares: tuple[float, ...] | None = None
    layer_of: Callable[[str], str] | Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Shares are normalised to Σ a_l² = 1."""
        if isinstance(self.rule, PerLayer):
            raise TypeError("PerLayer takes a rule such as PSAC(), not another PerLayer.")
        if self.shares is not None:
            scale = math.hypot(*(positive(shares=a) for a in self.shares))
            object.__setattr__(self, "shares", tuple(a / scale for a in self.shares))

    def __repr__(self) -> str:
        """Without memory addresses, so that a plan is the same plan in another process."""
        layers = self.layer_of
        if callable(layers):
            layers = f"{layers.__module__}.{layers.__qualname__}"  # type: ignore[assignment]
        return f"PerLayer(rule={self.rule!r}, shares={self.shares!r}, layer_of={layers!r})"

    def groups(self, names: Sequence[str]) -> Groups:
        """One group per layer, in the order of their first parameter."""
        layer_of = self.layer_of if self.layer_of is not None else by_module
        layers: dict[str, list[str]] = {}
        for name in names:
            layers.setdefault(layer_of(name) if callable(layer_of) else layer_of[name], []).append(name)
        return tuple(tuple(group) for group in layers.values())

    def _clip_norms(self, clip_norm: float, layers: int) -> list[float]:
        shares = self.shares if self.shares is not None else (1 / math.sqrt(layers),) * layers
        if len(shares) != layers:
            raise ValueError(f"PerLayer got {len(shares)} shares for {layers} layers; give one share per layer.")
        if not isinstance(clip_norm, Tensor):  # a tensor while a compiled step is traced
            positive(clip_norm=clip_norm)
        return [clip_norm * a for a in shares]

    def weights(self, norms: Tensor, clip_norm: float) -> Tensor:
        """Column l of `norms` [b, L] is weighted with C_l."""
        columns = zip(norms.unbind(-1), self._clip_norms(clip_norm, norms.shape[-1]), strict=True)
        return torch.stack([self.rule.weights(n, c) for n, c in columns], dim=-1)

    def sensitivity(self, clip_norm: float, layers: int = 1) -> float:
        """S = √Σ S_l²."""
        return math.hypot(*(self.rule.sensitivity(c) for c in self._clip_norms(clip_norm, layers)))


def check_rule(rule: Rule, clip_norms: Sequence[float] = (1e-3, 0.1, 1.0, 1e3)) -> None:
    """Raise AssertionError unless `rule` keeps the promises of this module; for the tests of new rules.

    >>> check_rule(PSAC())
    """
    magnitudes = [0.0] + [10.0**e for e in range(-44, 39)] + [5e-324, 1e-310, 3.4e38, math.inf, math.nan]
    for dtype in (torch.float32, torch.float64):
        norms = torch.tensor(magnitudes, dtype=torch.float64).to(dtype)[:, None]
        for clip_norm in clip_norms:
            weights, bound = rule.weights(norms, clip_norm), rule.sensitivity(clip_norm, 1)
            assert weights.shape == norms.shape, "weights must have the shape of norms"
            assert weights.dtype == norms.dtype, "weights must have the dtype of norms"
            assert torch.isfinite(weights).all(), f"{rule}: a weight is not finite at clip_norm={clip_norm}"
            assert (weights >= 0).all(), f"{rule}: a weight is negative at clip_norm={clip_norm}"
            finite = torch.isfinite(norms)
            assert (weights[~finite] == 0).all(), f"{rule}: an infinite or NaN norm has a weight"
            reach = torch.where(finite, norms, 0.0).double() * weights.double()
            _check_steepness(rule, clip_norm, dtype, bound)
            worst = float(reach.max())
            assert worst <= bound, f"{rule}: n·w(n) = {worst} exceeds its sensitivity {bound} at clip_norm={clip_norm}"
    names = ["a.weight", "a.bias", "b.weight"]
    assert sorted(n for g in rule.groups(names) for n in g) == sorted(names), "groups must partition the parameters"


def _check_steepness(rule: Rule, clip_norm: float, dtype: torch.dtype, bound: float) -> None:
    """n·w(n) must not jump: rounding, which depends on who else is in the batch, would be enough to cross the jump."""
    factors = torch.cat(
        [1 + torch.linspace(-0.1, 0.1, 2001, dtype=torch.float64), torch.logspace(-3, 3, 6001).double()]
    )
    norms = (factors.sort().values * clip_norm).to(dtype)[:, None]
    reach = norms.double() * rule.weights(norms, clip_norm).double()
    apart = (norms.double().diff(dim=0) / norms.double()[1:]).squeeze(1)
    allowed = bound * (2 * steepness_of(rule) * apart + 16 * unit_roundoff(dtype))
    jump = reach.diff(dim=0).abs().squeeze(1)
    assert (jump <= allowed).all(), f"{rule}: n·w(n) jumps near n = {float(norms[int((jump - allowed).argmax())]):g}"
