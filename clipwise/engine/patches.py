"""Convolutions on tensor cores: patches are read where they lie in the input, and never made.

With x_s the input at position s, and a patch r_t = (x_{s(t, k)} for all places k of the kernel),

    ⟨r_t, r_u⟩ = Σ_k ⟨x_{s(t, k)}, x_{s(u, k)}⟩,

so that the Gram matrix of the patches is a sum of shifted pieces of the input's own, with kernel-size times less work.
The weighted sum is a weight gradient as in ordinary training, by one kernel that also makes one gradient per example.
That kernel is fast with bfloat16. It is slow with TF32, whose tensor cores want the factors turned: there strips.py
makes sums and gradients.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .contributions import Window
from .gram import LONG, errors, gram_of, inner_products
from .products import Precision, cut, longest, select

_PROGRAMS = 264  # two for each of an H200's processors


def example_gradients(
    left: Tensor, x: Tensor, window: Window, copies: int, precision: Precision, is_cut: bool, chunk: int
) -> tuple[Tensor, Tensor | None]:
    """[b, p, *kernel, c] in float32, of left [b·k, t, p], which may be cut already, and x [b·k, *in, c].

    And sums of their squares, in chunks of so many, where they are at hand.
    """
    if precision == "tf32":
        made, squares = torch.ops.clipwise.strip_gradients(left, x, is_cut, chunk, *window)
        return (made, squares) if copies == 1 else (made.unflatten(0, (-1, copies)).sum(1), None)
    every = torch.ones(len(x), dtype=torch.bool, device=x.device)
    found: Tensor = torch.ops.clipwise.patch_products(left, x, every, *window, copies, False)
    return found, None


@dataclass(frozen=True)
class PatchGrad:
    """A convolution's weight, never materialised per example."""

    left: Tensor  # [b, t, p]
    input: Tensor  # [b, *in, c]
    window: Window
    shape: tuple[int, ...]  # of the parameter: [p, c, *kernel], or any reshape of it
    precision: Precision

    def squared_norms(self) -> Tensor:
        """From the Gram matrices of outputs and of patches, as a bound (gram.py)."""
        left, x = self.left, self.input.flatten(1, 2)
        sides = (left.shape[2], x.shape[2] * self.window.kernel[0] * self.window.kernel[1])
        if left.device.type == "cuda" and left.shape[2] <= LONG and x.shape[2] <= LONG:
            known = list(errors(sides, torch.float32, self.precision, weigh_left=True))
            found: Tensor = torch.ops.clipwise.patch_bound(left, self.input, *self.window, known)
            return found
        left, x = (cut(left), cut(x)) if self.precision == "tf32" else (left, x)
        own, seen = (inner_products(v, torch.float32, self.precision) for v in (left, x))
        both = (own[:, None], self._seen(seen)[:, None])
        return gram_of(both, sides, torch.float32, self.precision, weigh_left=True).bound()

    def _seen(self, products: Tensor) -> Tensor:
        """[b, in, in] of the input to [b, t, t] of its patches."""
        size, lines, width, _ = self.input.shape
        products = products.reshape(size, lines, width, lines, width)
        pads: list[int] = []
        for axis in (1, 0):
            begin, length = self.window.before[axis], (lines, width)[axis]
            pads += [begin, max(0, self.window.places(axis, self.window.kernel[axis] - 1)[1] - begin - length)]
        products = F.pad(products, (*pads, *pads))
        shifted = []
        for i in range(self.window.kernel[0]):
            for j in range(self.window.kernel[1]):
                rows, columns = slice(*self.window.places(0, i)), slice(*self.window.places(1, j))
                shifted.append(products[:, rows, columns, rows, columns])
        return functools.reduce(torch.add, shifted).reshape(size, self.left.shape[1], -1)

    def _groups(self) -> int:
        """Sums that are made one beside the other: enough to keep a GPU busy, and none too long."""
        size, positions, p = self.left.shape
        tiles = -(-p // 128) * -(-self.input.shape[3] // 128) * self.window.kernel[0] * self.window.kernel[1]
        fewest = -(-size // max(1, longest(self.precision, positions) // positions))
        return min(size, max(fewest, _PROGRAMS // tiles))

    def weighted_sum(self, weights: Tensor, keep: Tensor) -> Tensor:
        """Weights on the gradient at the output; dropped examples are not read."""
        if self.precision == "tf32":
            total: Tensor = torch.ops.clipwise.strip_sum(self.left, self.input, weights.float(), keep, *self.window)
            return total.movedim(-1, 1).reshape(self.shape)
        left = select(self.left.float() * weights.to(torch.float32)[:, None, None], keep, own=True)
        left = left.to(self.left.dtype)
        each = -(-len(left) // self._groups())
        parts: Tensor = torch.ops.clipwise.patch_products(left, self.input, keep, *self.window, each, True)
        return parts.sum(0).movedim(-1, 1).reshape(self.shape)
