"""Max pooling of images on a CPU, with the channels beside each other.

PyTorch has a vectorised kernel for images whose channels are neighbours in memory, and a loop over single numbers for
all others: in small networks half of a step. Copying to that order and back costs less. Values, gradients and which of
equal numbers counts are the same to the last bit (tests/test_pooling.py).
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from ..errors import UnsupportedOp
from .static import is_static

_CHANNELS, _MANY = 8, 2**13  # channels and entries from which the copies pay
OPS: tuple[Callable[..., Any], ...] = (F.max_pool2d, torch.max_pool2d)
_MAX_POOL = re.compile(r"max_pool([123])d(_with_indices)?(\.\w+)?")


def quicker(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same op in its faster form, where it has one."""
    return max_pool2d if func in OPS and not is_static() else func


def max_pool2d(*args: Any, **kwargs: Any) -> Any:
    """As that of torch.nn.functional; whatever is unusual goes there."""
    given = _bound(*args, **kwargs)
    if given is None or not _pays(*given) or _transformed():
        pool: Any = F.max_pool2d
        return pool(*args, **kwargs)
    return _Neighbours.apply(*given)


def check_window(name: str, args: Any, kwargs: Any) -> None:
    """Refuse windows that see nothing of an image: PyTorch then takes a place outside, which may be another's."""
    if "max_pool" not in name or (found := _MAX_POOL.fullmatch(name)) is None:
        return
    given = dict(zip(("input", "kernel_size", "stride", "padding", "dilation"), args, strict=False)) | kwargs
    x, axes = given.get("input", given.get("self")), int(found[1])
    stride = _each(given.get("stride"), axes) or _each(given.get("kernel_size"), axes)
    padding, dilation = _each(given.get("padding", 0), axes), _each(given.get("dilation", 1), axes)
    if stride is None or padding is None or dilation is None or min(*stride, *dilation) < 1:
        return  # torch has something to say about it
    if not isinstance(x, Tensor) or x.dim() < axes:
        return
    for side, hop, before, step in zip(x.shape[-axes:], stride, padding, dilation, strict=True):
        starts = range(-before, min(0, hop * step - before), hop)  # from there on the remainders come again
        if any(start % step >= side > 0 for start in starts):  # the first place that is not before the image
            raise UnsupportedOp(
                f"{name} with dilation {step} and padding {before} along {side} places: a window may see none of them, "
                "and PyTorch then sends its gradient to another image. Use a smaller dilation or less padding."
            )


def _each(value: Any, axes: int) -> list[int] | None:
    """A number for each axis; None where torch would not take it, or it is left out."""
    try:
        values = [operator.index(v) for v in (value if isinstance(value, (list, tuple)) else (value,))]
    except TypeError:
        return None
    values *= axes if len(values) == 1 else 1
    return values if len(values) == axes else None


def _bound(
    input: Any = None,
    kernel_size: Any = None,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: Any = False,
    return_indices: Any = False,
    *more: Any,
    **other: Any,
) -> tuple[Tensor, list[Any]] | None:
    """The image, and its window as ops below Python take it; None for arguments that are out of the ordinary."""
    window = [_listed(v) for v in (kernel_size, () if stride is None else stride, padding, dilation)]
    strange = more or other or None in window or not window[0] or return_indices is not False
    if strange or type(ceil_mode) is not bool or type(input) is not Tensor:
        return None
    return input, [*window, ceil_mode]


def _listed(value: Any) -> list[int] | None:
    values = [value] if type(value) is int else value
    plain = isinstance(values, (list, tuple)) and all(type(v) is int for v in values)
    return list(values) if plain else None


def _pays(x: Tensor, window: list[Any]) -> bool:
    kernel, stride, *_ = window
    if any(hop > side for side, hop in zip(kernel * 2, stride * 2, strict=False)):
        return False  # reads little of an image, of which all would be copied
    images = x.layout is torch.strided and x.device.type == "cpu" and x.dim() == 4 and x.is_contiguous()
    wide = images and x.shape[1] >= _CHANNELS and x.numel() >= _MANY and x.shape[2] * x.shape[3] > 1
    return wide and x.dtype in (torch.float32, torch.float64)


def _transformed() -> bool:
    """Within torch.func, with forward derivatives, or under a mode of the user's, which has its own say."""
    watched, deep = torch._C._len_torch_function_stack() > 0, torch._C._functorch.peek_interpreter_stack() is not None
    return watched or deep or forward_ad._current_level >= 0


class _Neighbours(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: list[Any]) -> Tensor:
        spread = x.contiguous(memory_format=torch.channels_last)
        out, places = torch.ops.aten.max_pool2d_with_indices(spread, *window)
        ctx.save_for_backward(x, places)
        ctx.window = window
        return out.clone(memory_format=torch.contiguous_format)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, places = ctx.saved_tensors
        return torch.ops.aten.max_pool2d_with_indices_backward(grad, x, *ctx.window, places), None
