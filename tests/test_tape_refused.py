"""What the tape must refuse."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from brute import assert_matches
from test_ops import B, Module, floats, losses, words
from torch import nn

import clipwise as cw
from clipwise import errors


def check(model, x, rule=None, dtype=torch.float64):
    x = x.to(dtype) if x.is_floating_point() else x
    return assert_matches(model.to(dtype), losses, (x,), rule or cw.PSAC())


def clipped(model, x, loss_fn=losses, **options):
    return cw.clipped_sum(model, loss_fn, (x,), **options)


def test_recorded_input_changed_afterwards_is_refused():
    def forward(m, x):
        h = x * 1
        y = m.a(h)
        h += 1
        return y

    with pytest.raises(errors.ChangedInput, match=r"input of linear .*a\.weight"):
        clipped(Module(forward, a=nn.Linear(5, 5)), floats(4, 5)())


def test_unknown_op_is_refused_by_name():
    """Its result does not have the examples first."""
    model = Module(lambda m, x: torch.cdist(m.w, x).T, w=(3, 5))
    with pytest.raises(errors.UnsupportedOp, match=r"Parameter w .*'cdist'"):
        clipped(model, floats(5)())
    clipped(model, floats(5)(), engine="vmap")


def test_constants_whose_first_axis_may_be_the_examples_are_refused():
    beside = torch.randn(B, 5)
    model = Module(lambda m, x: torch.cdist(torch.stack([x, beside]), m.w)[0], w=(3, 5))
    with pytest.raises(errors.UnsupportedOp):
        clipped(model, floats(5)())
    model = Module(lambda m, x: F.triplet_margin_loss(x, m.w, beside, reduction="none")[:, None], w=(5,))
    with pytest.raises(errors.UnsupportedOp, match="triplet_margin_loss"):
        clipped(model, floats(5)())


def test_batch_norm_in_training_mode_is_refused_even_without_parameters():
    for affine in (True, False):
        model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=affine))
        with pytest.raises(errors.CrossExampleOp, match="batch_norm"):
            clipped(model, floats(5)())


def test_instance_norm_with_running_stats_is_refused():
    model = nn.InstanceNorm1d(5, affine=True, track_running_stats=True)
    with pytest.raises(errors.CrossExampleOp, match="track_running_stats"):
        clipped(model, floats(5, 4)())


def test_embedding_options_that_mix_examples_are_refused():
    for options in ({"scale_grad_by_freq": True}, {"max_norm": 1.0}):
        with pytest.raises((errors.CrossExampleOp, errors.UnsupportedOp), match="embedding"):
            clipped(nn.Embedding(7, 3, **options), words(5)())


@pytest.mark.parametrize("reduce", [lambda x: x.mean(), lambda x: x.sum(), lambda x: x[:, None]])
def test_loss_that_is_not_one_per_example_is_refused(reduce):
    with pytest.raises(errors.LossShape, match="one loss per example"):
        clipped(nn.Linear(5, 3), floats(5)(), loss_fn=lambda m, b: reduce(losses(m, b)))


def test_a_parameter_outside_the_model_is_refused():
    stray = nn.Parameter(torch.ones(3))
    with pytest.raises(errors.ParameterMismatch, match="does not belong"):
        clipped(nn.Linear(5, 3), floats(5)(), loss_fn=lambda m, b: losses(m, b) + (m(b[0]) * stray).sum(1))


def test_custom_autograd_function_is_seen_as_unrecorded():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g * w, (g * x).sum(0)

    with pytest.raises(errors.UnrecordedGradient, match="w got a gradient"):
        clipped(Module(lambda m, x: Double.apply(x, m.w), w=(5,)), floats(5)())


def test_parameter_written_into_a_constant_is_refused():
    def forward(m, x):
        table = torch.zeros(2, 5)
        table[0] = m.w
        return x + table.sum(0)

    with pytest.raises(errors.ClipwiseError):
        clipped(Module(forward, w=(5,)), floats(5)())


def test_parameter_changed_in_place_is_refused():
    def forward(m, x):
        (m.w * 1).mul_(2)
        return x * m.w

    with pytest.raises(errors.UnsupportedOp, match="in place"):
        clipped(Module(forward, w=(5,)), floats(5)())


def test_batch_axis_must_come_first():
    with pytest.raises(errors.UnsupportedOp, match="first axis"):
        clipped(Module(lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1), a=nn.Linear(5, 3)), floats(6, 5)())


def test_second_derivatives_are_refused():
    def penalty(m, batch):
        x = batch[0].clone().requires_grad_()
        (g,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
        return (g.norm(dim=1) - 1) ** 2

    with pytest.raises(errors.UnsupportedOp, match="second derivatives"):
        clipped(nn.Linear(5, 3), floats(5)(), loss_fn=penalty)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_paths_that_the_tape_cannot_see_are_refused():
    class NumpyTanh(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = torch.from_numpy(x.detach().numpy() ** 2)
            ctx.save_for_backward(x)
            return y

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    scripted = torch.jit.script(_squared)
    through_numpy = Module(
        lambda m, x: m.b(torch.from_numpy(m.a(x).detach().numpy())), a=nn.Linear(5, 4), b=nn.Linear(4, 3)
    )
    for forward in (lambda m, x: m.b(NumpyTanh.apply(m.a(x))), lambda m, x: m.b(scripted(m.a(x)))):
        model = Module(forward, a=nn.Linear(5, 4), b=nn.Linear(4, 3))
        try:
            check(model, floats(5)())
        except errors.ClipwiseError:
            continue
    with pytest.raises(errors.ClipwiseError):
        clipped(through_numpy, floats(5)())
    with pytest.raises(errors.ClipwiseError):
        clipped(Module(lambda m, x: F.linear(x, scripted(m.w) * m.v), w=(3, 5), v=(3, 5)), floats(5)())


def _squared(x: torch.Tensor) -> torch.Tensor:
    return x * x


def test_losses_without_data_and_weights_set_in_forward_are_refused():
    with pytest.raises(errors.UnrecordedGradient, match="No loss depends"):
        clipped(nn.Linear(5, 3), floats(5)(), loss_fn=lambda m, b: m.weight.square().sum().expand(len(b[0])))

    def renormed(m, x):
        m.w.data = torch.renorm(m.w.data, 2, 0, 1.0)
        return F.linear(x, m.w)

    with pytest.raises(errors.UnsupportedOp, match="in place"):
        clipped(Module(renormed, w=(3, 5)), floats(5)())
