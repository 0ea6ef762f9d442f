"""Kinds of ops that the tape treats alike."""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ELEMENTWISE = (
    "add sub rsub mul multiply div divide true_divide pow maximum minimum where lerp addcmul addcdiv "
    "gt lt ge le eq ne atan2 hypot copysign logaddexp fmod remainder "
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ "
    "__itruediv__ __div__ __rdiv__ __pow__ __rpow__ __gt__ __lt__ __ge__ __le__ __eq__ __ne__ add_ sub_ mul_ div_"
).split()
BROADCASTS = frozenset(
    getattr(owner, name) for owner in (torch, torch.Tensor) for name in _ELEMENTWISE if hasattr(owner, name)
)
MATMULS = frozenset((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__))
JOINS = frozenset((torch.cat, torch.concat, torch.concatenate, torch.stack))  # along another axis than the first
BATCHED = frozenset((torch.bmm, torch.Tensor.bmm, torch.baddbmm, F.scaled_dot_product_attention))
LOOKS_ONLY = frozenset({"expand_as", "view_as", "reshape_as", "type_as", "to"})  # at the second tensor's shape or dtype
