"""fix_batch_norm: group norm in the place of batch norm, which mixes examples."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ._check import count
from .errors import UnsupportedOp


def fix_batch_norm(model: nn.Module, groups: int = 32) -> nn.Module:
    """Replace every batch norm of `model` by a group norm of the same width, in place; returns the model.

    Scale and shift are kept; running statistics are dropped, so a pretrained model has to be trained further. The
    number of groups is the largest divisor of the channels that is at most `groups` and leaves four channels to each.
    Make the optimizer afterwards.

    >>> fix_batch_norm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))[1].num_groups  # type: ignore[index]
    2
    """
    count(groups=groups)
    return _fixed(model, groups, {})


def _fixed(module: nn.Module, groups: int, made: dict[int, nn.Module]) -> nn.Module:
    if id(module) not in made:
        made[id(module)] = _group_norm(module, groups) if isinstance(module, _BatchNorm) else module
        for name, child in list(module._modules.items()):
            if child is not None:
                module._modules[name] = _fixed(child, groups, made)
    return made[id(module)]


def _group_norm(norm: _BatchNorm, groups: int) -> nn.GroupNorm:
    width, kind = norm.num_features, type(norm)
    if kind not in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm):
        raise UnsupportedOp(f"fix_batch_norm knows PyTorch's own batch norms; {kind.__name__} may do more than those.")
    if width < 2:
        raise UnsupportedOp(f"{kind.__name__}({width}): a group norm over one channel is zero everywhere. Remove it.")
    number = max(n for n in range(1, max(min(groups, width // 4), 1) + 1) if width % n == 0)
    made = nn.GroupNorm(number, width, norm.eps, norm.affine)
    if norm.affine:
        made.weight, made.bias = norm.weight, norm.bias
    return made.train(norm.training)
