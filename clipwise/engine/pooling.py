"""Max pooling on a CPU, channel by channel beside each other.

PyTorch has a vectorised kernel for images whose channels are neighbours in memory, and a loop over single numbers for
all others: in small networks half of a step. Copying to that order and back costs less. Values, gradients and which of
equal numbers counts are the same to the last bit (tests/test_pooling.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .static import is_static

_CHANNELS = 8  # from which the copies pay
_OPS = (F.max_pool2d, torch.max_pool2d)


def quicker(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same op in its faster form, where it has one."""
    return max_pool2d if func in _OPS and not is_static() else func


def max_pool2d(
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """As that of torch.nn.functional."""
    slow = input.device.type == "cpu" and input.dim() == 4 and input.is_contiguous() and input.shape[1] >= _CHANNELS
    if return_indices or not slow or input.dtype not in (torch.float32, torch.float64):
        pool: Any = F.max_pool2d
        return pool(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices=return_indices)
    window = (kernel_size, () if stride is None else stride, padding, dilation)
    return _Neighbours.apply(input, [*map(_listed, window), ceil_mode])


class _Neighbours(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: list[Any]) -> Tensor:
        spread = x.contiguous(memory_format=torch.channels_last)
        out, places = torch.ops.aten.max_pool2d_with_indices(spread, *window)
        ctx.save_for_backward(x, places.contiguous())
        ctx.window = window
        return out.clone(memory_format=torch.contiguous_format)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, places = ctx.saved_tensors
        return torch.ops.aten.max_pool2d_with_indices_backward(grad.contiguous(), x, *ctx.window, places), None


def _listed(value: Any) -> Any:
    """As the ops below Python take sizes."""
    return [value] if isinstance(value, int) else value
