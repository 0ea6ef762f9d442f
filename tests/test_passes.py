"""Passes over a compiled step's graph: what a GPU does, here on a CPU. They change how numbers lie, and no number."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from test_compiled import assert_same, losses
from torch import nn

import clipwise as cw
from clipwise.clipping import clip, engine_gradients, trainable
from clipwise.engine import layouts, op_rule, ops, same_work, writes
from clipwise.engine.compiled import Compiled
from clipwise.engine.static import static

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Block(nn.Module):
    """A residual block with group norm, on images."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.na, self.nb = nn.GroupNorm(4, 16), nn.GroupNorm(4, 16)

    def forward(self, x):
        return F.relu(self.nb(self.b(F.relu(self.na(self.a(x))))) + x)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_images_are_laid_out_once_and_group_norm_sums_once(dropout, monkeypatch):
    """What a GPU does, here on a CPU: no copy that only turns an image, and one pass over it for each group norm."""
    monkeypatch.setattr("clipwise.engine.prepared._WHERE", frozenset({"cpu"}))
    monkeypatch.setattr("clipwise.engine.ops._ONE_PASS", frozenset({"cpu"}))
    monkeypatch.setattr(writes, "_LARGE", 6 * 256)
    monkeypatch.setattr(writes, "_FAR", 10**6)
    graphs = []

    class Seen(same_work.SameWork):
        def __init__(self, on_gpu):
            super().__init__(on_gpu=True)

        def __call__(self, graph):
            before = [node for node in graph.nodes if layouts.turns(node)]
            super().__call__(graph)
            graphs.append((len(before), graph))

        def uuid(self):
            return None  # not from a cache

    monkeypatch.setattr(same_work, "SameWork", Seen)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), Block(), nn.Dropout(dropout), Block(), nn.Flatten(), nn.Linear(256, 5)
    )
    rule = cw.PSAC()
    groups = rule.groups(list(trainable(model)))

    def step(data, mask, scale):
        return clip(engine_gradients(model, losses, data, len(mask)), rule, scale, groups, mask)

    batch, mask = (torch.randn(6, 3, 4, 4), torch.arange(6) % 5), torch.tensor([1, 1, 0, 1, 1, 1]).bool()
    batch[0][1, 0, 0, 0] = math.nan
    found, norms = Compiled(model, step)(batch, mask, 1.0)
    ((turned, graph),) = graphs
    assert turned >= 4
    assert not any(layouts.turns(node) for node in graph.nodes)
    sums = [
        n
        for n in graph.nodes
        if n.target is torch.ops.aten.sum.dim_IntList and n.meta["val"].shape == (6, 16) and n.args[1] == [2]
    ]
    shapes = [tuple(node.meta["val"].shape) for node in written(graph)]
    assert shapes.count((6, 4)) == 8  # two numbers for each group of channels
    assert shapes.count((6, 16, 4, 4)) >= 4
    assert len(sums) == 2 * 4  # of each group norm: for its own backward pass and for its parameters
    assert all(torch.isfinite(v).all() for v in found.values())
    if not dropout:
        truth, true_norms = step(batch, mask, 1.0)
        torch.testing.assert_close(norms, true_norms, rtol=1e-4, atol=1e-6, equal_nan=True)
        for name, value in truth.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


class Strided(nn.Module):
    """Looks at memory, some ops after a convolution."""

    def __init__(self, of_a_view):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.head, self.of_a_view = nn.GroupNorm(4, 16), nn.Linear(16 * 36, 5), of_a_view

    def forward(self, x):
        x = self.norm(self.second(self.first(x))).relu()
        x = self.second(x).flatten(2) if self.of_a_view else x
        seen = x.as_strided((len(x), 16, 5, 12), (16 * 36, 36, 6, 1)).mean(-1)
        return self.head(x.flatten(1)) + seen.flatten(1)[:, :5]


