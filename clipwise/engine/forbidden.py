"""Ops that are refused on data, whether or not a trained parameter is in them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..errors import UnsupportedOp
from .ops import OP_RULES, bind, check_batch_norm, check_instance_norm
from .pooling import check_window
from .seen import is_inplace

_BATCH_NORMS = {
    F.batch_norm: "input running_mean running_var weight bias training momentum eps".split(),
    torch.batch_norm: "input weight bias running_mean running_var training momentum eps".split(),
}


def check_op(func: Any, name: str, args: Any, kwargs: Any, data: bool) -> None:
    """Refuse an op on data that would mix examples or write what is never noised."""
    check_window(name, args, kwargs)  # torch.func hides that it is data
    if not data:
        return
    if func in _BATCH_NORMS:
        check_batch_norm(dict(zip(_BATCH_NORMS[func], args, strict=False)) | kwargs)
    if func in (F.instance_norm, torch.instance_norm):
        check_instance_norm(bind(OP_RULES[F.instance_norm], args, kwargs))
    if is_inplace(func) and args and isinstance(args[0], nn.Parameter):
        raise UnsupportedOp(
            f"{name} writes data into a parameter during the forward pass: it would be published without noise. "
            "Compute a new tensor instead."
        )
    if func is torch.autograd.grad and kwargs.get("create_graph"):
        raise UnsupportedOp(
            "torch.autograd.grad(create_graph=True) in the loss needs second derivatives, which are not followed. "
            "Use engine='vmap' with torch.func, or leave the gradient penalty out."
        )
    if func in (torch.autograd.backward, torch.Tensor.backward):
        raise UnsupportedOp("backward() inside loss_fn would write gradients that are not clipped. Leave it out.")
