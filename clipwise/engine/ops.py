"""Op rules: how each op turns its input and the gradient at its output into per-example parameter gradients.

A rule sees one call of one op: the arguments by name (parameters as plain values), and `grad`, the
gradient at the op's output. It yields, for each trainable argument, a Contribution. Batch-major or
refuse: the first axis of input and output runs over the examples, or over examples × positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._types import sum_dtype
from ..errors import ClipwiseError, CrossExampleOp, UnsupportedOp
from .contributions import Contribution, Dense, Outer, Rows, Unfolded
from .depthwise import depthwise_gradient
from .products import column_sums, has_kernel


@dataclass(frozen=True)
class Call:
    """One recorded call: the op's name, its arguments by name, which of them are trained, and b."""

    op: str
    values: Mapping[str, Any]
    trained: frozenset[str]
    size: int

    def batch_major(self, x: Tensor, features: int) -> Tensor:
        """View [b·k, …, *features] as [b, t, *features]."""
        if x.dim() <= features or x.shape[0] % self.size:
            raise UnsupportedOp(
                f"{self.op}: an input of {x.dim()} axes does not have the examples as its first axis, so "
                "per-example gradients cannot be told apart. Keep the batch axis first."
            )
        shape = x.shape[x.dim() - features :]
        return x.reshape(self.size, -1, *shape)


Uses = Iterator[tuple[str, Contribution]]


@dataclass(frozen=True)
class OpRule:
    """A rule for one op. `check_op_rule` compares it with brute force.

    Attributes:
        arguments: the op's argument names, in order.
        parameters: those that may be trained; every other must not depend on a trained parameter alone.
        keep: the arguments that `uses` reads later; their tensors must not change in place.
        uses: yields (argument name, Contribution) for the trained arguments of a call.
        check: refuses calls that the rule cannot take.
    """

    arguments: tuple[str, ...]
    parameters: frozenset[str]
    keep: frozenset[str]
    uses: Callable[[Call, Tensor], Uses]
    check: Callable[[Call], None] = lambda call: None


def _total(x: Tensor, axes: tuple[int, ...] = (1,)) -> Tensor:
    """A sum that half precision cannot overflow."""
    return column_sums(x) if axes == (1,) and x.dim() == 3 else x.sum(axes, dtype=sum_dtype(x.dtype))


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
        yield "bias", _bias(_total(g), call.values["bias"])


def _addmm(call: Call, grad: Tensor) -> Uses:
    g, v = call.batch_major(grad, 1), call.values
    if "mat2" in call.trained:
        yield "mat2", _outer(call.batch_major(v["mat1"], 1) * v.get("alpha", 1), g)
    if "input" in call.trained:
        yield "input", _bias(_total(g) * v.get("beta", 1), v["input"])


def _matmul(call: Call, grad: Tensor) -> Uses:
    left, right = call.values["input"], call.values["other"]
    if "other" in call.trained and right.dim() == 2:
        yield "other", _outer(call.batch_major(left, 1), call.batch_major(grad, 1))
    elif "other" in call.trained and right.dim() == 1:
        a = call.batch_major(left, 1)
        yield "other", Dense(_total(a * grad.reshape(*a.shape[:2], 1)))
    elif left.dim() == 2:  # parameter on the left: [p, d] @ [b, …, d, n]
        yield "input", _outer(call.batch_major(grad.mT, 1), call.batch_major(right.mT, 1))
    else:
        a = call.batch_major(right.mT, 1)
        yield "input", Dense(_total(a * grad.reshape(*a.shape[:2], 1)))


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
        yield "weight", Dense(_total(call.batch_major(grad * normalised, features)))
    if "bias" in call.trained:
        yield "bias", Dense(_total(call.batch_major(grad, features)))


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


def _per_channel(call: Call, x: Tensor) -> Tensor:
    """[b·k, c, …] summed to [b, c]."""
    return _total(x.reshape(call.size, -1, x.shape[1], math.prod(x.shape[2:])), (1, 3))


def _channels(call: Call, grad: Tensor, normalised: Tensor) -> Uses:
    """Scale and shift per channel, the second axis (group, instance and frozen batch norm)."""
    if "weight" in call.trained:
        yield "weight", Dense(_per_channel(call, grad * normalised))
    if "bias" in call.trained:
        yield "bias", Dense(_per_channel(call, grad))


def _group_norm(call: Call, grad: Tensor) -> Uses:
    normalised = F.group_norm(call.values["input"], call.values["num_groups"], eps=call.values.get("eps", 1e-5))
    return _channels(call, grad, normalised)


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


