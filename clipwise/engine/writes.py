"""Compiler passes: what many would make again is written once.

The compiler puts cheap ops into every kernel that reads their result, until one of those reads too many tensors; that
one is then written, and it may be the larger one by far:

- the sum of a residual stream, of which each norm makes float32 numbers: kept for backward, they take twice the
  memory of the sum;
- the sum of an image's gradients at the end of a residual block, which a group norm reads several times;
- numbers for each group of channels, which the backward pass of a group norm puts into one op over the whole image: it
  then reads so many of them that it is written on its own, in an order that suits nobody.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._inductor import inductor_prims
from torch.fx import Graph, Node

_LARGE = 2**20  # entries
_FAR = 128  # nodes: those of the backward pass are further from what they read
_DEEP = 4  # ops from a sum to what a norm makes of it
_FEW = 3  # tensors from which something is made: fewer are read again
_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.where.self)
_VIEWS = frozenset({
    torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten.unsqueeze.default,
    torch.ops.aten.expand.default,
})  # fmt: skip


def write_sums(graph: Graph) -> None:
    """A residual sum in half precision that is read much later; a sum of an image's gradients that several read."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(place):
        if node.target not in _SUMS or _numel(node) < _LARGE:
            continue
        value, far = _value(node), place[node] + _FAR
        if value.dtype.itemsize == 2 and node.target is torch.ops.aten.add.Tensor:
            shapes = {_value(source).shape for source in node.all_input_nodes}
            if len(shapes) == 1 and any(place.get(user, 0) > far for user in _readers(node, _DEEP)):
                stays = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
                write(graph, node, value if stays else value.contiguous())  # not transposed, as a picture's patches are
        elif value.dtype == torch.float32 and value.dim() == 4 and len(node.users) >= _FEW:
            made_of = [_value(source) for source in _sources(node) if _numel(source) == value.numel()]
            if len(made_of) >= _FEW:
                made_of = [x for x in made_of if x.dtype == value.dtype and x.shape == value.shape]
                last = (x for x in made_of if x.is_contiguous(memory_format=torch.channels_last))
                write(graph, node, next(last, value))


def write_small(graph: Graph) -> None:
    """What is made of several tensors, and read by an op on far more numbers."""
    found: dict[Node, None] = {}
    for node in graph.nodes:
        if not _is_pointwise(node) or _numel(node) < _LARGE:
            continue
        for source in node.all_input_nodes:
            while source.target in _VIEWS:
                source = source.all_input_nodes[0]
            small = _is_pointwise(source) and _numel(source) * 64 <= _numel(node)
            if small and len(_sources(source)) >= _FEW:
                found[source] = None
    for node in found:
        write(graph, node, _value(node))


def _readers(node: Node, depth: int) -> set[Node]:
    """Those of what cheap ops make of it, too."""
    found = set(node.users)
    for user in node.users if depth > 1 else ():
        if _is_pointwise(user) or user.target in _VIEWS:
            found |= _readers(user, depth - 1)
    return found


def write(graph: Graph, node: Node, like: Tensor) -> Node:
    """Its numbers in memory, lying as those of `like` do; all who read it read them there."""
    with graph.inserting_after(node):
        written = written_as(graph, node, like)
    node.replace_all_uses_with(written, delete_user_cb=lambda user: user is not written)
    return written


def written_as(graph: Graph, node: Node, like: Tensor) -> Node:
    """The same, for whoever is told to read it there."""
    written = graph.call_function(inductor_prims.force_stride_order, (node, list(like.stride())))
    written.meta["val"] = like
    return written


def _value(node: Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _numel(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() if isinstance(value, Tensor) else 0


def _is_pointwise(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.pointwise in node.target.tags


def _sources(node: Node) -> set[Node]:
    """The tensors that pointwise ops make it from."""
    found: set[Node] = set()
    seen, ahead = {node}, [node]
    while ahead:
        for source in ahead.pop().all_input_nodes:
            if source not in seen:
                seen.add(source)
                more = _is_pointwise(source) or source.target in _VIEWS
                (ahead.append if more else found.add)(source)
    return found
