"""Op rules: how each op turns its input and the gradient at its output into per-example parameter gradients.

A rule sees one call of one op: the arguments by name (parameters as plain values), and `grad`, the
gradient at the op's output. It yields, for each trainable argument, a Contribution. Batch-major or
refuse: the first axis of input and output runs over the examples, or over examples × positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ClipwiseError, CrossExampleOp, UnsupportedOp
from .contributions import Dense, Outer, Rows
from .conv import check_conv, check_conv_transpose, conv, conv_transpose
from .op_rule import Call, OpRule, Uses, per_channel, total_of
from .products import has_kernel
from .static import is_static

_ONE_PASS = frozenset({"cuda"})


def _bias(total: Tensor, bias: Tensor) -> Dense:
    """[b, p] summed to the shape of a bias that may have been broadcast."""
    if bias.numel() not in (1, total.shape[1]):
        raise UnsupportedOp(f"A trained bias of shape {tuple(bias.shape)} must be a vector, one entry per output.")
    total = total if bias.numel() == total.shape[1] else total.sum(1)
    return Dense(total.reshape(len(total), *bias.shape))


def _outer(left: Tensor, right: Tensor) -> Outer:
    return Outer(left[:, None], right[:, None])


def _linear(call: Call, grad: Tensor) -> Uses:
    g = call.batch_major(grad, 1)
    if "weight" in call.trained:
        yield "weight", _outer(g, call.batch_major(call.values["input"], 1))
    if "bias" in call.trained:
        yield "bias", _bias(total_of(g), call.values["bias"])


def _addmm(call: Call, grad: Tensor) -> Uses:
    g, v = call.batch_major(grad, 1), call.values
    if "mat2" in call.trained:
        yield "mat2", _outer(call.batch_major(v["mat1"], 1) * v.get("alpha", 1), g)
    if "input" in call.trained:
        yield "input", _bias(total_of(g) * v.get("beta", 1), v["input"])


def _matmul(call: Call, grad: Tensor) -> Uses:
    left, right = call.values["input"], call.values["other"]
    if "other" in call.trained and right.dim() == 2:
        yield "other", _outer(call.batch_major(left, 1), call.batch_major(grad, 1))
    elif "other" in call.trained and right.dim() == 1:
        a = call.batch_major(left, 1)
        yield "other", Dense(total_of(a * grad.reshape(*a.shape[:2], 1)))
    elif left.dim() == 2:  # parameter on the left: [p, d] @ [b, …, d, n]
        yield "input", _outer(call.batch_major(grad.mT, 1), call.batch_major(right.mT, 1))
    else:
        a = call.batch_major(right.mT, 1)
        yield "input", Dense(total_of(a * grad.reshape(*a.shape[:2], 1)))


def _mm(call: Call, grad: Tensor) -> Uses:
    yield "mat2", _outer(call.batch_major(call.values["input"], 1), call.batch_major(grad, 1))


def _check_mm(call: Call) -> None:
    if call.trained != {"mat2"}:
        raise UnsupportedOp("mm with a trained first factor puts the batch on the second axis. Transpose the product.")


def _check_matmul(call: Call) -> None:
    left, right = call.values["input"], call.values["other"]
    if "other" in call.trained and right.dim() <= 2 and left.dim() >= 2:
        return
    if "input" in call.trained and left.dim() <= 2 and right.dim() >= 3:
        return
    raise UnsupportedOp(
        f"matmul of {left.dim()} and {right.dim()} axes: a trained factor must be a vector or a matrix, and "
        "the other one must have the examples as its first axis. Use nn.Linear, or expand the parameter over the batch."
    )


def _embedding(call: Call, grad: Tensor) -> Uses:
    index = call.values["input"].reshape(call.size, -1)
    rows = call.batch_major(grad, 1)
    padding = call.values.get("padding_idx")
    if padding is not None:
        padding = padding % call.values["weight"].shape[0]
        rows = torch.where((index == padding)[:, :, None], torch.zeros((), dtype=rows.dtype, device=rows.device), rows)
    yield "weight", Rows(index, rows)


def _raw_embedding(call: Call, grad: Tensor) -> Uses:
    """torch.embedding, for which -1 means no padding; in F.embedding it is the last row."""
    values = {**call.values, "padding_idx": None} if call.values.get("padding_idx", -1) < 0 else call.values
    return _embedding(replace(call, values=values), grad)


def _check_embedding(call: Call) -> None:
    if call.values.get("max_norm") is not None:
        raise UnsupportedOp("embedding: max_norm rewrites the table from the batch's own indices. Leave it out.")
    if call.values.get("scale_grad_by_freq"):
        raise CrossExampleOp("embedding: scale_grad_by_freq divides by counts over the whole batch. Leave it out.")
    index = call.values["input"]
    if index.dim() == 0 or index.shape[0] % call.size:
        raise UnsupportedOp(f"embedding: indices of {index.dim()} axes do not have the examples as their first axis.")


def _trailing(call: Call, grad: Tensor, normalised: Tensor) -> Uses:
    """Scale and shift over the trailing axes (layer norm, RMS norm)."""
    features = len(call.values["normalized_shape"])
    if "weight" in call.trained:
        yield "weight", Dense(total_of(call.batch_major(grad * normalised, features)))
    if "bias" in call.trained:
        yield "bias", Dense(total_of(call.batch_major(grad, features)))


def _layer_norm(call: Call, grad: Tensor) -> Uses:
    x, shape, eps = call.values["input"], call.values["normalized_shape"], call.values.get("eps", 1e-5)
    if len(shape) > 1 or not has_kernel(g := call.batch_major(grad, 1)):
        yield from _trailing(call, grad, F.layer_norm(x, shape, eps=eps))
        return
    wide = call.batch_major(x, 1)
    _, mean, scale = torch.native_layer_norm(wide, shape, None, None, eps)
    rows = [v if v.stride(2) == 1 else v.contiguous() for v in (g, wide)]
    sums = torch.ops.clipwise.norm_sums(*rows, *(s.float().reshape(g.shape[:2]).contiguous() for s in (mean, scale)))
    for name, total in zip(("weight", "bias"), sums.unbind(0), strict=True):
        if name in call.trained:
            yield name, Dense(total)


def _rms_norm(call: Call, grad: Tensor) -> Uses:
    v = call.values
    return _trailing(call, grad, F.rms_norm(v["input"], v["normalized_shape"], eps=v.get("eps")))


def _channels(call: Call, grad: Tensor, normalised: Tensor) -> Uses:
    """Scale and shift per channel, the second axis (group, instance and frozen batch norm)."""
    if "weight" in call.trained:
        yield "weight", Dense(per_channel(call, grad * normalised))
    if "bias" in call.trained:
        yield "bias", Dense(per_channel(call, grad))


def _group_norm(call: Call, grad: Tensor) -> Uses:
    wide = grad.dtype == call.values["input"].dtype == torch.float32  # autocast may have one of them narrow
    if is_static() and wide and grad.device.type in _ONE_PASS and len(grad) == call.size:
        return _group_sums(call, grad)
    normalised = F.group_norm(call.values["input"], call.values["num_groups"], eps=call.values.get("eps", 1e-5))
    return _channels(call, grad, normalised)


def _group_sums(call: Call, grad: Tensor) -> Uses:
    """From the sums that the op's own backward pass makes too, in its own words: a compiler then makes them once."""
    x, groups = call.values["input"], call.values["num_groups"]
    (n, c), positions = x.shape[:2], math.prod(x.shape[2:])
    _, mean, scale = torch.native_group_norm(x, None, None, n, c, positions, groups, call.values.get("eps", 1e-5))
    plain = grad.reshape(n, c, positions).sum(dim=[2])
    if "weight" in call.trained:
        scaled = torch.mul(grad, x).reshape(n, c, positions).sum(dim=[2]).reshape(n, groups, -1)
        centred = scaled - plain.reshape(n, groups, -1) * mean[:, :, None]
        yield "weight", Dense((centred * scale[:, :, None]).reshape(n, c))
    if "bias" in call.trained:
        yield "bias", Dense(plain)


