"""The lawful way to look at private records: a noisy mean score, charged to the run's ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._check import count, positive
from .batch import map_tensors
from .engine.state import Untouched, held_tensors, kept_state, restore_state
from .errors import CrossExampleOp, LossShape, UnsupportedOp
from .guard import check_newest
from .sampling import Collate, as_dataset, collate_for
from .training import PrivateTraining

ScoreFn = Callable[[nn.Module, Any], Tensor]


def private_score(
    training: PrivateTraining,
    dataset: Any,
    score_fn: ScoreFn,
    *,
    size: float,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    batch_size: int = 1,
) -> float:
    """A mean score over private records, with noise: (Σ score_i + N(0, plan.evaluation_noise²)) / size.

    Guarantee: part of the run's (ε, δ), which `Plan(evaluations=…)` paid for beforehand; the ledger is charged before
    the value exists. Each record's score is clamped to [0, 1] (NaN counts as 0), so that one record moves the sum by
    at most 1: records are scored one by one, and a model that keeps anything of them (a buffer, a cached tensor) is
    refused. `score_fn` must be a function of its arguments alone. With a larger `batch_size` you vouch that scores do
    not depend on each other, and the ledger says so.

    Args:
        training: the run; its model is scored in eval mode.
        dataset: as for `training.batches`; all of it is used, so there is no gain from sampling.
        score_fn: score_fn(model, batch) → one number per record, such as 1.0 for a right answer.
        size: the number of records, declared public: the divisor.
        collate_fn: as for `training.batches`.
        device: where the model lives, if not where the records are.
        batch_size: records that are scored together.
    """
    size, rows = positive(size=size), count(batch_size=batch_size)
    records, collate = as_dataset(dataset), collate_for(dataset, collate_fn)
    plan, ledger, model = training.plan, training.ledger, training.model
    if training._ranks.share[1] > 1:
        raise UnsupportedOp("private_score runs on one process: load the run's checkpoint and ledger there.")
    check_newest(model, training._guard, ledger)
    modes = {module: module.training for module in model.modules()}
    before = kept_state(model)
    held = Untouched(lambda: held_tensors(model), before.tensors)
    ledger.reserve("look")
    try:
        if rows > 1 and (remark := "scores of private evaluations asserted to be independent") not in ledger.notes:
            ledger.note(remark)
        try:
            model.eval()
            total = 0.0
            with torch.no_grad():
                for start in range(0, len(records), rows):
                    stop = min(start + rows, len(records))
                    data = collate([records[i] for i in range(start, stop)])
                    if device is not None:
                        data = map_tensors(data, lambda x: x.to(device))
                    scores = score_fn(model, data)
                    if not isinstance(scores, Tensor) or scores.shape != (stop - start,):
                        raise LossShape(
                            "score_fn must return one number per record, shape [b], such as "
                            "(prediction == label).float()."
                        )
                    total += bounded_sum(scores)
                    if held.written():
                        raise CrossExampleOp(
                            "The model keeps something of the records that it scores (a buffer or a cached tensor "
                            "changed), so scores depend on each other and records would be published with it. Turn "
                            "that off in eval mode."
                        )
        finally:
            for module, mode in modes.items():
                module.training = mode
            restore_state(model, before)
    except BaseException:
        failed = "an evaluation failed on private data and was charged; that it failed is outside the guarantee"
        ledger.commit("look", remark=failed)
        raise
    number = ledger.commit("look")
    noised = training._noise.add_(
        {"score": torch.tensor([total], dtype=torch.float64)},
        sensitivity=1.0,
        noise_multiplier=plan.evaluation_noise,
        sequence=number,
        stream="evaluation",
    )
    return float(noised["score"][0]) / size


def bounded_sum(scores: Tensor) -> float:
    """Σ of scores in [0, 1] (NaN counts as 0), each rounded to 20 bits: no order of adding whole numbers rounds."""
    bounded = scores.detach().double().nan_to_num(nan=0.0).clamp(0.0, 1.0)
    return int((bounded * 2**20).round().long().sum()) / 2**20
