"""Rows that data selected or reordered are refused; what keeps their order is not."""

from __future__ import annotations

import pytest
import torch
from test_ops import Module, floats
from test_tape import check, clipped
from torch import nn

from clipwise import errors


def test_picking_the_last_token_by_arange_is_ordered():
    def forward(m, x):
        return m.a(m.a(x)[torch.arange(len(x)), (x[:, :, 0] > 0).sum(1).clamp(max=3)])

    check(Module(forward, a=nn.Linear(5, 5)), floats(4, 5)())


def selected(m, x):
    return m.a(x[x[:, :, 0] > -10]).reshape(len(x), -1)


def routed(m, x):
    chosen = (x[:, 0, 0] > -10).nonzero()[:, 0]
    out = torch.zeros_like(x)
    out[chosen] = m.a(x[chosen])
    return out


@pytest.mark.parametrize("forward", [selected, routed])
def test_rows_selected_by_data_are_refused(forward):
    with pytest.raises(errors.UnsupportedOp, match="data itself selected"):
        clipped(Module(forward, a=nn.Linear(5, 5)), floats(4, 5)())


REORDERED = {
    "written back": lambda m, x, o: m.a(torch.zeros_like(x).index_put((o.argsort(),), x))[o],
    "set item": lambda m, x, o: _set(m, x, o),
    "negative axis": lambda m, x, o: m.a(x.index_select(-2, o)),
    "ellipsis": lambda m, x, o: m.a(x[..., o, :]),
    "new axis": lambda m, x, o: m.a(x[None, o][0]),
    "scatter": lambda m, x, o: m.a(torch.zeros_like(x).scatter(0, o[:, None].expand_as(x), x)),
    "sort": lambda m, x, o: m.a(x.sort(0).values),
    "flip": lambda m, x, o: m.a(x.flip(0)),
}


def _set(m, x, o):
    buffer = torch.zeros_like(x)
    buffer[o] = x
    return m.a(buffer)


@pytest.mark.parametrize("case", REORDERED)
def test_rows_reordered_by_data_are_refused(case):
    model = Module(lambda m, x: REORDERED[case](m, x, x[:, 0].argsort()), a=nn.Linear(5, 3))
    with pytest.raises(errors.UnsupportedOp, match="data itself selected"):
        clipped(model, floats(5)())


def test_masking_tokens_by_value_is_not_reordering():
    def forward(m, x):
        x = x.clone()
        x[x > 1] = 0
        x[:, 0] = 1
        return m.a(x)[:, -1] + m.a(x.sort(1).values).sum(1)

    check(Module(forward, a=nn.Linear(5, 3)), floats(4, 5)())
