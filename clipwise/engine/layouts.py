"""A compiler pass: how images lie in memory is for the compiler to decide.

A trace copies images to channels last for a convolution and back for the next op, as the ops that it has seen want
them. The compiler gives each tensor one layout for all who read it, but it takes such a copy for work that was asked
for, and would keep both.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from .writes import write

KNOWN = ("aten", "prims", "clipwise")
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
_CLONE, _AS_STRIDED = torch.ops.aten.clone.default, torch.ops.aten.as_strided.default


def leave_out_turns(graph: Graph) -> None:
    """Whoever reads a copy that lies otherwise reads what it is a copy of: the same numbers at the same indices.

    What was copied to channels last is written so in the first place, for all who read it, unless it comes from outside
    the compiler's reach.
    """
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
    return target is _AS_STRIDED or target.namespace not in KNOWN or target._schema.is_mutable


def turns(node: Node) -> bool:
    """A copy from channels last to first, or back."""
    if node.target is not _CLONE:
        return False
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.dim() != 4:
        return False
    both = [x.is_contiguous(memory_format=torch.channels_last) for x in (before, after)]
    return both[0] != both[1] and before.is_contiguous() != after.is_contiguous()
