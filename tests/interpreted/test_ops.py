"""What a compiler is told about the ops of cuda_ops.py is what they do."""

from __future__ import annotations

import pytest
import torch

from clipwise.engine import kernels_cuda, strips  # noqa: F401  (torch.ops.clipwise)

ROWS, KEEP = torch.randn(24, 40), torch.tensor([True, False, True, True])
WINDOW = ((3, 2), (2, 1), (1, 0), (1, 2), (4, 5))
IMAGES, GRADS = torch.randn(4, 7, 7, 16), torch.randn(4, 20, 24)
FACTORS = torch.randn(4, 1, 30, 16), torch.randn(4, 1, 30, 24)
CALLS = {
    "weighted_product": (ROWS, torch.randn(24, 30), torch.rand(4), ~KEEP, True, "exact"),
    "weighted_rows": (ROWS[:4], torch.rand(4), KEEP),
    "squares": (ROWS, 128),
    "cat": ([ROWS, torch.randn(24, 3)],),
    "cat of one": ([torch.randn(40, 24).T],),
    "cat of one, channels last": ([torch.randn(2, 7, 5, 1).transpose(1, 2)],),
    "strip_gradients": (GRADS, IMAGES, False, 128, *WINDOW),
    "strip_gradients of cut factors": (GRADS, IMAGES, True, 128, *WINDOW),
    "patch_bound": (GRADS, IMAGES, *WINDOW, [0.1] * 4),
    "strip_sum": (GRADS, IMAGES, torch.rand(4), KEEP, *WINDOW),
    "patch_products": (GRADS, IMAGES, KEEP, *WINDOW, 2, True),
    "column_sums": (torch.randn(4, 30, 16),),
    "matmul": (ROWS, ROWS.mT.contiguous(), True),
    "gram": (*FACTORS, False),
    "gram_bounds": ([FACTORS[0]], [FACTORS[1]], torch.zeros(1, 3, 4, dtype=torch.float64), [False], [0.1] * 4),
    "norm_sums": (torch.randn(4, 9, 16), torch.randn(4, 9, 16), torch.randn(4, 9), torch.rand(4, 9)),
}


@pytest.fixture(autouse=True)
def constants(monkeypatch):
    monkeypatch.setattr(kernels_cuda, "_CHUNK", 1024)


@pytest.mark.parametrize("name", CALLS)
def test_ops(name):
    op = getattr(torch.ops.clipwise, name.split()[0]).default
    torch.library.opcheck(op, CALLS[name], test_utils=("test_schema", "test_faketensor"))
