"""Ops without a rule: once per example by `vmap`, with a copy of the parameter for each.

Right by construction: example i's rows meet copy i alone, so the gradient that arrives at copy i is example i's. An op
that looked across its batch would be run on one example at a time, which changes its meaning and not the guarantee.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..batch import map_tensors, tensors
from .derived import is_random
from .seen import is_inplace
from .static import is_static


def each_example(
    func: Any,
    name: str,
    args: Any,
    kwargs: Any,
    size: int,
    is_data: Callable[[Tensor], bool],
    copies: Callable[[Tensor], Tensor | None],
) -> Any:
    """The op's result, rows as it would order them; None where this way cannot be taken.

    `copies` gives a parameter once for every example, [b, *shape], and None for other tensors.
    """
    if is_inplace(func) or is_random(name) or kwargs.get("out") is not None:
        return None
    mapped: dict[int, Tensor] = {}
    for x in tensors((args, kwargs)):
        if is_data(x):
            if x.dim() == 0 or x.shape[0] % size:
                return None
            mapped[id(x)] = x.unflatten(0, (size, -1))
        elif (own := copies(x)) is not None:
            mapped[id(x)] = own
        elif size > 1 and x.dim() and x.shape[0] % size == 0:
            return None  # a constant whose first axis may be the examples', or not
    order = list(mapped)

    def one(*given: Tensor) -> Any:
        here = dict(zip(order, given, strict=True))

        def swap(x: Tensor) -> Tensor:
            return here.get(id(x), x)

        return func(*map_tensors(args, swap), **map_tensors(kwargs, swap))

    with torch.no_grad():
        plain = func(*args, **kwargs)
    try:
        made = torch.func.vmap(one, randomness="error")(*mapped.values())
    except (RuntimeError, ValueError):  # an op that vmap does not know, or whose result is no tensor
        return None
    joined = map_tensors(made, lambda x: x.flatten(0, 1) if x.dim() > 1 else x)
    pairs = list(zip(tensors(joined), tensors(plain), strict=False))
    if len(tensors(joined)) != len(tensors(plain)) or any(a.shape != b.shape for a, b in pairs):
        return None
    return joined if is_static() or all(_alike(a, b) for a, b in pairs) else None  # rows may come in another order


def _alike(a: Tensor, b: Tensor) -> bool:
    a, b = (torch.view_as_real(x) if x.is_complex() else x for x in (a.detach(), b.detach()))
    a, b = (x.double().nan_to_num() for x in (a, b))
    return bool(((a - b).abs() <= 1e-2 * (a.abs() + a.abs().mean())).all())
