"""What the tape must see and follow."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from brute import assert_matches
from test_ops import B, Module, double_, floats, losses, words
from torch import nn

import clipwise as cw
from clipwise import errors


def check(model, x, rule=None, dtype=torch.float64):
    x = x.to(dtype) if x.is_floating_point() else x
    return assert_matches(model.to(dtype), losses, (x,), rule or cw.PSAC())


def clipped(model, x, loss_fn=losses, **options):
    return cw.clipped_sum(model, loss_fn, (x,), **options)


# -- one gradient per parameter ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("words_count", [7, 400])
def test_tied_embedding_and_head_are_one_gradient(words_count, dtype):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(words_count, 6)
            self.mix = nn.Linear(6, 6)
            self.head = nn.Linear(6, words_count, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.mix(self.embed(x)).tanh()) / words_count

    check(Tied(), words(5)(), dtype=dtype)


def test_tied_by_transpose_is_one_gradient():
    check(Module(lambda m, x: F.embedding(x, m.w).tanh() @ m.w.T, w=(300, 6)), words(5)())


def test_layer_used_twice_and_a_recurrent_cell():
    check(Module(lambda m, x: m.l(m.l(x).tanh()), l=nn.Linear(5, 5)), floats(5)())
    check(Module(lambda m, x: m.l(m.l(x).tanh()), l=nn.Linear(30, 30)), floats(3, 30)())

    def recur(m, x):
        h = x[:, 0, :4] * 0
        for t in range(x.shape[1]):
            h = torch.tanh(m.a(x[:, t]) + m.b(h))
        return h

    check(Module(recur, a=nn.Linear(5, 4), b=nn.Linear(4, 4)), floats(6, 5)())


def test_conv_used_twice_and_embedding_used_twice():
    check(Module(lambda m, x: m.c(m.c(x).tanh()), c=nn.Conv2d(3, 3, 3, padding=1)), floats(3, 5, 5)())
    check(Module(lambda m, x: m.e(x) * m.e(x.flip(1)), e=nn.Embedding(7, 3)), words(5)())


def test_linear_weight_also_used_elementwise():
    check(Module(lambda m, x: F.linear(x, m.w) * m.w[0, 0] + m.w.sum(), w=(3, 5)), floats(4, 5)())


# -- derived parameters --------------------------------------------------------------------------------


DERIVED = {
    "cast": lambda m, x: F.linear(x, m.w.double().to(x.dtype)),
    "transpose": lambda m, x: F.linear(x, m.w.t().contiguous().t()),
    "permute of a reshape": lambda m, x: x @ m.w.reshape(3, 5, 1).permute(1, 0, 2).squeeze(-1),
    "slice": lambda m, x: F.linear(x[..., :2], m.w[:, 1:3]) + F.linear(x[..., :2], m.w[:, 2:4]),
    "chunk": lambda m, x: sum(F.linear(x, part) for part in m.w.chunk(3)),
    "index with repeats": lambda m, x: F.linear(x, m.w[[0, 0, 1, 2]]),
    "one plus": lambda m, x: F.layer_norm(x, (5,), 1 + m.w[0], m.w[1]),
    "exp": lambda m, x: x * m.w[0].exp() + torch.sigmoid(m.w[1]),
    "expand over the batch": lambda m, x: torch.cat([m.w[None].expand(len(x), -1, -1), x], 1),
    "repeat over the batch": lambda m, x: x * m.w[:1].expand(len(x), -1)[:, None],
    "stack": lambda m, x: x * torch.stack([m.w[0], m.w[1]]).mean(0),
    "weight norm by hand": lambda m, x: F.linear(x, m.w / m.w.norm(dim=1, keepdim=True)),
    "two parameters": lambda m, x: F.linear(x, m.w * m.v),
    "low rank": lambda m, x: F.linear(x, m.w + m.a @ m.b),
    "no gradient through detach": lambda m, x: F.linear(x, m.w * m.w.detach()),
    "no gradient under no_grad": lambda m, x: F.linear(x, m.w) * _frozen_scale(m),
}


def _frozen_scale(m):
    with torch.no_grad():
        return m.w.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", DERIVED)
def test_derived_parameters_are_followed(case, dtype):
    model = Module(DERIVED[case], w=(3, 5), v=(3, 5), a=(3, 2), b=(2, 5))
    check(model, floats(4, 5)(), dtype=dtype)


def test_positional_embedding_of_arange_is_a_derived_parameter():
    def forward(m, x):
        return m.tok(x) + m.pos(torch.arange(x.shape[1]))

    check(Module(forward, tok=nn.Embedding(7, 3), pos=nn.Embedding(9, 3)), words(5)())


def test_batch_size_equal_to_sequence_length_is_not_confused():
    def forward(m, x):
        return m.tok(x) + m.pos(torch.arange(x.shape[1])) * m.scale

    check(Module(forward, tok=nn.Embedding(7, 3), pos=nn.Embedding(9, 3), scale=(B, 1)), words(B)())


def test_weight_norm_parametrization_is_followed():
    check(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3)), floats(4, 5)())


def test_half_precision_sums_are_float32_even_through_derivations():
    model = Module(lambda m, x: F.linear(x, m.w.t().t()) + F.linear(x, m.w.float().to(x.dtype)), w=(3, 5))
    out = clipped(model.bfloat16(), floats(4, 5)().bfloat16())
    assert out.grads["w"].dtype == torch.float32
    assert not torch.equal(out.grads["w"], out.grads["w"].bfloat16().float())


# -- in-place, frozen, versions ------------------------------------------------------------------------


def test_in_place_ops_after_a_recorded_op():
    def forward(m, x):
        h = F.relu(m.a(x), inplace=True)
        h = m.b(h)
        h += x
        h *= 2
        h[..., 1:] -= 1
        return m.c(h.tanh()).relu_()

    for shape in ((5,), (4, 5)):
        check(Module(forward, a=nn.Linear(5, 5), b=nn.Linear(5, 5), c=nn.Linear(5, 3)), floats(*shape)())


def test_in_place_ops_after_every_kind_of_norm_and_conv():
    def forward(m, x):
        for layer in (m.a, m.b, m.c, m.d):
            x = layer(x)
            x.mul_(2)
            x[:, 0] = 0
        return x

    layers = {"a": nn.Conv1d(6, 6, 1), "b": nn.GroupNorm(2, 6), "c": nn.InstanceNorm1d(6, affine=True)}
    check(Module(forward, **layers, d=nn.LayerNorm(5)), floats(6, 5)())


def test_first_layer_output_changed_in_place():
    def forward(m, x):
        h = m.a(x)
        h[:, 0] = 0
        h.mul_(3)
        return h

    check(Module(forward, a=nn.Linear(5, 5)), floats(4, 5)())


def test_frozen_parameters_get_nothing_and_change_nothing():
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    out = check(model, floats(6, 5)())
    assert set(out.grads) == {"2.weight", "2.bias"}
    model[0].bias.requires_grad_(True)
    assert set(check(model, floats(6, 5)()).grads) == {"0.bias", "2.weight", "2.bias"}


def test_unused_parameters_get_a_zero_sum():
    model = Module(lambda m, x: m.a(x), a=nn.Linear(5, 3), b=nn.Linear(5, 3))
    out = check(model, floats(5)())
    assert not out.grads["b.weight"].any()


def test_nothing_is_left_behind():
    model, x = nn.Linear(5, 3), floats(5)()
    clipped(model, x)
    assert all(p.grad is None and p.grad_fn is None for p in model.parameters())
    assert not model._forward_hooks
    assert not model._backward_hooks
    assert "_clipwise" not in str(vars(model))
    assert not x.requires_grad


def test_dropout_is_independent_per_example():
    torch.manual_seed(0)
    model = Module(lambda m, x: F.dropout(m.a(x), 0.5), a=nn.Linear(5, 64))
    out = clipped(model, torch.ones(B, 5))
    assert len(set(out.losses.tolist())) == B


def test_l2_penalty_counts_for_every_example():
    model = nn.Linear(5, 3).double()

    def loss_fn(m, batch):
        return losses(m, batch) + 0.1 * sum(p.square().sum() for p in m.parameters())

    assert_matches(model, loss_fn, (floats(5)().double(),), cw.Abadi())


EACH = {
    "cdist": (lambda m, x: torch.cdist(x, m.w), (3, 5), (5,)),
    "cdist of sequences": (lambda m, x: torch.cdist(x, m.w), (3, 5), (7, 5)),
    "cosine similarity": (lambda m, x: F.cosine_similarity(x[:, None], m.w, dim=-1), (3, 5), (5,)),
    "tensordot": (lambda m, x: torch.tensordot(x, m.w, dims=1), (5, 3), (4, 5)),
    "pairwise distance": (lambda m, x: F.pairwise_distance(x, m.w)[:, None], (5,), (5,)),
    "kron": (lambda m, x: torch.kron(x, m.w[None]), (3,), (5,)),
    "rows of several per example": (lambda m, x: torch.cdist(x.flatten(0, 1), m.w).view(len(x), -1), (3, 5), (4, 5)),
    "a derived parameter": (lambda m, x: torch.cdist(x, 1 + m.w.exp()), (3, 5), (5,)),
}


@pytest.mark.parametrize("case", EACH)
def test_ops_without_a_rule_run_once_per_example(case):
    forward, shape, data = EACH[case]
    check(Module(forward, w=shape), floats(*data)())


def test_op_rules_can_be_passed():
    from clipwise.engine.ops import OP_RULES

    def bilinear_uses(call, grad):
        a, b = call.values["input1"], call.values["input2"]
        yield "weight", cw.Dense(torch.einsum("bo,bi,bj->boij", grad, a, b))

    rule = cw.OpRule(
        ("input1", "input2", "weight", "bias"), frozenset({"weight"}), frozenset({"input1", "input2"}), bilinear_uses
    )
    model = Module(lambda m, x: F.bilinear(x, x, m.w), w=(3, 5, 5)).double()
    assert F.bilinear not in OP_RULES
    assert_matches(model, losses, (floats(5)().double(),), cw.PSAC(), op_rules={F.bilinear: rule})
    cw.check_op_rule(F.bilinear, rule, model, lambda m, x: m(x), floats(5)())


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_is_exact(reentrant):
    from torch.utils.checkpoint import checkpoint

    def forward(m, x):
        return checkpoint(m.a, x.clone().requires_grad_(), use_reentrant=reentrant)

    def truth(m, x):
        return m.a(x)

    layers = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Dropout(0.0), nn.Linear(4, 3))
    model, plain = Module(forward, a=layers), Module(truth, a=layers)
    found, expected = (clipped(m, floats(5)()) for m in (model, plain))
    assert torch.equal(found.norms, expected.norms)
    assert all(torch.equal(found.grads[name], expected.grads[name]) for name in expected.grads)
    originals = torch.utils.checkpoint.CheckpointFunction
    assert issubclass(originals, torch.autograd.Function)  # put back


def test_vmap_engine_takes_double_precision():
    assert_matches(nn.Linear(5, 3).double(), losses, (double_(floats(5)()),), cw.AutoV(), engine="vmap")


def zeros_like_batch(m, x):
    h = torch.zeros(len(x), 4, dtype=x.dtype)
    for t in range(x.shape[1]):
        h = torch.tanh(m.a(x[:, t]) + m.b(h))
    return h


CONSTANTS = {
    "hidden state of zeros": (zeros_like_batch, {"a": nn.Linear(5, 4), "b": nn.Linear(4, 4)}),
    "positions expanded over the batch": (
        lambda m, x: x + m.p(torch.arange(x.shape[1]).expand(len(x), -1)),
        {"p": nn.Embedding(9, 5)},
    ),
    "types of zeros": (
        lambda m, x: x * m.p(torch.zeros(x.shape[:2], dtype=torch.int64)),
        {"p": nn.Embedding(3, 5)},
    ),
    "class token repeated": (lambda m, x: torch.cat([m.w.repeat(len(x), 1, 1), x], 1), {"w": (1, 1, 5)}),
    "class token stacked": (
        lambda m, x: torch.cat([torch.stack([m.w] * len(x))[:, None], x], 1),
        {"w": (5,)},
    ),
    "expand_as": (lambda m, x: x + m.w.expand_as(x), {"w": (5,)}),
    "type_as": (lambda m, x: x * m.w.type_as(x), {"w": (5,)}),
    "to": (lambda m, x: F.linear(x, m.w.to(x)), {"w": (3, 5)}),
    "input cast like the weight": (lambda m, x: F.linear(x.type_as(m.w), m.w), {"w": (3, 5)}),
    "bias of one": (lambda m, x: F.linear(x, m.w, m.b), {"w": (3, 5), "b": (1,)}),
    "bmm with an expanded parameter": (lambda m, x: torch.bmm(x, m.w.expand(len(x), 5, 3)), {"w": (5, 3)}),
}


@pytest.mark.parametrize("case", CONSTANTS)
@pytest.mark.parametrize("size", [B, 6])
def test_constants_with_a_batch_axis_and_metadata(case, size):
    forward, parts = CONSTANTS[case]
    check(Module(forward, **parts), torch.randn(size, 6, 5, generator=torch.Generator().manual_seed(1)))


def test_table_indexed_by_data_is_an_embedding():
    check(Module(lambda m, x: m.w[x], w=(7, 3)), words(5)())
    check(Module(lambda m, x: m.w.index_select(0, x), w=(7, 3)), words()())


def test_padding_minus_one_is_the_last_row_in_functional_embedding():
    x = torch.tensor([[0, 6, 2], [6, 6, 1], [1, 2, 3], [0, 0, 6]])
    check(Module(lambda m, x: F.embedding(x, m.w, padding_idx=-1), w=(7, 3)), x)
    check(Module(lambda m, x: torch.embedding(m.w, x, -1), w=(7, 3)), x)


def test_a_transpose_that_is_none():
    check(Module(lambda m, x: x @ m.w.transpose(0, 0), w=(5, 5)), floats(4, 5)())


def test_a_parameter_expanded_over_another_axis_is_not_attributed_by_position():
    check(Module(lambda m, x: torch.einsum("bt,t->b", x, m.w.expand(B))[:, None], w=(1,)), torch.randn(B, B))
    check(Module(lambda m, x: torch.cdist(x, m.w.expand(B, B)), w=(B,)), torch.randn(B, B))


def test_data_written_into_a_view_of_a_constant_is_data():
    def forward(m, x):
        both = torch.zeros(len(x), 2, 5, dtype=x.dtype)
        both[:, 0].copy_(m.a(x))
        return m.b(both)

    check(Module(forward, a=nn.Linear(5, 5), b=nn.Linear(5, 3)), floats(5)())


def test_bf16_derivations_with_constants():
    model = Module(lambda m, x: F.linear(x, torch.eye(3, dtype=torch.bfloat16) @ m.w), w=(3, 5)).bfloat16()
    assert clipped(model, floats(5)().bfloat16()).grads["w"].dtype == torch.float32


def test_fp16_bias_sums_do_not_overflow():
    model = nn.Linear(4, 3).half()
    x = torch.ones(1, 300, 4, dtype=torch.float16)
    out = clipped(model, x, loss_fn=lambda m, b: 300 * m(b[0]).float().sum((1, 2)), rule=cw.Abadi())
    assert torch.isfinite(out.norms).all()


def test_an_empty_batch_is_a_zero_sum_and_never_calls_the_loss():
    out = clipped(nn.Linear(5, 3), torch.zeros(0, 5), loss_fn=lambda m, b: 1 / 0)
    assert not out.grads["weight"].any()
    assert out.norms.shape == (0,)


def test_works_under_an_outer_no_grad():
    model = nn.Linear(5, 3)
    with torch.no_grad():
        a = clipped(model, floats(5)())
    torch.testing.assert_close(a.grads["weight"], clipped(model, floats(5)()).grads["weight"])


def test_a_first_axis_that_happens_to_equal_the_batch_is_not_the_batch():
    cases = [
        (lambda m, b: (m.l(b[0]) * m.w).tanh().sum((0, 2)), (B, 1, 3)),
        (lambda m, b: (m.l(b[0]).sum(1) * m.w).tanh().sum(0), (B, 1)),
    ]
    for loss_fn, shape in cases:
        with pytest.raises(errors.UnsupportedOp):
            clipped(Module(None, l=nn.Linear(5, 3), w=shape), floats(5)(), loss_fn=loss_fn)


def test_padding_does_not_change_a_norm_under_one_path():
    from clipwise.clipping import engine_gradients

    model = nn.Linear(600, 600, bias=False)
    x, y = torch.randn(3, 60, 600), torch.randn(3, 60, 600)
    paths = {}
    token_loss = lambda m, b: (m(b[0]) * b[1]).sum((1, 2))  # noqa: E731
    norms = []
    for longest in (60, 200):
        pad = (0, 0, 0, longest - 60)
        found = engine_gradients(model, token_loss, (F.pad(x, pad), F.pad(y, pad)), 3, paths=paths)
        norms.append(found.norms([("weight",)]))
    assert paths["weight"].form == "outer"
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)


def test_one_position_and_padded_positions_give_one_norm():
    """Whether a record of one position stands alone or beside a longer one must not change its norm."""
    from clipwise.clipping import engine_gradients

    model, paths = nn.Linear(600, 600, bias=False), {}
    token_loss = lambda m, b: (m(b[0]) * b[1]).sum((1, 2))  # noqa: E731
    x, y = torch.randn(3, 40, 600), torch.randn(3, 40, 600)
    engine_gradients(model, token_loss, (x, y), 3, paths=paths)  # a run fixes its paths on longer records
    norms = []
    for longest in (1, 40):
        pad = (0, 0, 0, longest - 1)
        found = engine_gradients(model, token_loss, (F.pad(x[:, :1], pad), F.pad(y[:, :1], pad)), 3, paths=paths)
        norms.append(found.norms([("weight",)]))
    torch.testing.assert_close(*norms, rtol=1e-6, atol=0)


def test_a_parameter_without_axes():
    """A temperature: its per-example gradient is one number."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.line, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(1.5))

        def forward(self, x):
            return self.line(x) * self.scale

    model, x = Scaled(), torch.randn(5, 4)
    out = cw.clipped_sum(model, lambda m, b: m(b).square().sum(1), x, cw.Abadi(), 1e9)
    grads = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for (name, _), value in zip(model.named_parameters(), grads, strict=True):
        assert torch.allclose(out.grads[name], value, rtol=1e-4)
