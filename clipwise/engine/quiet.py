"""Randomness made repeatable for the preflight: the same for a record alone and in a batch.

Dropout is off. Noise that the model draws itself (a VAE, stochastic depth, noise layers) becomes a fixed
pattern, the same in every row; two passes use a high and a low level, so that a path which one of them
drops is seen in the other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_DROPOUTS = frozenset(
    (F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout)
)
_PLACE = {  # of the dropout probability among the arguments of fused ops
    F.multi_head_attention_forward: (10, "dropout_p"),
    F.scaled_dot_product_attention: (4, "dropout_p"),
    torch.lstm: (5, "dropout"),
    torch.gru: (5, "dropout"),
    torch.rnn_tanh: (5, "dropout"),
    torch.rnn_relu: (5, "dropout"),
}
_UNIFORM = frozenset((torch.rand, torch.rand_like, torch.Tensor.uniform_))
_NORMAL = frozenset((torch.randn, torch.randn_like, torch.Tensor.normal_, torch.normal))
_INTEGERS = frozenset((torch.randint, torch.randint_like))
_KEPT = frozenset((torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_))


HIGH, LOW = 0.998, 0.002  # so that a path which one draw in a few hundred opens is seen


class Quiet(TorchFunctionMode):
    """Everything else as it is: a batch norm in training mode must stay visible."""

    def __init__(self, level: float = HIGH) -> None:
        """`level` is what uniform draws lie around."""
        super().__init__()
        self._level = level

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See one op."""
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func in _PLACE:
            place, name = _PLACE[func]
            if len(args) > place and isinstance(args[place], float):
                args = (*args[:place], 0.0, *args[place + 1 :])
            elif name in kwargs:
                kwargs = {**kwargs, name: 0.0}
        out = func(*args, **kwargs)
        if func in _INTEGERS and isinstance(out, Tensor):
            first, stop = _limits(func, args, kwargs)
            share = self._level + 0.001 * _wave(out.double())
            return _filled(out, first + (share * (stop - first)).floor().clamp(0, stop - first - 1))
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        if func in _UNIFORM:
            low, high = (args[1], args[2]) if func is torch.Tensor.uniform_ and len(args) > 2 else (0.0, 1.0)
            return _filled(out, low + (high - low) * (self._level + 0.001 * _wave(out)))
        if func in _NORMAL:
            return _filled(out, self._normal(func, args, kwargs, _wave(out)))
        return _filled(out, torch.ones_like(out)) if func in _KEPT else out

    def _normal(self, func: Any, args: Any, kwargs: Any, wave: Tensor) -> Tensor:
        if func in (torch.randn, torch.randn_like):
            return wave
        given = list(args[1:] if func is torch.Tensor.normal_ else args)
        mean = given[0] if given else kwargs.get("mean", 0.0)
        std = given[1] if len(given) > 1 else kwargs.get("std", 1.0)
        return torch.as_tensor(mean + std * wave)


def _limits(func: Any, args: Any, kwargs: Any) -> tuple[int, int]:
    """`low` (0 unless given) and `high` of torch.randint, which takes them in two ways."""
    given = [x for x in args[func is torch.randint_like :] if isinstance(x, int)]
    high = kwargs.get("high", given[-1] if given else 1)
    return kwargs.get("low", given[0] if len(given) > 1 or (given and "high" in kwargs) else 0), high


def _wave(like: Tensor) -> Tensor:
    """Numbers in [-1, 1] that differ along all axes but the first."""
    trailing = like.shape[1:]
    flat = torch.sin(torch.arange(math.prod(trailing), device=like.device, dtype=torch.float64) * 1.3 + 0.5)
    return flat.reshape(trailing).to(like.dtype).expand(like.shape)


def _filled(out: Tensor, values: Tensor) -> Tensor:
    with torch.no_grad():
        return out.copy_(values)
