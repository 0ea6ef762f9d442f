"""A conformance check for op rules, for the tests of those who write one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ClipwiseError
from .op_rule import OpRule
from .tape import Tape


def check_op_rule(
    op: Callable[..., Tensor],
    rule: OpRule,
    model: nn.Module,
    forward: Callable[[nn.Module, Any], Tensor],
    data: Tensor,
    tolerance: float = 1e-8,
) -> None:
    """Raise AssertionError unless `rule` gives the gradients that a float64 loop over single examples gives.

    Args:
        op: the function that the rule is for, as it appears in `forward`.
        rule: the rule under test.
        model: a module whose parameters enter `op`.
        forward: forward(model, data) → an output with the examples on its first axis.
        data: a batch of examples.
        tolerance: relative, in float64.

    >>> from clipwise.engine.ops import OP_RULES
    >>> import torch.nn.functional as F
    >>> check_op_rule(F.linear, OP_RULES[F.linear], nn.Linear(3, 2), lambda m, x: m(x), torch.rand(4, 5, 3))
    """
    model, data = model.double(), data.double() if data.is_floating_point() else data
    tape = Tape(model, data, len(data), {op: rule})
    with tape:
        losses = forward(model, data).flatten(1).tanh().sum(1)
    gradients = tape.backward(losses)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    norms = gradients.norms([(name,) for name in names])
    keep = torch.ones(len(data), dtype=torch.bool)
    weights = torch.linspace(0.5, 1.5, len(data), dtype=torch.float64)[:, None].expand(-1, len(names))
    sums = gradients.weighted_sum(weights, keep, [(name,) for name in names])
    expected: Mapping[str, Tensor] = {name: torch.zeros_like(sums[name]) for name in names}
    for i in range(len(data)):
        loss = forward(model, data[i : i + 1]).flatten(1).tanh().sum(1)[0]
        grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)
        for k, (name, grad) in enumerate(zip(names, grads, strict=True)):
            true = torch.zeros_like(sums[name]) if grad is None else grad
            bound, size = float(norms[i, k]), float(true.norm())
            assert bound >= size * (1 - 1e-12), f"{name}, example {i}: norm {bound} lies below the true {size}"
            assert bound <= size * (1 + tolerance) + 1e-12, f"{name}, example {i}: norm {bound}, true {size}"
            expected[name].add_(weights[i, k] * true)
    for name in names:
        error = float((sums[name] - expected[name]).norm() / (expected[name].norm() + 1e-12))
        assert error <= tolerance, f"{name}: the weighted sum is off by {error:.2g}"
    if not isinstance(rule, OpRule):
        raise ClipwiseError("An op rule must be an OpRule.")
