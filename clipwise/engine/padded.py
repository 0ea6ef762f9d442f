"""A linear op whose output has a length that tensor cores like: for a compiled step on a GPU.

A vocabulary of 50,257 words makes rows of logits that begin at odd places, and every product of them slow or a copy.
With rows of 50,264 the gradient at the output is written once, in the layout that all products take. The columns beyond
the real ones are cut off before the model sees them, so their gradient is zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .static import is_static

_TO = 8
_WIDE = 1024  # outputs from which it is worth it


def padded_linear(func: Any, values: Mapping[str, Any]) -> Tensor | None:
    """The output with more columns than the weight has rows, or None where the op is to run as it is."""
    if func is not F.linear or not is_static():
        return None
    x, weight, bias = values["input"], values["weight"], values.get("bias")
    more = -weight.shape[0] % _TO
    if x.device.type != "cuda" or x.dtype == torch.float64 or not more or weight.shape[0] < _WIDE:
        return None
    out: Tensor = F.linear(x, F.pad(weight, (0, 0, 0, more)), None if bias is None else F.pad(bias, (0, more)))
    return out
