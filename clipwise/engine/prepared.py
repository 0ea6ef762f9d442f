"""An op with its factors as tensor cores take them: for a compiled step on a GPU.

Three things would otherwise make the compiler keep a second copy of an op's input or of the gradient at its output:

- a vocabulary of 50,257 words, whose rows of logits begin at odd places: the output gets more columns, cut off before
  the model sees them, so that their gradient is zero;
- channels that do not come last, as kernels for convolutions want them;
- bits beyond those of TF32 (products.py): they are cut where the numbers are made, if the user lets tensor cores cut
  them. (A convolution's input is left alone, since others read it too, and strips.py makes a copy of it anyway.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._prims_common import suggest_memory_format

from .contributions import Contribution, Outer, Unfolded
from .conv import DEEP
from .op_rule import Call, OpRule
from .ops import OP_RULES
from .products import cut, cut_once
from .static import is_static

_TO = 64  # columns: 128 bytes of bfloat16, a line of the cache
_WIDE = 1024  # outputs from which more of them are worth it
_WHERE = frozenset({"cuda"})


class Cut(torch.autograd.Function):
    """To TF32's bits; the gradient as it comes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Cut."""
        return cut(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """The identity."""
        return grads[0]


class Brought(torch.autograd.Function):
    """The same tensor, or its real columns; its gradient is cut, and laid out as products take it."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, cuts: bool, last: bool, columns: int | None) -> Tensor:
        """An alias or a copy, and no view (edges.py)."""
        ctx.cuts, ctx.last, ctx.more = cuts, last, 0 if columns is None else y.shape[-1] - columns
        return y.detach() if columns is None else y[..., :columns].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """One gradient, for the op before and for the products.

        Columns that are not real are put beside it, and not around it: a compiler then writes the gradient where it
        stays, in the pass over each row that has made it. Where it is cut as well, that would take a second pass and
        as much memory again: as one function of every place, read once, it is written over the output it is made of.
        """
        (grad,) = grads
        if ctx.cuts and ctx.more:
            wide = grad.new_zeros(*grad.shape[:-1], grad.shape[-1] + ctx.more)
            return wide.slice_scatter(cut_once(grad), dim=-1, end=grad.shape[-1]), None, None, None
        grad = cut(grad) if ctx.cuts else grad
        grad = grad.contiguous(memory_format=torch.channels_last) if ctx.last else grad
        beside = (grad, grad.new_zeros(*grad.shape[:-1], ctx.more))
        return torch.cat(beside, dim=-1) if ctx.more else grad, None, None, None


@dataclass(frozen=True)
class Prepared:
    """An op that has run on such factors."""

    values: Mapping[str, Any]  # its arguments
    out: Tensor
    columns: int | None  # those that are real, where there are more
    cuts: bool
    last: bool
    turned: bool = False  # the output's channels would not lie last

    def shown(self, out: Tensor) -> Tensor:
        """What the model sees: the output as it would have been, for models that look at how it lies in memory."""
        out = Brought.apply(out, self.cuts, self.last, self.columns)
        return out.contiguous() if self.turned else out


def prepared(rule: OpRule, values: Mapping[str, Any]) -> Prepared | None:
    """None where the op is to run as it is. A rule of the user's own sees what it expects."""
    if not is_static() or rule not in (OP_RULES[F.linear], OP_RULES[torch.conv2d]):
        return None
    x, weight = values["input"], values["weight"]
    if x.device.type not in _WHERE or x.dtype not in (torch.float32, torch.bfloat16) or weight.dtype != x.dtype:
        return None
    cuts = _allowed() and x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type)
    if rule is OP_RULES[F.linear]:
        return _linear(dict(values), cuts)
    cuts = cuts and _allowed_in_convolutions()
    if weight.dim() != 4 or weight.shape[1] < DEEP:
        return None
    turned = torch.channels_last not in (suggest_memory_format(x), suggest_memory_format(weight))
    values = {**values, "input": x.contiguous(memory_format=torch.channels_last)}
    return Prepared(values, torch.conv2d(**values), None, cuts, True, turned)


def _allowed() -> bool:
    """Whether the user lets matrix products of float32 run as TF32."""
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _allowed_in_convolutions() -> bool:
    """Convolutions have a setting of their own."""
    return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined]


def _linear(values: dict[str, Any], cuts: bool) -> Prepared | None:
    weight, bias = values["weight"], values.get("bias")
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    more = -weight.shape[0] % _TO if weight.shape[0] >= _WIDE and weight.shape[0] % 8 else 0
    if not more and not cuts:
        return None
    if cuts:
        values["input"] = _cut(values["input"])
    wide = F.pad(weight, (0, 0, 0, more)) if more else weight
    wide_bias = F.pad(bias, (0, more)) if more and bias is not None else bias
    out = F.linear(values["input"], wide, wide_bias)
    return Prepared(values, out, weight.shape[0] if more else None, cuts, False)


def _cut(x: Tensor) -> Tensor:
    found: Tensor = Cut.apply(x)
    return found


def uses_of(rule: OpRule, call: Call, grad: Tensor, ready: Prepared | None) -> Iterator[tuple[str, Contribution]]:
    """What the rule finds in the real columns; the weight's use with all of them, so that nothing is copied."""
    if ready is None:
        yield from rule.uses(call, grad)
        return
    for name, use in rule.uses(call, grad[..., : ready.columns] if ready.columns is not None else grad):
        if ready.columns is not None and isinstance(use, Outer):
            use = Outer(grad.reshape(*use.left.shape[:3], -1), use.right, use.size)
        if isinstance(use, (Outer, Unfolded)):
            use = replace(use, cut=ready.cuts)
        yield name, use
