"""Derived parameters: `w.float()`, `w.T`, `1 + w`, `w.expand(b, …)`, a positional embedding of arange, weight norm.

A derived parameter is a value computed from parameters and constants alone. Its gradient is pushed
back to the parameters through the derivation, kept as an ordinary autograd graph (the shadow) over
detached copies of the parameters, in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._types import sum_dtype
from ..errors import UnsupportedOp
from .contributions import Contribution, Dense, Outer, Rows, as_multiplied, materialise

Kind = Literal["same", "transposed", "other"]

CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as", "contiguous", "clone"})
_TRANSPOSES = frozenset({"t", "transpose", "swapaxes", "swapdims"})
_RESHAPES = frozenset(
    {"reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "reshape_as", "view_as", "ravel"}
)
_RANDOM = frozenset({"dropout", "alpha_dropout", "feature_dropout", "bernoulli", "rand_like", "randn_like", "normal"})


@dataclass(eq=False)
class Source:
    """A parameter as the engine sees it: its name, its detached value, and the leaf that shadows start from."""

    name: str
    parameter: nn.Parameter
    sharded: bool = False  # the parameter's memory goes away after the backward pass
    value: Tensor = field(init=False)
    made: Tensor | None = field(init=False, default=None)  # the shadow, once something is derived

    def __post_init__(self) -> None:
        """Detach: autograd never computes the ordinary weight gradient."""
        if self.parameter._backward_hooks and not self.sharded:
            raise UnsupportedOp(
                f"Parameter {self.name} has a hook on its gradient (register_hook), which would never run: gradients "
                "are not made where hooks see them. Freeze the parameter, or change its value after the step."
            )
        self.value = self.parameter.detach()

    @property
    def shadow(self) -> Tensor:
        """Where derivations start from, in float32 or wider."""
        if self.made is None:
            wide = self.value.to(sum_dtype(self.value.dtype), copy=self.sharded)
            self.made = wide.detach().requires_grad_()
        return self.made

    @property
    def names(self) -> list[str]:
        """For messages."""
        return [self.name]


Origin = Callable[[Tensor], Iterator[tuple["Source | Derived", Contribution]]]


@dataclass(eq=False)
class Derived:
    """A value that depends on `sources` only; `kind` says whether its gradient is a reshuffled parameter gradient."""

    value: Tensor
    shadow: Tensor
    sources: list[Source]
    kind: Kind
    shared_rows: bool = False  # all rows along the first axis are copies of one row (expand, repeat)
    origin: Origin | None = None  # the op with a rule that made it, if any

    @property
    def names(self) -> list[str]:
        """For messages."""
        return [source.name for source in self.sources]

    def as_source(self, use: Contribution) -> tuple[Source, Contribution] | None:
        """The same contribution to the parameter itself, where the derivation is a cast or a transpose."""
        if self.kind == "same" and (not isinstance(use, Rows) or self.value.shape == self.sources[0].value.shape):
            return self.sources[0], use
        if self.kind == "transposed" and isinstance(use, Outer) and use.left.shape[1] == 1:
            return self.sources[0], use.swapped()
        return None

    def push_back(self, uses: Sequence[Contribution]) -> list[tuple[Source, Dense]]:
        """Per-example gradients of the parameters, through the derivation, for all uses together."""
        total = sum(materialise(as_multiplied(use), self.value.shape) for use in uses)
        assert isinstance(total, Tensor)
        shadows = [source.shadow for source in self.sources]
        grads = torch.autograd.grad(
            self.shadow,
            shadows,
            total.to(self.shadow.dtype),
            is_grads_batched=True,
            retain_graph=True,
            allow_unused=True,
        )
        return [(s, Dense(g)) for s, g in zip(self.sources, grads, strict=True) if g is not None]


def kind_of(name: str, inputs: Sequence[Source | Derived], out: Tensor) -> Kind:
    """Does the op `name` keep the gradient's entries, in place or transposed?"""
    if len(inputs) != 1:
        return "other"
    (given,) = inputs
    kind: Kind = given.kind if isinstance(given, Derived) else "same"
    if name in CASTS and given.value.shape == out.shape:
        return kind
    if name in _RESHAPES and kind == "same" and given.value.is_contiguous() and given.value.numel() == out.numel():
        return "same"
    turned = given.value.dim() == 2 and out.shape == given.value.shape[::-1]
    if name in _TRANSPOSES and turned and out.stride() == given.value.stride()[::-1]:
        return {"same": "transposed", "transposed": "same", "other": "other"}[kind]  # type: ignore[return-value]
    return "other"


_COPIES = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "tile"})


def shares_rows(name: str, inputs: Sequence[Source | Derived], out: Tensor) -> bool:
    """Is every row of `out` along its first axis a copy of one row?"""
    if len(inputs) != 1 or out.dim() == 0:
        return False
    (given,) = inputs
    if name in _COPIES:
        return given.value.dim() < out.dim() or given.value.shape[0] == 1
    return isinstance(given, Derived) and given.shared_rows and name in CASTS


def is_random(name: str) -> bool:
    """Ops that must not be run twice."""
    return name in _RANDOM


def op_name(func: Any) -> str:
    """`linear`, `__add__`, `T`: as a person would say it."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__"):
        kind = name
        name = getattr(getattr(func, "__self__", None), "__name__", name)
        if kind == "__set__":
            return f"{name} ="
        return "t" if name in ("T", "mT", "H", "mH") else name
    return str(name)


def names_of(trained: Sequence[Source | Derived]) -> str:
    """The parameters behind some tensors, for messages."""
    return ", ".join(sorted({name for t in trained for name in t.names}))


def no_rule(op: str, trained: Sequence[Source | Derived], how: str) -> UnsupportedOp:
    """The refusal of an op, by name of parameter, module and op."""
    names = sorted({name for t in trained for name in t.names})
    module = ", ".join(dict.fromkeys(name.rpartition(".")[0] or "the model itself" for name in names))
    packed = (
        " Packed sequences are not taken: pad to one length." if op in ("lstm", "gru", "rnn_tanh", "rnn_relu") else ""
    )
    return UnsupportedOp(
        f"Parameter {', '.join(names)} (module {module}) enters the op {op!r} {how}, for which there is no per-example "
        f"rule.{packed} "
        "Write it with supported ops, expand the parameter over the batch first, pass op_rules={…}, freeze it, or use "
        "engine='vmap'."
    )
