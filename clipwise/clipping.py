"""From an engine's norms to the clipped sum: the rule's weights, and the bound that noise is scaled by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from . import _check
from ._types import CHAIN, ROUNDINGS, ClippedSum, Engine, LossFn, sum_dtype, unit_roundoff
from .batch import batch_size
from .engine import Gradients, OpRule, Paths, Tape, exact_products, vmap_gradients
from .errors import ParameterMismatch
from .rules import PSAC, Groups, Rule, steepness_of


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; a tied one appears once."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def zeros_like(p: nn.Parameter) -> Tensor:
    """The clipped sum of nobody."""
    return torch.zeros(p.shape, dtype=sum_dtype(p.dtype), device=p.device)


def with_rounding(sensitivity: float, parameters: Iterable[Tensor], examples: float, steepness: float = 1.0) -> float:
    """S plus what rounding can add: adding one example changes how the sum over all the others rounds.

    The sum of b clipped examples is at most b·S long and each of its entries is rounded relative to its
    own size, so the change is of the order b·u·S; ROUNDINGS is its constant (docs/engine.md). A rule whose weight
    falls steeply makes `steepness` times as much of it.
    """
    kinds = {(p.device.type, sum_dtype(p.dtype)) for p in parameters}
    u = max(unit_roundoff(dtype) for _, dtype in kinds)
    chain = CHAIN if any(device != "cpu" for device, _ in kinds) else 0
    return sensitivity * (1 + u * (ROUNDINGS * max(steepness, 1.0) * max(examples, 1) + chain))


def narrowed(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights in the dtype of the sum, never rounded up; 0 where they would overflow a product or lose their digits.

    A weight beyond 1e18 belongs to a gradient below 1e-18·C, which only AutoV blows up.
    """
    info, narrow = torch.finfo(dtype), weights.to(dtype)
    narrow = torch.where(narrow.double() > weights, torch.nextafter(narrow, torch.zeros_like(narrow)), narrow)
    usable = torch.isfinite(narrow) & (narrow >= info.tiny) & (narrow <= 1e18)
    return torch.where(usable, narrow, torch.zeros_like(narrow))


def clip(
    gradients: Gradients, rule: Rule, clip_norm: float, groups: Groups, mask: Tensor | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    """Σ_i w(n_i)·g_i and the norms [b, layers]. An example with a NaN or inf anywhere contributes exactly 0."""
    with exact_products(gradients.losses.device):
        norms = gradients.norms(groups)
        finite = torch.isfinite(norms).all(dim=1)
        weights = rule.weights(norms, clip_norm)
        dtypes = {p.dtype for p in gradients.parameters.values()}
        weights = narrowed(weights, torch.float64 if dtypes == {torch.float64} else torch.float32)
        if mask is not None:
            weights = torch.where(mask.to(weights.device)[:, None], weights, 0.0)
        return gradients.weighted_sum(weights, finite, groups), norms


def engine_gradients(
    model: nn.Module,
    loss_fn: LossFn,
    data: Any,
    size: int,
    engine: Engine = "bookkeeping",
    op_rules: Mapping[Any, OpRule] | None = None,
    paths: Paths | None = None,
) -> Gradients:
    """One forward and one backward pass of `size` examples."""
    if engine == "vmap":
        return vmap_gradients(model, loss_fn, data, size)
    tape = Tape(model, data, size, op_rules, paths)
    with torch.enable_grad():
        with tape:
            losses = loss_fn(model, data)
        return tape.backward(losses)


def clipped_sum(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    rule: Rule | None = None,
    clip_norm: float = 1.0,
    *,
    engine: Engine = "bookkeeping",
    op_rules: Mapping[Any, OpRule] | None = None,
) -> ClippedSum:
    """The clipped gradient sum of one batch: the building block, no noise, for those who know.

    Guarantee: adding or removing one example changes `.grads` by at most `.sensitivity`, provided that the
    model treats examples independently (`clipwise.preflight` checks that) and that batches have one shape
    (do not pad to the longest example of the batch). Nothing is released.

    >>> from clipwise import Abadi
    >>> model = nn.Linear(2, 1, bias=False)
    >>> out = clipped_sum(model, lambda m, x: m(x)[:, 0], torch.tensor([[3.0, 4.0]]), Abadi(), clip_norm=1.0)
    >>> out.norms, out.grads["weight"]
    (tensor([5.0000], dtype=torch.float64), tensor([[0.6000, 0.8000]]))
    """
    rule = PSAC() if rule is None else rule
    if isinstance(rule, type) or not isinstance(rule, Rule):
        raise TypeError(f"rule must be a clipping rule such as PSAC(), got {rule!r}.")
    _check.clip_norm(clip_norm=clip_norm)
    _check.one_of(("bookkeeping", "vmap"), engine=engine)
    parameters = trainable(model)
    groups = rule.groups(list(parameters))
    size = batch_size(batch)
    bound = with_rounding(rule.sensitivity(clip_norm, len(groups)), parameters.values(), size, steepness_of(rule))
    if size == 0:
        zeros = {n: zeros_like(p) for n, p in parameters.items()}
        return ClippedSum(zeros, torch.zeros(0, dtype=torch.float64), bound, torch.zeros(0))
    gradients = engine_gradients(model, loss_fn, batch, size, engine, op_rules)
    grads, norms = clip(gradients, rule, clip_norm, groups)
    return ClippedSum(grads, norms[:, 0] if len(groups) == 1 else norms, bound, gradients.losses)


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """The optimizer holds exactly the trainable parameters (and frozen ones of the model), and no gradient waits."""
    held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    known = {id(p) for p in named.values()}
    if foreign := [tuple(p.shape) for i, p in held.items() if i not in known]:
        raise ParameterMismatch(
            f"The optimizer holds {len(foreign)} parameter(s) not of the model (shapes {foreign[:3]}). "
            "They would be trained without clipping and noise. Build the optimizer from model.parameters()."
        )
    if left_out := [name for name, p in named.items() if p.requires_grad and id(p) not in held]:
        raise ParameterMismatch(
            f"Parameter(s) {', '.join(left_out[:5])} are trainable but not in the optimizer: they would cost privacy "
            "without being trained. Freeze them with requires_grad_(False), or give them to the optimizer."
        )
    if waiting := [name for name, p in named.items() if p.grad is not None]:
        raise ParameterMismatch(
            f"Parameter(s) {', '.join(waiting[:5])} already hold a .grad, which is neither clipped nor noised. "
            "Call optimizer.zero_grad(set_to_none=True), and never loss.backward()."
        )
