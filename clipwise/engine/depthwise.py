"""Per-example gradients of convolutions with one input channel per group (depthwise ones, grey images, sound).

The gradient of such a filter is itself a convolution, of the input with the output's gradient: stride and dilation
change places. All channels of all examples are then groups of one convolution, and no patch is ever written out.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from .._types import sum_dtype

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_BLOCK = 16  # channels that one kernel works on: for any other number another kernel steps in, which rounds otherwise


def depthwise_gradient(
    x: Tensor,
    grad: Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...] | int = 0,
) -> Tensor:
    """[n, c, *in] and [n, p, *out] → [n, p, 1, *kernel], in float32 or wider. Filter j reads channel j·c // p.

    >>> import torch
    >>> x, grad = torch.ones(1, 1, 3), torch.tensor([[[1.0, 2.0]]])
    >>> depthwise_gradient(x, grad, (2,), (1,), (1,))
    tensor([[[[3., 3.]]]])
    """
    size, channels, filters = len(x), x.shape[1], grad.shape[1]
    dtype = sum_dtype(grad.dtype)
    rows, each = size * channels, filters // channels
    more = -rows % _BLOCK
    inputs, filters_of = x.to(dtype).reshape(rows, -1), grad.to(dtype).reshape(rows * each, -1)
    if more:  # padding by nothing copies, too
        inputs, filters_of = F.pad(inputs, (0, 0, 0, more)), F.pad(filters_of, (0, 0, 0, more * each))
    made = _CONVOLUTIONS[len(kernel)](
        inputs.reshape(1, rows + more, *x.shape[2:]),
        filters_of.reshape((rows + more) * each, 1, *grad.shape[2:]),
        stride=dilation,
        padding=padding,
        dilation=stride,
        groups=rows + more,
    )
    inside = (slice(0, rows * each), *(slice(0, k) for k in kernel))  # what strides leave over lies behind
    return made[0][inside].reshape(size, filters, 1, *kernel)
