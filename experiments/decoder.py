"""A small GPT: words in, the next word out at every place."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.mix(self.norm_a(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, width))
        out: Tensor = x + self.down(F.gelu(self.up(self.norm_b(x))))
        return out


class Decoder(nn.Module):
    """[b, t] of words to [b, t, words] of logits; a place sees itself and what is before it."""

    def __init__(self, words: int, length: int, width: int = 256, layers: int = 4, heads: int = 4) -> None:
        """From scratch."""
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        h = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        out: Tensor = self.head(self.norm(self.blocks(h)))
        return out
