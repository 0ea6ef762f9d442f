"""What a model holds beside its code: parameters, buffers, and tensors that are plain attributes."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
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
    yield from beside_parameters(model)


def beside_parameters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers, and tensors that are plain attributes of a module."""
    for path, module in model.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if isinstance(value, Tensor):
                yield f"{path}.{name}".lstrip("."), value


Named = Callable[[], Iterable[tuple[str, Tensor]]]


class Untouched:
    """Tensors by name as they are now, to ask later which are others or were written to.

    They are held, so that no other one takes the place of one that is gone unseen. A write shows in the count that
    torch keeps; tensors of inference mode have none, and are copied. `values` may be written over with themselves.
    """

    def __init__(self, named: Named, values: Mapping[str, Tensor] | None = None) -> None:
        """As they are."""
        self._named, self._values = named, values or {}
        self._before = {name: (x, _mark(x)) for name, x in named()}

    def written(self) -> list[str]:
        """Names of those that are not as they were."""
        now = dict(self._named())
        return [name for name in {**self._before, **now} if not self._kept(name, now.get(name))]

    def _kept(self, name: str, now: Tensor | None) -> bool:
        if now is None:
            return False
        before, mark = self._before.get(name, (None, None))
        same = same_values(mark, now) if isinstance(mark, Tensor) else now is before and mark == _mark(now)
        return same or (name in self._values and same_values(self._values[name], now))


def _mark(x: Tensor) -> int | Tensor:
    return x.detach().clone() if x.is_inference() else x._version


@contextmanager
def attributes_kept(model: nn.Module) -> Iterator[list[str]]:
    """What a tracer puts into modules is no tensor: afterwards all attributes are as before.

    Yields a list, which then names the tensors that others had taken the place of.
    """
    before = [(path, m, dict(vars(m)), dict(m._buffers)) for path, m in model.named_modules()]
    replaced: list[str] = []
    try:
        yield replaced
    finally:
        for path, module, plain, buffers in before:
            now = {**vars(module), **module._buffers}
            gone = [n for n, x in {**plain, **buffers}.items() if isinstance(x, Tensor) and now.get(n) is not x]
            replaced += [f"{path}.{name}".lstrip(".") for name in gone]
            vars(module).clear()
            vars(module).update(plain)
            module._buffers.clear()
            module._buffers.update(buffers)


@dataclass(frozen=True)
class Writes:
    """What forward passes write to beside the parameters, the same whatever the data is."""

    changing: frozenset[str]  # other values than before
    same: frozenset[str]  # the values that they had


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
                with torch.inference_mode(b.is_inference()), torch.no_grad():  # in this order: the first lets grad in
                    b.copy_(known)


CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, partial, type)
_DEEP, _MOST = 4, 10_000  # how far into containers, and how many values of a module that are no tensors


def left_behind(*holders: Any) -> dict[str, Any]:
    """What a model, or a loss that is an object, remembers: tensors, arrays, numbers, in containers too."""
    found: dict[str, Any] = {}
    for number, holder in enumerate(holders):
        modules = holder.named_modules() if isinstance(holder, nn.Module) else [(type(holder).__name__, holder)]
        for path, module in modules:
            if not isinstance(module, CODE) and hasattr(module, "__dict__"):
                own: dict[str, Any] = {}
                _look(vars(module), f"{path}" if number == 0 else f"{type(holder).__name__} {path}", _DEEP, own)
                found |= own
    return {name.replace("_buffers.", ""): value for name, value in found.items()}


def _look(value: Any, path: str, depth: int, found: dict[str, Any]) -> None:
    if isinstance(value, (nn.Module, nn.Parameter, *CODE)):
        return  # parameters: the tape refuses to write to them, and they are large
    if isinstance(value, Tensor):
        found[path] = value.detach().clone()
    elif len(found) > _MOST:
        return
    elif isinstance(value, (bool, int, float, complex, str, np.generic)):
        found[path] = repr(value)
    elif isinstance(value, np.ndarray):
        found[path] = (value.shape, value.tobytes())
    elif depth and isinstance(value, (Mapping, list, tuple, set, frozenset)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            _look(item, f"{path}.{key}".lstrip("."), depth - 1, found)
    elif depth and hasattr(value, "__dict__"):
        _look(vars(value), path, depth - 1, found)


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Names of what is not the same in both."""
    return [name for name in {**one, **other} if not same_values(one.get(name), other.get(name))]


def same_values(x: Any, y: Any) -> bool:
    """Of two tensors, or of two of what `left_behind` gives."""
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return type(x) is type(y) and not isinstance(x, Tensor) and bool(x == y)
    alike = (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device) and x.layout == y.layout == torch.strided
    return alike and bool(((x == y) | ((x != x) & (y != y))).all())  # NaN is NaN
