"""Compiler passes over the one graph of a private step.

- What is computed twice is computed once. The compiler does this when it sees training as forward and backward; rules
  that look at an op's input again (norms, for one) would repeat its work.
- On a GPU, images are laid out by the compiler alone (layouts.py); what many would make again is written (writes.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, Node

from . import layouts, writes
from .layouts import KNOWN, leave_out_turns
from .writes import write_small, write_sums


class SameWork(CustomGraphPass):
    """Nodes of one op with the same arguments become one, unless they are random, write somewhere or are returned."""

    def __init__(self, on_gpu: bool) -> None:
        """`on_gpu`: with the other passes too."""
        self._on_gpu = on_gpu

    def __call__(self, graph: Graph) -> None:
        """In place, on a graph without mutations."""
        if self._on_gpu:
            leave_out_turns(graph)
        returned = {arg for node in graph.nodes if node.op == "output" for arg in node.all_input_nodes}
        written = {arg for node in graph.nodes if not _pure(node) for arg in node.all_input_nodes}
        first: dict[Any, Node] = {}
        for node in list(graph.nodes):
            if node.op != "call_function" or not _pure(node) or node in returned or node in written:
                continue
            key = (node.target, _key(node.args), _key(node.kwargs))
            if (same := first.setdefault(key, node)) is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
        if self._on_gpu:
            write_sums(graph)
            write_small(graph)

    def uuid(self) -> str:
        """For the compiler's cache."""
        return f"{self._on_gpu} {get_hash_for_files((__file__, layouts.__file__, writes.__file__))!r}"


def _pure(node: Node) -> bool:
    if node.op != "call_function":
        return True
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target.__module__ == "_operator"
    known = node.target.namespace in KNOWN  # others may draw without saying so
    random = torch.Tag.nondeterministic_seeded in node.target.tags
    return known and not random and not node.target._schema.is_mutable and "empty" not in node.target._schema.name


def _key(x: Any) -> Any:
    """Hashable, and no two that differ alike: 1, 1.0 and True are not the same argument."""
    if isinstance(x, (list, tuple, torch.Size)):
        return (type(x).__name__, *(_key(y) for y in x))
    if isinstance(x, dict):
        return tuple((k, _key(v)) for k, v in sorted(x.items()))
    return (type(x).__name__, repr(x)) if isinstance(x, (bool, int, float, complex, str, slice)) else x
