"""What a model holds beside its code: parameters, buffers, and tensors that are plain attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


def held_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Everything a forward pass may write to, by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}".lstrip("."), value


def kept_state(model: nn.Module) -> dict[str, Tensor]:
    """A copy of all of it."""
    return {name: b.detach().clone() for name, b in held_tensors(model)}


def restore_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Write back what has changed; a tensor that was not there before goes."""
    with torch.no_grad():
        for name, b in held_tensors(model):
            if name in state and b.shape == state[name].shape and not torch.equal(b, state[name]):
                b.copy_(state[name])
    for path, module in model.named_modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and f"{path}.{name}".lstrip(".") not in state:
                setattr(module, name, None)
