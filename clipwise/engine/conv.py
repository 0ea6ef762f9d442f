"""Rules for convolutions: linear ops on patches of their input."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedOp
from .contributions import Dense, Unfolded, Window, is_native
from .depthwise import depthwise_gradient
from .op_rule import Call, Uses, per_channel
from .products import precision_of
from .static import is_static

DEEP = 16  # channels from which kernels read patches where they lie (patches.py)
_COLUMNS = 16  # of patches, from which a compiler copies them and multiplies faster than depthwise.py
_PLACES = 512  # of a kernel, up to which the room for rounding covers their sum too


def _pairs(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)


def _pad_same(kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    pads: list[int] = []
    for k, step in zip(reversed(kernel), reversed(dilation), strict=True):
        total = step * (k - 1)
        pads += [total // 2, total - total // 2]
    return pads


def _padded(x: Tensor, kernel: tuple[int, ...], call: Call) -> Tensor:
    dims, padding = len(kernel), call.values.get("padding", 0)
    if padding == "same":
        return F.pad(x, _pad_same(kernel, _pairs(call.values.get("dilation", 1), dims)))
    if padding == "valid" or not any(_pairs(padding, dims)):
        return x
    return F.pad(x, [n for n in reversed(_pairs(padding, dims)) for _ in (0, 1)])


def _channels_last(x: Tensor, overlap: bool) -> Tensor:
    """[b, *in, c], copied: by an op of its own where a compiler would read patches that overlap from afar."""
    x = x.movedim(1, -1)
    apart = overlap and is_static() and x.device.type == "cuda"
    return torch.ops.clipwise.cat([x]) if apart else x.contiguous()


def _window(kernel: tuple[int, ...], call: Call, out: tuple[int, ...]) -> Window:
    stride, dilation = (_pairs(call.values.get(name, 1), 2) for name in ("stride", "dilation"))
    padding = call.values.get("padding", 0)
    before = (0, 0) if padding == "valid" else _pairs(padding, 2) if padding != "same" else None
    before = before or tuple(_pad_same(kernel, dilation)[2::-2])
    return Window(kernel, stride, before, dilation, out)  # type: ignore[arg-type]


def _patches(x: Tensor, first: int, kernel: tuple[int, ...], call: Call) -> Tensor:
    """The patches that each output position sees: the axes from `first` on become those of the output."""
    dims = len(kernel)
    stride, dilation = (_pairs(call.values.get(name, 1), dims) for name in ("stride", "dilation"))
    for axis, (k, step, hop) in enumerate(zip(kernel, dilation, stride, strict=True), start=first):
        x = x.unfold(axis, step * (k - 1) + 1, hop)[..., ::step]
    return x


def conv(call: Call, grad: Tensor) -> Uses:
    """A convolution is a linear op on patches; groups are independent linear ops."""
    if "bias" in call.trained:
        yield "bias", Dense(per_channel(call, grad))
    if "weight" in call.trained:
        weight, groups, copies = call.values["weight"], call.values.get("groups", 1), grad.shape[0] // call.size
        kernel, dims, width = tuple(weight.shape[2:]), weight.dim() - 2, weight[0].numel()
        x, padding = call.values["input"], call.values.get("padding", 0)
        as_patches = groups == 1 and is_static() and math.prod(kernel) >= _COLUMNS
        as_patches = as_patches or (groups == 1 and is_native(grad))
        if weight.shape[1] == 1 and grad.device.type == "cpu" and not as_patches:
            stride, dilation = (_pairs(call.values.get(name, 1), dims) for name in ("stride", "dilation"))
            given, pad = (_padded(x, kernel, call), 0) if isinstance(padding, str) else (x, padding)
            made = depthwise_gradient(given, grad, kernel, stride, dilation, pad)
            yield "weight", Dense(made if copies == 1 else made.unflatten(0, (-1, copies)).sum(1))
            return

        in_place = groups == 1 and dims == 2 and weight.shape[1] >= DEEP and math.prod(kernel) <= _PLACES
        in_place = in_place and precision_of(grad, x) != "exact"
        padded = x if in_place else _padded(x, kernel, call)

        def examples(x: Tensor) -> Tensor:  # [b·k, g, t, ·] -> [b, g, k·t, ·]
            return x if copies == 1 else x.unflatten(0, (-1, copies)).transpose(1, 2).flatten(2, 3)

        def by_example(x: Tensor) -> Tensor:  # [b·k, g, …] -> [b, g, k, …]
            apart: Tensor = x.unflatten(0, (-1, copies))
            return apart.movedim(1, 2)

        def view(x: Tensor) -> Tensor:
            seen = _patches(x, 2, kernel, call)  # [b·k, c, *out, *kernel]
            return by_example(seen.unflatten(1, (groups, -1)).movedim(2, 2 + dims))  # [b, g, k, *out, c/g, *kernel]

        def view_last(x: Tensor) -> Tensor:  # [b·k, *in, c]: longer runs of memory, so copied faster
            return by_example(
                _patches(x, 1, kernel, call).movedim(1 + dims, -1)[:, None]
            )  # [b, 1, k, *out, *kernel, c]

        def unfold(x: Tensor) -> Tensor:
            seen = view(x)
            return seen.reshape(*seen.shape[:2], -1, width)

        def unfold_last(x: Tensor) -> Tensor:
            seen = view_last(x)
            return seen.reshape(*seen.shape[:2], -1, width)

        def arrange(x: Tensor) -> Tensor:  # [..., kernel·c] -> [..., c, *kernel]
            return x.reshape(*x.shape[:-1], *kernel, -1).movedim(-1, -1 - dims)

        left = examples(grad.unflatten(1, (groups, -1)).flatten(3).mT)  # [b, g, t, p/g]
        if in_place:
            pad_first = lambda x: unfold_last(_padded(x.movedim(-1, 1), kernel, call).movedim(1, -1))  # noqa: E731
            window = _window(kernel, call, tuple(grad.shape[2:]))
            yield "weight", Unfolded(left, x.movedim(1, -1).contiguous(), pad_first, width, arrange, window=window)
        elif groups == 1:
            overlap = any(k > hop for k, hop in zip(kernel, _pairs(call.values.get("stride", 1), dims), strict=True))
            last, axes = _channels_last(padded, overlap), 1 + dims
            yield "weight", Unfolded(left, last, unfold_last, width, arrange, view=view_last, axes=axes)
        else:
            yield "weight", Unfolded(left, padded, unfold, width, view=view, axes=1 + dims)


def conv_transpose(call: Call, grad: Tensor) -> Uses:
    """A transposed convolution is a convolution with input and output exchanged: patches are cut from its gradient."""
    if "bias" in call.trained:
        yield "bias", Dense(per_channel(call, grad))
    if "weight" in call.trained:
        turned = replace(call, values={**call.values, "input": grad}, trained=frozenset({"weight"}))
        yield from conv(turned, call.values["input"])


def check_conv_transpose(call: Call) -> None:
    """No positions of the output that no input reaches."""
    check_conv(call)
    dims = call.values["weight"].dim() - 2
    extra, stride = (_pairs(call.values.get(n, d), dims) for n, d in (("output_padding", 0), ("stride", 1)))
    if any(e >= s for e, s in zip(extra, stride, strict=True)):
        raise UnsupportedOp(f"{call.op}: output_padding must be smaller than stride.")


def check_conv(call: Call) -> None:
    """An input with a batch axis."""
    weight, x = call.values["weight"], call.values["input"]
    if x.dim() != weight.dim():
        raise UnsupportedOp(f"{call.op}: an input of {x.dim()} axes has no batch axis. Add one: x[None].")
