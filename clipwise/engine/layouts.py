"""A compiler pass: how images lie in memory is for the compiler to decide.

A trace copies images to channels last for a convolution and back for the next op, as the ops that it has seen want
them. The compiler gives each tensor one layout for all who read it, but it takes such a copy for work that was asked
for, and would keep both.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .writes import write, written_as

_ORDERS = (torch.contiguous_format, torch.channels_last)
KNOWN = ("aten", "prims", "clipwise")
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
_CLONE = torch.ops.aten.clone.default
_BY_MEMORY = (
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_scatter.default,
    torch.ops.aten.view.dtype,
)  # what they give depends on where numbers lie


def leave_out_turns(graph: Graph) -> None:
    """Whoever reads a copy that lies otherwise reads what it is a copy of: the same numbers at the same indices.

    What was copied to channels last is written so in the first place, for all who read it, unless it comes from outside
    the compiler's reach. Ops that depend on where numbers lie find them where they were.
    """
    if not any(turns(node) for node in graph.nodes):
        return
    for node in list(graph.nodes):
        if node.target in _BY_MEMORY and not _same_width(node):
            given = node.args[0]
            with graph.inserting_before(node):
                node.update_arg(0, written_as(graph, given, given.meta["val"]))
    for node in list(graph.nodes):
        if not turns(node):
            continue
        source = node.all_input_nodes[0]
        if any(_sees_memory(user) for user in (*node.users, *source.users)):
            continue
        if not node.meta["val"].is_contiguous():
            if not _can_lie_anyhow(source):
                continue
            source = write(graph, source, node.meta["val"])
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _can_lie_anyhow(node: Node) -> bool:
    """Whether the compiler chooses the layout of its result: that of a single op of its own, or of a convolution."""
    target = node.target
    if target in _VIEWS:
        return _can_lie_anyhow(node.all_input_nodes[0])
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target is torch.ops.aten.convolution.default or torch.Tag.pointwise in target.tags


def _sees_memory(user: Node) -> bool:
    """Whether it writes, or could depend on where numbers lie; or the graph's result, whose layout was promised."""
    target = user.target
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return target.namespace not in KNOWN or target._schema.is_mutable


def _same_width(node: Node) -> bool:
    """Other bits for the same numbers: nothing moves."""
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return bool(node.target is torch.ops.aten.view.dtype and before.dtype.itemsize == after.dtype.itemsize)


def turns(node: Node) -> bool:
    """A copy from channels last to first, or back."""
    if node.target is not _CLONE:
        return False
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.dim() != 4:
        return False
    first, last = ([x.is_contiguous(memory_format=how) for x in (before, after)] for how in _ORDERS)
    return first != last and sorted(first) == sorted(last) == [False, True]  # each has one order, and not the other's
