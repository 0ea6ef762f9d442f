"""What a model holds beside its code: parameters, buffers, and tensors that are plain attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Kept:
    """Copies of a model's tensors by name, and what the attributes of its modules were."""

    tensors: dict[str, Tensor]
    attributes: dict[str, dict[str, Any]]


def held_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Everything a forward pass may write to, by name."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{path}.{name}".lstrip("."), value


def kept_state(model: nn.Module) -> Kept:
    """A copy of all of it."""
    tensors = {name: b.detach().clone() for name, b in held_tensors(model)}
    return Kept(tensors, {path: dict(vars(module)) for path, module in model.named_modules()})


def restore_state(model: nn.Module, kept: Kept) -> None:
    """Tensor attributes that were put in since then go; what has changed is written back."""
    for path, module in model.named_modules():
        before = kept.attributes.get(path, {})
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor) and before.get(name) is not value:
                if name in before:
                    vars(module)[name] = before[name]
                else:
                    del vars(module)[name]
    with torch.no_grad():
        for name, b in held_tensors(model):
            known = kept.tensors.get(name)
            if known is not None and b.shape == known.shape and not torch.equal(b, known):
                b.copy_(known)