@pytest.mark.parametrize("of_a_view", [False, True])
def test_ops_that_look_at_memory_find_it_as_it_was(of_a_view, monkeypatch):
    monkeypatch.setattr("clipwise.engine.prepared._WHERE", frozenset({"cpu"}))
    monkeypatch.setattr(same_work.SameWork, "__init__", lambda self, on_gpu: setattr(self, "_on_gpu", True))
    torch.manual_seed(0)
    model, rule = Strided(of_a_view), cw.PSAC()
    groups = rule.groups(list(trainable(model)))

    def step(data, mask, scale):
        return clip(engine_gradients(model, losses, data, len(mask)), rule, scale, groups, mask)

    given = (torch.randn(4, 3, 6, 6), torch.arange(4) % 5), torch.ones(4, dtype=torch.bool), 1.0
    assert_same(Compiled(model, step)(*given), step(*given))


def test_copies_that_turn_an_image_are_told_from_others():
    """An axis of one entry lies in both orders at once."""

    def turned(x, how):
        graph = torch.fx.Graph()
        source = graph.placeholder("x")
        node = graph.call_function(torch.ops.aten.clone.default, (source,), {"memory_format": how})
        source.meta["val"], node.meta["val"] = x, x.clone(memory_format=how)
        return layouts.turns(node)

    image, last = torch.randn(2, 3, 4, 5), torch.channels_last
    assert turned(image, last)
    assert turned(image.contiguous(memory_format=last), torch.contiguous_format)
    assert not turned(image, torch.contiguous_format)
    assert not turned(torch.randn(2, 1, 8, 4).transpose(2, 3), torch.contiguous_format)  # a factor [b, 1, t, p]
    assert not turned(image.permute(0, 1, 3, 2), torch.contiguous_format)


def test_group_norm_of_narrow_input_keeps_its_own_rule(monkeypatch):
    """Mean and scale of bfloat16 would be rounded before they cancel (autocast)."""
    monkeypatch.setattr("clipwise.engine.ops._ONE_PASS", frozenset({"cpu"}))
    rule = ops.OP_RULES[F.group_norm]
    x, grad = 30 + torch.randn(3, 8, 4, 4), torch.randn(3, 8, 4, 4)
    normalised = F.group_norm(x.bfloat16().double(), 4)
    truth = (grad * normalised).sum((2, 3))
    for given, far in ((x.bfloat16(), 5e-3), (x.bfloat16().float(), 1e-4)):
        call = op_rule.Call("group_norm", {"input": given, "num_groups": 4}, frozenset({"weight"}), 3)
        with static():
            found = dict(rule.uses(call, grad))["weight"].grad
        assert (found - truth).norm() <= far * truth.norm()


def written(graph):
    return [node.args[0] for node in graph.nodes if "force_stride_order" in str(node.target)]


def test_the_sum_of_a_residual_stream_is_written(monkeypatch):
    """Otherwise each norm's float32 numbers are kept in its place."""
    monkeypatch.setattr(writes, "_LARGE", 64)
    monkeypatch.setattr(writes, "_FAR", 60)
    graphs, real = [], writes.write_sums
    monkeypatch.setattr(
        same_work, "write_sums", lambda graph: (real(graph), graph.lint(), graphs.append(written(graph)))
    )
    monkeypatch.setattr(same_work.SameWork, "__init__", lambda self, on_gpu: setattr(self, "_on_gpu", True))
    monkeypatch.setattr(same_work.SameWork, "uuid", lambda self: None)  # not from a cache
    torch.manual_seed(0)

    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(4))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x)
            return self.head(x).mean(1)

    model, rule = Stream().bfloat16(), cw.PSAC()
    groups = rule.groups(list(trainable(model)))

    def step(data, mask, scale):
        return clip(engine_gradients(model, losses, data, len(mask)), rule, scale, groups, mask)

    given = (torch.randn(4, 5, 8).bfloat16(), torch.arange(4) % 3), torch.ones(4, dtype=torch.bool), 1.0
    found, expected = Compiled(model, step)(*given), step(*given)
    (sums,) = graphs
    assert len(sums) >= 4
    assert {node.meta["val"].dtype for node in sums} == {torch.bfloat16}
    assert_same(found, expected, 0.05)