def _instance_norm(call: Call, grad: Tensor) -> Uses:
    v = call.values
    if not v.get("use_input_stats", True):
        return _batch_norm(call, grad)
    return _channels(call, grad, F.instance_norm(v["input"], eps=v.get("eps", 1e-5)))


def check_instance_norm(values: Mapping[str, Any]) -> None:
    """Running statistics average the examples, trained or not."""
    if values.get("running_mean") is not None and values.get("use_input_stats", True):
        raise CrossExampleOp(
            "instance_norm with track_running_stats averages the examples in a buffer that is never noised. "
            "Build it with track_running_stats=False."
        )


def _batch_norm(call: Call, grad: Tensor) -> Uses:
    v = call.values
    normalised = F.batch_norm(v["input"], v["running_mean"], v["running_var"], eps=v.get("eps", 1e-5))
    return _channels(call, grad, normalised)


def check_batch_norm(values: Mapping[str, Any]) -> None:
    """Batch norm in training mode mixes examples, trained or not."""
    if values.get("training", False) or values.get("running_mean") is None:
        raise CrossExampleOp(
            "batch_norm normalises each example by the others of its batch, so one example influences every "
            "gradient. Swap in group norm, model = clipwise.fix_batch_norm(model), or put it into eval mode."
        )


def _rule(arguments: str, parameters: str, keep: str, uses: Any, check: Any = None) -> OpRule:
    split = (tuple(arguments.split()), frozenset(parameters.split()), frozenset(keep.split()))
    return OpRule(*split, uses, check) if check else OpRule(*split, uses)


