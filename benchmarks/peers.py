"""Forward and backward with clipping by other libraries, for gpu.py: those that can be imported, in their best mode.

They get models that they can take: no tied weights, no bare parameters, positions looked up once per example.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Losses = Callable[[nn.Module, Any], Tensor]
Step = Callable[[], None]


def opacus_hooks(model: nn.Module, losses: Losses, batch: Any) -> Step:
    """Per-example gradients of every parameter, then their norms and clipped sums."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    private = GradSampleModule(model)
    size = len(batch[0])
    optimizer = DPOptimizer(
        torch.optim.SGD(private.parameters(), 1e-3), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=size
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        losses(private, batch).mean().backward()
        optimizer.clip_and_accumulate()

    return step


def opacus_ghost(model: nn.Module, losses: Losses, batch: Any) -> Step:
    """Norms first, then a second backward pass."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping

    private = GradSampleModuleFastGradientClipping(model, max_grad_norm=1.0, use_ghost_clipping=True)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(private.parameters(), 1e-3),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        expected_batch_size=len(batch[0]),
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        DPTensorFastGradientClipping(private, optimizer, losses(private, batch)).backward()

    return step


def fastdp(model: nn.Module, losses: Losses, batch: Any) -> Step:
    """Book-keeping, the better norm for each layer, automatic clipping."""
    from fastDP import PrivacyEngine

    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    engine = PrivacyEngine(
        model,
        batch_size=len(batch[0]),
        sample_size=10**5,
        epochs=1,
        noise_multiplier=1e-12,
        clipping_mode="MixOpt",
        clipping_fn="automatic",
        clipping_style="all-layer",
    )
    engine.attach(optimizer)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        losses(model, batch).mean().backward()

    return step


PEERS = {"opacus_hooks": opacus_hooks, "opacus_ghost": opacus_ghost, "fastdp": fastdp}


def measured(make: Callable[[], tuple[nn.Module, Losses, Any]], timed: Callable[[Step], float]) -> dict[str, Any]:
    """Milliseconds of each, or why there are none."""
    found: dict[str, Any] = {}
    for name, peer in PEERS.items():
        try:
            found[f"{name}_ms"] = timed(peer(*make()))
        except Exception as error:
            found[f"{name}_failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return found
