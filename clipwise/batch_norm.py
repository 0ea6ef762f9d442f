"""fix_batch_norm: group norm in the place of batch norm, which mixes examples."""

from __future__ import annotations

import math

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def fix_batch_norm(model: nn.Module, groups: int = 32) -> nn.Module:
    """Replace every batch norm of `model` by a group norm of the same width, in place; returns the model.

    Scale and shift are kept; running statistics are dropped, so a pretrained model has to be trained further. The
    number of groups is the largest divisor of the channels that is at most `groups` and leaves four channels to each.
    Make the optimizer afterwards.

    >>> fix_batch_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1].num_groups  # type: ignore[index]
    2
    """
    if isinstance(model, _BatchNorm):
        return _group_norm(model, groups)
    for name, child in model.named_children():
        setattr(model, name, fix_batch_norm(child, groups))
    return model


def _group_norm(norm: _BatchNorm, groups: int) -> nn.GroupNorm:
    width = norm.num_features
    number = max(n for n in range(1, max(min(groups, width // 4), 1) + 1) if math.gcd(n, width) == n)
    made = nn.GroupNorm(number, width, norm.eps, norm.affine)
    if norm.affine:
        made.weight, made.bias = norm.weight, norm.bias
        made.to(norm.weight.device, norm.weight.dtype)
    return made.train(norm.training)