def _rules() -> dict[Any, OpRule]:
    straight = _rule("input weight bias stride padding dilation groups", "weight bias", "input", conv, check_conv)
    turned = _rule(
        "input weight bias stride padding output_padding groups dilation",
        "weight bias",
        "input",
        conv_transpose,
        check_conv_transpose,
    )
    matmul = _rule("input other", "input other", "input other", _matmul, _check_matmul)
    addmm = _rule("input mat1 mat2", "input mat2", "mat1", _addmm)
    layer = _rule("input normalized_shape weight bias eps", "weight bias", "input", _layer_norm)
    rms = _rule("input normalized_shape weight eps", "weight", "input", _rms_norm)
    group = _rule("input num_groups weight bias eps", "weight bias", "input", _group_norm)
    batch = "input running_mean running_var weight bias training momentum eps"
    instance = "input running_mean running_var weight bias use_input_stats momentum eps"
    rules: dict[Any, OpRule] = {
        F.linear: _rule("input weight bias", "weight bias", "input", _linear),
        F.embedding: _rule(
            "input weight padding_idx max_norm norm_type scale_grad_by_freq sparse",
            "weight",
            "input",
            _embedding,
            _check_embedding,
        ),
        torch.embedding: _rule(
            "weight input padding_idx scale_grad_by_freq sparse", "weight", "input", _raw_embedding, _check_embedding
        ),
        F.batch_norm: _rule(batch, "weight bias", "input", _batch_norm),
        F.instance_norm: _rule(instance, "weight bias", "input", _instance_norm),
    }
    rules |= dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), straight)
    rules |= dict.fromkeys((torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d), turned)
    rules |= dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), matmul)
    rules[torch.Tensor.__rmatmul__] = _rule("other input", "input other", "input other", _matmul, _check_matmul)
    mm = _rule("input mat2", "input mat2", "input mat2", _mm, _check_mm)
    rules |= dict.fromkeys((torch.mm, torch.Tensor.mm), mm)
    rules |= dict.fromkeys((torch.addmm, torch.Tensor.addmm), addmm)
    rules |= dict.fromkeys((F.layer_norm, torch.layer_norm), layer)
    rules |= dict.fromkeys((F.rms_norm, torch.rms_norm), rms)
    rules |= dict.fromkeys((F.group_norm, torch.group_norm), group)
    return rules


OP_RULES: Mapping[Any, OpRule] = _rules()


def bind(rule: OpRule, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by name."""
    return dict(zip(rule.arguments, args, strict=False)) | dict(kwargs)


def works_on_rows(rule: OpRule, call: Call) -> bool:
    """Whether the rule holds for a call without data too: not where a trained first factor has rows of its own."""
    if "other" in rule.arguments and call.trained != {"other"}:
        return False
    if "mat2" in rule.arguments and "input" in call.trained:
        return False
    try:
        rule.check(call)
    except ClipwiseError:
        return False
    return True
