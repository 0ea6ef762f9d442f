"""Ops that PyTorch fuses, written out batch-major with ops that have rules: attention, recurrent nets, bags.

The tape calls these in place of the fused op when a trained parameter is in it, and records what they are
made of. Each gives what the fused op gives, to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UnsupportedOp

State = tuple[Tensor, ...]


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    heads: int,
    in_weight: Tensor | None,
    in_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """F.multi_head_attention_forward: queries, keys and values come time-major, [t, b, d]."""
    if query.dim() != 3 or static_k is not None or static_v is not None:
        raise UnsupportedOp("multi_head_attention_forward without a batch axis, or with static keys: not supported.")
    if is_causal and attn_mask is None:
        raise UnsupportedOp("multi_head_attention_forward: is_causal is a hint, and needs attn_mask as well.")
    same = query is key and key is value
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    size, length = query.shape[:2]
    if same and in_weight is not None and not use_separate_proj_weight:
        q, k, v = F.linear(query, in_weight, in_bias).chunk(3, dim=-1)
    else:
        apart: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
        weights = apart if use_separate_proj_weight or in_weight is None else in_weight.chunk(3)
        biases = (None, None, None) if in_bias is None else in_bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    extra = 0
    if bias_k is not None and bias_v is not None:
        k, v = (torch.cat([x, b.expand(size, 1, -1)], dim=1) for x, b in ((k, bias_k), (v, bias_v)))
        extra += 1
    if add_zero_attn:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        extra += 1
    q, k, v = (x.reshape(size, x.shape[1], heads, -1).transpose(1, 2) for x in (q, k, v))
    mask = _attention_mask(attn_mask, key_padding_mask, extra, size, heads, q.dtype)
    dropped = dropout_p if training else 0.0
    shown = None
    if need_weights:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        shown = (scores if mask is None else scores + mask).softmax(dim=-1)
        shown = F.dropout(shown, dropped) if dropped else shown
        mixed = shown @ v
        shown = shown.mean(dim=1) if average_attn_weights else shown
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask, dropped)
    out = F.linear(mixed.transpose(1, 2).reshape(size, length, embed_dim), out_weight, out_bias)
    return out.transpose(0, 1), shown


def _attention_mask(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, extra: int, size: int, heads: int, dtype: torch.dtype
) -> Tensor | None:
    """Both masks as one that is added to the scores [b, heads, t, s]; True means masked."""
    parts = []
    if attn_mask is not None:
        mask = _added(attn_mask, dtype)
        parts.append(mask.reshape(size, heads, *mask.shape[1:]) if mask.dim() == 3 else mask)
    if key_padding_mask is not None:
        parts.append(_added(key_padding_mask, dtype)[:, None, None, :])
    parts = [F.pad(part, (0, extra)) for part in parts] if extra else parts
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf)


def _lstm(x: Tensor, state: State, weights: Sequence[Any]) -> State:
    """One step from x = W_ih·input + b_ih."""
    h, c = state
    i, f, g, o = (x + F.linear(h, weights[1], weights[3])).chunk(4, dim=1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (h if len(weights) < 5 else F.linear(h, weights[4])), c


def _gru(x: Tensor, state: State, weights: Sequence[Any]) -> State:
    (h,) = state
    ones = torch.ones_like(x)  # so that gates of a first state of zeros become data, row by row, before they are cut
    hidden = F.linear(h, weights[1], weights[3]) * ones
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, dim=1), hidden.chunk(3, dim=1)
    reset, update = (xr + hr).sigmoid(), (xz + hz).sigmoid()
    new = (xn + reset * hn).tanh()
    return ((1 - update) * new + update * h,)


def _rnn(squash: Callable[[Tensor], Tensor]) -> Callable[[Tensor, State, Sequence[Any]], State]:
    return lambda x, state, weights: (squash(x + F.linear(state[0], weights[1], weights[3])),)


def _recurrent(name: str, cell: Callable[[Tensor, State, Sequence[Any]], State]) -> Callable[..., Any]:
    """torch.lstm, torch.gru, torch.rnn_*: input [b, t, d] or [t, b, d], states [layers·directions, b, h]."""

    def run(
        x: Tensor,
        hx: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> tuple[Tensor, ...]:
        if not isinstance(has_biases, bool):
            raise UnsupportedOp(
                f"{name} on a packed sequence orders rows by length, so examples cannot be told apart. Pad the "
                "sequences to one length, and mask."
            )
        first = hx if isinstance(hx, (tuple, list)) else (hx,)
        x = x if batch_first else x.transpose(0, 1)
        directions = 2 if bidirectional else 1
        each = len(params) // (layers * directions)
        last: list[State] = []
        for layer in range(layers):
            outs = []
            for direction in range(directions):
                number = layer * directions + direction
                weights = _four(params[number * each : (number + 1) * each], has_biases)
                state = tuple(s[number] for s in first)
                seen = F.linear(x, weights[0], weights[2])
                order = range(seen.shape[1])
                steps: list[Tensor] = []
                for t in reversed(order) if direction else order:
                    state = cell(seen[:, t], state, weights)
                    steps.append(state[0])
                outs.append(torch.stack(steps[::-1] if direction else steps, dim=1))
                last.append(state)
            x = torch.cat(outs, dim=2) if directions == 2 else outs[0]
            if dropout and train and layer < layers - 1:
                x = F.dropout(x, dropout)
        ends = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
        return (x if batch_first else x.transpose(0, 1), *ends)

    return run


def _four(weights: Sequence[Any], has_biases: bool) -> list[Any]:
    """W_ih, W_hh, b_ih, b_hh and, where the LSTM projects, W_hr."""
    return list(weights) if has_biases else [*weights[:2], None, None, *weights[2:]]


def _one_cell(cell: Callable[[Tensor, State, Sequence[Any]], State]) -> Callable[..., Any]:
    """torch.lstm_cell and its kin."""

    def run(x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
        state = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
        out = cell(F.linear(x, w_ih, b_ih), state, [w_ih, w_hh, b_ih, b_hh])
        return out if len(out) > 1 else out[0]

    return run


def embedding_bag(
    x: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """F.embedding_bag on [b, t] indices."""
    if x.dtype.is_floating_point:  # an older order of arguments, which PyTorch still takes
        x, weight = weight, x
    if x.dim() != 2 or offsets is not None:
        raise UnsupportedOp("embedding_bag with offsets has no batch axis: pad the bags to one length (padding_idx).")
    rows = F.embedding(x, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)
    used = torch.ones_like(x, dtype=torch.bool) if padding_idx is None else x != padding_idx % weight.shape[0]
    if mode == "max":
        top = rows.masked_fill(~used[:, :, None], -math.inf).max(dim=1).values
        return torch.where(used.any(dim=1)[:, None], top, torch.zeros_like(top))
    scale = used.to(rows.dtype)
    if per_sample_weights is not None:
        scale = scale * per_sample_weights
    total = (rows * scale[:, :, None]).sum(dim=1)
    return total if mode == "sum" else total / used.sum(dim=1).clamp(min=1)[:, None]


def bilinear(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """xᵀ·W·y for every output: a linear map of the outer product."""
    return F.linear((x[..., :, None] * y[..., None, :]).flatten(-2), weight.flatten(1), bias)


def prelu(x: Tensor, weight: Tensor) -> Tensor:
    """X where positive, else weight·x; one weight for all, or one per channel, the second axis."""
    shape = (1, -1) + (1,) * (x.dim() - 2) if x.dim() > 1 else (-1,)
    return torch.where(x > 0, x, x * weight.reshape(shape))


COMPOSITES: Mapping[Any, Callable[..., Any]] = {
    F.multi_head_attention_forward: multi_head_attention,
    torch.lstm: _recurrent("lstm", _lstm),
    torch.gru: _recurrent("gru", _gru),
    torch.rnn_tanh: _recurrent("rnn", _rnn(torch.tanh)),
    torch.rnn_relu: _recurrent("rnn", _rnn(torch.relu)),
    torch.lstm_cell: _one_cell(_lstm),
    torch.gru_cell: _one_cell(_gru),
    torch.rnn_tanh_cell: _one_cell(_rnn(torch.tanh)),
    torch.rnn_relu_cell: _one_cell(_rnn(torch.relu)),
    F.embedding_bag: embedding_bag,
    torch.bilinear: bilinear,
    F.bilinear: bilinear,
    torch.prelu: prelu,
    F.prelu: prelu,
}


def batched_equation(equation: Any, is_data: Sequence[bool], names: str) -> str:
    """An einsum with an axis for the examples added to its parameters, or a refusal.

    >>> batched_equation("bld,dk->blk", [True, False], "w")
    'bld,bdk->blk'
    """
    if not isinstance(equation, str) or "." in equation or "->" not in equation:
        raise UnsupportedOp(f"einsum with parameter {names}: give an equation in letters, with '->', without '...'.")
    inputs, output = equation.replace(" ", "").split("->")
    parts = inputs.split(",")
    batch = {part[:1] for part, data in zip(parts, is_data, strict=True) if data}
    weights = [part for part, data in zip(parts, is_data, strict=True) if not data]
    letter = next(iter(batch)) if len(batch) == 1 else ""
    if not letter or output[:1] != letter or any(letter in part for part in weights):
        raise UnsupportedOp(
            f"einsum {equation!r} with parameter {names}: the first letter of all data and of the result must be the "
            "examples' axis, and no parameter may have it."
        )
    return ",".join(p if data else letter + p for p, data in zip(parts, is_data, strict=True)) + "->" + output


def per_example_einsum(args: Any, size: int, names: str, copy_of: Callable[[Tensor], Tensor | None]) -> Tensor:
    """Give the parameters an axis for the examples, and let autograd do the rest."""
    equation, *operands = args
    operands = list(operands[0]) if len(operands) == 1 and not isinstance(operands[0], Tensor) else operands
    copies = [copy_of(x) for x in operands]
    equation = batched_equation(equation, [copy is None for copy in copies], names)
    if any(copy is None and (x.dim() == 0 or x.shape[0] != size) for x, copy in zip(operands, copies, strict=True)):
        raise UnsupportedOp(
            f"einsum {equation!r} with parameter {names}: together with data whose first axis does not run over the "
            "examples. Keep the batch axis first."
        )
    return torch.einsum(equation, *(x if copy is None else copy for x, copy in zip(operands, copies, strict=True)))
