"""What an engine gives: losses, norms, and clipped sums for given weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._types import sum_dtype
from ..errors import LossShape
from .reduce import Reduced, is_small, join, small, squared_norms


@dataclass(frozen=True)
class Gradients:
    """Per-example gradients of one batch, not materialised unless that was cheaper. All of it is secret."""

    losses: Tensor
    reduced: dict[str, Reduced | None]  # None: the parameter was not used
    parameters: Mapping[str, nn.Parameter]

    @property
    def unused(self) -> list[str]:
        """Parameters that no example's loss depends on."""
        return [name for name, r in self.reduced.items() if r is None]

    def norms(self, groups: Sequence[Sequence[str]]) -> Tensor:
        """Upper bounds of the norms per group of parameters, float64, shape [b, groups]."""
        zero = torch.zeros(len(self.losses), dtype=torch.float64, device=self.losses.device)
        columns = []
        for group in groups:
            found = [self.reduced[name] for name in group]
            parts = [*(join(grads) for grads in small(found)), *(r for r in found if r is not None and not is_small(r))]
            columns.append(sum((found.to(zero) for found in squared_norms(parts)), zero).sqrt())
        return torch.stack(columns, dim=1)

    def weighted_sum(self, weights: Tensor, keep: Tensor, groups: Sequence[Sequence[str]]) -> dict[str, Tensor]:
        """Σ_i w_i·g_i per parameter; examples outside `keep` count as if they were not there.

        Frees each parameter's recorded tensors as soon as it is summed, so it can be called once.
        """
        sums: dict[str, Tensor] = {}
        for column, group in zip(weights.unbind(1), groups, strict=True):
            taken = {name: self.reduced.pop(name) for name in group}
            together: dict[int, Tensor] = {}
            for grads in small(list(taken.values())):
                total = join(grads).weighted_sum(column.to(grads[0].grad.device), keep.to(grads[0].grad.device))
                together.update(zip(map(id, grads), total.split([g.grad[0].numel() for g in grads]), strict=True))
            for name in group:
                parameter, reduced = self.parameters[name], taken.pop(name)
                dtype = sum_dtype(parameter.dtype)
                if reduced is None:
                    sums[name] = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
                    continue
                if id(reduced) in together:
                    total = together[id(reduced)].reshape(parameter.shape)
                else:
                    total = reduced.weighted_sum(column.to(parameter.device), keep.to(parameter.device))
                assert total.shape == parameter.shape, f"{name}: {total.shape} for {parameter.shape}"
                sums[name] = total.to(parameter.device, dtype)
        return sums


def check_losses(losses: Any, size: int) -> None:
    """One number per example, or refuse."""
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        axes = f"a tensor of {losses.dim()} axes" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        if isinstance(losses, Tensor) and losses.dim() == 1:
            axes = "a vector of another length (one loss per token? average those of each example)"
        raise LossShape(
            f"loss_fn must return one loss per example, a vector as long as the batch, but gave {axes}. A mean or sum "
            "over the batch hides the examples from clipping. Use reduction='none', and average over positions, not "
            "examples."
        )
