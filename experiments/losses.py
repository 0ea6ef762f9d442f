"""One loss per record, and how many answers are right, for the three kinds of labels.

| labels | logits | loss | right |
|---|---|---|---|
| a class [b] | [b, classes] | cross entropy | the likeliest class |
| several bits [b, k], floats | [b, k] | mean of k binary cross entropies | every bit by itself |
| a class at every place [b, t], 0 for none | [b, t, classes] | mean over the record's places | every place by itself |
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    """[b]."""
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    if labels.is_floating_point():
        return F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(dim=1)
    found = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    here = (labels != 0).to(found.dtype)
    return (found * here).sum(dim=1) / here.sum(dim=1).clamp(min=1)


def right(logits: Tensor, labels: Tensor) -> tuple[int, int]:
    """How many answers are right, and how many there are."""
    if labels.is_floating_point():
        return int(((logits > 0) == (labels > 0.5)).sum()), labels.numel()
    same = logits.argmax(-1) == labels
    if labels.dim() == 1:
        return int(same.sum()), len(labels)
    return int((same & (labels != 0)).sum()), int((labels != 0).sum())
