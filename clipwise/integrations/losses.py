"""One loss per example for the heads of Transformers: their own losses, without the mean over the batch.

Positions labelled -100 count nothing. Over the positions of one example the loss is a mean or a sum, as declared:
never over the batch, where an example's share would depend on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import LossShape, UnsupportedOp

Reduction = Literal["mean", "sum"]
IGNORED = -100
_HEADS = {
    "class": ("SEQUENCE_CLASSIFICATION", "IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "MULTIPLE_CHOICE"),
    "seq2seq": ("SEQ_TO_SEQ_CAUSAL_LM",),
    "tokens": ("TOKEN_CLASSIFICATION", "MASKED_LM"),
    "next token": ("CAUSAL_LM",),
    "span": ("QUESTION_ANSWERING",),
}


def bare(model: nn.Module) -> nn.Module:
    """The model inside of `peft`'s, or itself."""
    inner: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return inner


def head_of(model: nn.Module) -> str:
    """Which kind of head a model of Transformers has."""
    from transformers.models.auto import modeling_auto

    name = type(bare(model)).__name__
    for head, tasks in _HEADS.items():
        if any(name in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").values() for task in tasks):
            return head
    raise UnsupportedOp(
        f"No loss per example is known for {name}. Pass losses=lambda model, batch: … that returns one loss per "
        "example, shape [b]."
    )


def token_losses(logits: Tensor, labels: Tensor, reduction: Reduction, smoothing: float) -> Tensor:
    """[b, t, words] and [b, t] → [b].

    >>> token_losses(torch.zeros(1, 3, 2), torch.tensor([[0, 1, -100]]), "sum", 0.0)
    tensor([1.3863])
    """
    if logits.shape[:2] != labels.shape:
        raise LossShape("The labels need one number for every position of the logits; -100 leaves a position out.")
    flat = logits.flatten(0, 1).float()
    losses = F.cross_entropy(
        flat, labels.flatten(), ignore_index=IGNORED, reduction="none", label_smoothing=smoothing
    ).view(labels.shape)
    total = losses.sum(dim=1)
    return total / (labels != IGNORED).sum(dim=1).clamp(min=1) if reduction == "mean" else total


def class_losses(logits: Tensor, labels: Tensor, problem: str, smoothing: float) -> Tensor:
    """[b, classes] and labels → [b]: by cross entropy, several labels at once, or squared error."""
    if problem == "regression":
        squared = (logits.float().reshape(len(labels), -1) - labels.float().reshape(len(labels), -1)).square()
        return squared.mean(dim=1)
    if problem == "multi_label_classification":
        return F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none").mean(dim=1)
    return F.cross_entropy(logits.float(), labels.flatten(), reduction="none", label_smoothing=smoothing)


def problem_of(model: nn.Module, labels: Tensor) -> str:
    """As Transformers decides it, from the configuration and the type of the labels."""
    config: Any = getattr(bare(model), "config", None)
    if getattr(config, "problem_type", None):
        return str(config.problem_type)
    if getattr(config, "num_labels", 2) == 1:
        return "regression"
    return "multi_label_classification" if labels.is_floating_point() else "single_label_classification"


def losses_for(
    model: nn.Module, reduction: Reduction = "mean", smoothing: float = 0.0
) -> Callable[[nn.Module, Mapping[str, Any]], Tensor]:
    """The loss function of a model with a known head: (model, batch with labels) → [b]."""
    head = head_of(model)

    def losses(subject: nn.Module, batch: Mapping[str, Any]) -> Tensor:
        inputs = dict(batch)
        if head == "span":
            spans = [inputs.pop(name) for name in ("start_positions", "end_positions")]
            out = subject(**inputs)
            pair = zip((out.start_logits, out.end_logits), spans, strict=True)
            return torch.stack([_span(logits, at) for logits, at in pair]).mean(dim=0)
        if "labels" not in inputs:
            raise LossShape(f"The batch has no 'labels' but {', '.join(inputs)}. Does the collate function keep them?")
        labels = inputs.pop("labels")
        if head == "seq2seq" and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = _shifted(subject, labels)
        logits = subject(**inputs).logits
        if head == "class":
            return class_losses(logits, labels, problem_of(subject, labels), smoothing)
        if head == "next token":
            logits, labels = logits[:, :-1], labels[:, 1:]
        return token_losses(logits, labels, reduction, smoothing)

    return losses


def check_losses_of(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """On one public record: the loss that we take is the model's own, or refuse. Some shift labels, some do not."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad():
            ours = losses_for(model)(model, batch)
            own = getattr(model(**batch), "loss", None)
    finally:
        for module, mode in modes.items():
            module.training = mode
    if own is None or own.dim() or not torch.isfinite(own) or torch.allclose(ours[0].double(), own.double(), rtol=1e-3):
        return
    raise UnsupportedOp(
        f"The loss of {type(bare(model)).__name__} is {float(own):.4g} for a made-up record, where the loss that is "
        f"known for its kind of head gives {float(ours[0]):.4g}. Pass losses=lambda model, batch: … that returns one "
        "loss per example, shape [b]."
    )


def _span(logits: Tensor, at: Tensor) -> Tensor:
    """A position beyond the text is left out, as Transformers does."""
    return F.cross_entropy(
        logits.float(), at.flatten().clamp(0, logits.shape[1]), ignore_index=logits.shape[1], reduction="none"
    )


def _shifted(model: nn.Module, labels: Tensor) -> Tensor:
    """What the decoder reads: the labels, one to the right."""
    inner: Any = bare(model)
    shifted: Tensor = inner.prepare_decoder_input_ids_from_labels(labels=labels)
    return shifted


def right(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    """For each example the share of right answers, in [0, 1]: of its label, or of its labelled positions."""
    head, inputs = head_of(model), dict(batch)
    labels: Tensor = inputs.pop("labels")
    if head == "seq2seq" and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = _shifted(model, labels)
    answers: Tensor = model(**inputs).logits.argmax(dim=-1)
    if head == "class":
        return (answers == labels.flatten()).float()
    if head == "next token":
        answers, labels = answers[:, :-1], labels[:, 1:]
    counted = labels != IGNORED
    return ((answers == labels) & counted).sum(dim=1) / counted.sum(dim=1).clamp(min=1)
