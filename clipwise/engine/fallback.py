"""engine="vmap": whole-model per-example gradients by torch.func. Slow and large, but it accepts more.

It is also the reference that tests compare the tape with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode

from .._types import LossFn, sum_dtype
from ..errors import UnsupportedOp
from .derived import op_name
from .gradients import Gradients, check_losses
from .pooling import check_window
from .reduce import DenseGrad, Reduced


class _Windows(TorchFunctionMode):
    """Refuses max pooling that would send one image's gradient to another."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        check_window(op_name(func), args, kwargs or {})
        return func(*args, **(kwargs or {}))


def vmap_gradients(model: nn.Module, loss_fn: LossFn, data: Any, size: int) -> Gradients:
    """Per-example gradients of every trainable parameter, each example alone in a batch of one."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss_of_one(values: dict[str, Tensor], example: Any) -> tuple[Tensor, Tensor]:
        alone = torch.utils._pytree.tree_map(lambda x: x[None] if isinstance(x, Tensor) else x, example)
        with _reparametrize_module(model, values, tie_weights=True), _Windows():
            losses = loss_fn(model, alone)
        check_losses(losses, 1)
        return losses[0], losses[0].detach()

    values = {name: p.detach() for name, p in parameters.items()}
    leaves, structure = torch.utils._pytree.tree_flatten(data)
    axes = structure.unflatten([0 if isinstance(x, Tensor) else None for x in leaves])
    per_example = torch.func.vmap(
        torch.func.grad(loss_of_one, has_aux=True), in_dims=(None, axes), randomness="different"
    )
    try:
        grads, losses = per_example(values, data)
    except (RuntimeError, NotImplementedError) as error:
        if "vmap" not in str(error) and "functorch" not in str(error):
            raise
        raise UnsupportedOp(f"engine='vmap' cannot run this model: {error}") from error
    reduced: dict[str, Reduced | None] = {
        name: DenseGrad(g.detach().to(sum_dtype(g.dtype))) for name, g in grads.items()
    }
    return Gradients(losses.detach(), reduced, parameters)