def _pairs(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * (dims if len(value) == 1 else 1)


def _pad_same(kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[int]:
    pads: list[int] = []
    for k, step in zip(reversed(kernel), reversed(dilation), strict=True):
        total = step * (k - 1)
        pads += [total // 2, total - total // 2]
    return pads


def _padded(x: Tensor, kernel: tuple[int, ...], call: Call) -> Tensor:
    dims, padding = len(kernel), call.values.get("padding", 0)
    if padding == "same":
        return F.pad(x, _pad_same(kernel, _pairs(call.values.get("dilation", 1), dims)))
    if padding == "valid" or not any(_pairs(padding, dims)):
        return x
    return F.pad(x, [n for n in reversed(_pairs(padding, dims)) for _ in (0, 1)])


def _patches(x: Tensor, first: int, kernel: tuple[int, ...], call: Call) -> Tensor:
    """The patches that each output position sees: the axes from `first` on become those of the output."""
    dims = len(kernel)
    stride, dilation = (_pairs(call.values.get(name, 1), dims) for name in ("stride", "dilation"))
    for axis, (k, step, hop) in enumerate(zip(kernel, dilation, stride, strict=True), start=first):
        x = x.unfold(axis, step * (k - 1) + 1, hop)[..., ::step]
    return x


def _conv(call: Call, grad: Tensor) -> Uses:
    """A convolution is a linear op on patches; groups are independent linear ops."""
    if "bias" in call.trained:
        yield "bias", Dense(_per_channel(call, grad))
    if "weight" in call.trained:
        weight, groups, copies = call.values["weight"], call.values.get("groups", 1), grad.shape[0] // call.size
        kernel, dims, width = tuple(weight.shape[2:]), weight.dim() - 2, weight[0].numel()
        x, padding = call.values["input"], call.values.get("padding", 0)
        if weight.shape[1] == 1 and grad.device.type == "cpu":
            stride, dilation = (_pairs(call.values.get(name, 1), dims) for name in ("stride", "dilation"))
            given, pad = (_padded(x, kernel, call), 0) if isinstance(padding, str) else (x, padding)
            made = depthwise_gradient(given, grad, kernel, stride, dilation, pad)
            yield "weight", Dense(made if copies == 1 else made.unflatten(0, (-1, copies)).sum(1))
            return

        padded = _padded(x, kernel, call)

        def examples(x: Tensor) -> Tensor:  # [b·k, g, t, ·] -> [b, g, k·t, ·]
            return x if copies == 1 else x.unflatten(0, (-1, copies)).transpose(1, 2).flatten(2, 3)

        def unfold(x: Tensor) -> Tensor:
            seen = _patches(x, 2, kernel, call)  # [b·k, c, *out, *kernel]
            seen = seen.unflatten(1, (groups, -1)).movedim(2, 2 + dims)  # [b·k, g, *out, c/g, *kernel]
            return examples(seen.reshape(len(x), groups, -1, width))

        def unfold_last(x: Tensor) -> Tensor:  # [b·k, *in, c]: longer runs of memory, so copied faster
            seen = _patches(x, 1, kernel, call).movedim(1 + dims, -1)  # [b·k, *out, *kernel, c]
            return examples(seen.reshape(len(x), 1, -1, width))

        def arrange(x: Tensor) -> Tensor:  # [..., kernel·c] -> [..., c, *kernel]
            return x.reshape(*x.shape[:-1], *kernel, -1).movedim(-1, -1 - dims)

        left = examples(grad.unflatten(1, (groups, -1)).flatten(3).mT)  # [b, g, t, p/g]
        if groups == 1:
            yield "weight", Unfolded(left, padded.movedim(1, -1).contiguous(), unfold_last, width, arrange)
        else:
            yield "weight", Unfolded(left, padded, unfold, width)


def _conv_transpose(call: Call, grad: Tensor) -> Uses:
    """A transposed convolution is a convolution with input and output exchanged: patches are cut from its gradient."""
    if "bias" in call.trained:
        yield "bias", Dense(_per_channel(call, grad))
    if "weight" in call.trained:
        turned = replace(call, values={**call.values, "input": grad}, trained=frozenset({"weight"}))
        yield from _conv(turned, call.values["input"])


def _check_conv_transpose(call: Call) -> None:
    _check_conv(call)
    dims = call.values["weight"].dim() - 2
    extra, stride = (_pairs(call.values.get(n, d), dims) for n, d in (("output_padding", 0), ("stride", 1)))
    if any(e >= s for e, s in zip(extra, stride, strict=True)):
        raise UnsupportedOp(f"{call.op}: output_padding must be smaller than stride.")


def _check_conv(call: Call) -> None:
    weight, x = call.values["weight"], call.values["input"]
    if x.dim() != weight.dim():
        raise UnsupportedOp(f"{call.op}: an input of {x.dim()} axes has no batch axis. Add one: x[None].")


def _rule(arguments: str, parameters: str, keep: str, uses: Any, check: Any = None) -> OpRule:
    split = (tuple(arguments.split()), frozenset(parameters.split()), frozenset(keep.split()))
    return OpRule(*split, uses, check) if check else OpRule(*split, uses)


def _rules() -> dict[Any, OpRule]:
    conv = _rule("input weight bias stride padding dilation groups", "weight bias", "input", _conv, _check_conv)
    turned = _rule(
        "input weight bias stride padding output_padding groups dilation",
        "weight bias",
        "input",
        _conv_transpose,
        _check_conv_transpose,
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
    rules |= dict.fromkeys((torch.conv1d, torch.conv2d, torch.conv3d), conv)
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
