"""A linear op whose output has a length that tensor cores like: for a compiled step on a GPU.

A vocabulary of 50,257 words makes rows of logits that begin at odd places, and every product of them slow or a copy.
With rows of 50,264 the gradient at the output is written once, in the layout that all products take. The columns beyond
the real ones are cut off before the model sees them, so their gradient is zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .contributions import Contribution, Outer
from .ops import OP_RULES, Call, OpRule
from .static import is_static

_TO = 8
_WIDE = 1024  # outputs from which it is worth it
_WHERE = frozenset({"cuda"})


def padded_linear(rule: OpRule, values: Mapping[str, Any]) -> tuple[Tensor | None, int | None]:
    """The output with more columns than are real, and how many are; None where the op is to run as it is."""
    if rule is not OP_RULES[F.linear] or not is_static():  # a rule of the user's own sees what it expects
        return None, None
    x, weight, bias = values["input"], values["weight"], values.get("bias")
    if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return None, None
    more = -weight.shape[0] % _TO
    if x.device.type not in _WHERE or x.dtype == torch.float64 or not more or weight.shape[0] < _WIDE:
        return None, None
    out = F.linear(x, F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more)))
    return out, weight.shape[0]


def uses_of(rule: OpRule, call: Call, grad: Tensor, columns: int | None) -> Iterator[tuple[str, Contribution]]:
    """What the rule finds in the real columns; the weight's use with all of them, so that nothing is copied."""
    for name, use in rule.uses(call, grad if columns is None else grad[..., :columns]):
        if columns is not None and isinstance(use, Outer):
            use = Outer(grad.reshape(*use.left.shape[:3], -1), use.right, use.size)
        yield name, use
