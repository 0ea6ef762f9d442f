"""A BERT encoder with a linear head on the mean of its states, and MiniLM's weights for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .datasets import find

_NAMES = {  # ours: theirs
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "out": "attention.output.dense",
    "norm_a": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "norm_b": "output.LayerNorm",
}


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm_a, self.norm_b = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        b, t, width = x.shape
        q, k, v = (f(x).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = self.norm_a(x + self.out(mixed.transpose(1, 2).reshape(b, t, width)))
        out: Tensor = self.norm_b(x + self.down(F.gelu(self.up(x))))
        return out


class Encoder(nn.Module):
    """Tokens [b, t], padded with 0, to logits [b, classes]."""

    def __init__(self, words: int, length: int, width: int, layers: int, heads: int, inner: int, classes: int) -> None:
        """Without weights; `load_bert` brings them."""
        super().__init__()
        self.words, self.places, self.norm = (
            nn.Embedding(words, width),
            nn.Embedding(length, width),
            nn.LayerNorm(width, 1e-12),
        )
        self.layers = nn.ModuleList(_Layer(width, heads, inner) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def states(self, x: Tensor, layers: int | None = None) -> Tensor:
        """After the last layer, or after so many, [b, t, width]."""
        h: Tensor = self.norm(self.words(x) + self.places(torch.arange(x.shape[1], device=x.device)))
        seen = (x != 0)[:, None, None, :]
        for layer in self.layers[:layers]:
            h = layer(h, seen)
        return h

    def forward(self, x: Tensor) -> Tensor:
        """Logits from the last states."""
        return _read(self.head, self.states(x), x != 0)


def _read(head: nn.Linear, states: Tensor, seen: Tensor) -> Tensor:
    """The head on the mean over what is not padding."""
    here = seen.to(states.dtype)[:, :, None]
    out: Tensor = head((states * here).sum(dim=1) / here.sum(dim=1).clamp(min=1))
    return out


class LastLayer(nn.Module):
    """The last layer and the head of an encoder, whose other layers are frozen: takes what `before_last` gives."""

    def __init__(self, whole: Encoder) -> None:
        """Shares the weights."""
        super().__init__()
        self.layer, self.head = whole.layers[-1], whole.head

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, width + 1] to logits."""
        seen = x[:, :, -1] > 0
        states = self.layer(x[:, :, :-1].to(self.head.weight.dtype), seen[:, None, None, :])
        return _read(self.head, states, seen)


def before_last(model: Encoder, tokens: Tensor, rows: int = 512) -> Tensor:
    """States before the last layer, and a column that says what is no padding: [n, t, width + 1], in halves."""
    model.eval()
    found = torch.empty(*tokens.shape, model.head.in_features + 1, dtype=torch.float16)
    with torch.no_grad():
        for start in range(0, len(tokens), rows):
            x = tokens[start : start + rows]
            found[start : start + rows, :, :-1] = model.states(x, len(model.layers) - 1).half()
    found[:, :, -1] = (tokens != 0).half()
    return found


def load_bert(model: Encoder, theirs: dict[str, Tensor]) -> None:
    """Weights in the names of BERT, rounded to halves; the one kind of token that is used is added to the places."""
    found = {
        "words.weight": theirs["embeddings.word_embeddings.weight"],
        "places.weight": theirs["embeddings.position_embeddings.weight"]
        + theirs["embeddings.token_type_embeddings.weight"][0],
        "norm.weight": theirs["embeddings.LayerNorm.weight"],
        "norm.bias": theirs["embeddings.LayerNorm.bias"],
    }
    for i in range(len(model.layers)):
        for ours, name in _NAMES.items():
            for kind in ("weight", "bias"):
                found[f"layers.{i}.{ours}.{kind}"] = theirs[f"encoder.layer.{i}.{name}.{kind}"]
    own = {f"head.{name}": p for name, p in model.head.state_dict().items()}
    model.load_state_dict({name: p.half().float() for name, p in found.items()} | own)


def classifier(classes: int, folder: Path | None = None) -> Encoder:
    """MiniLM (or another BERT in `folder`), with a new head."""
    from safetensors.torch import load_file

    folder = folder or find("minilm", "config.json", "model.safetensors")
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    keys = ("vocab_size", "max_position_embeddings", "hidden_size", "num_hidden_layers", "num_attention_heads")
    words, length, width, layers, heads = (config[k] for k in keys)
    model = Encoder(words, length, width, layers, heads, config["intermediate_size"], classes)
    load_bert(model, load_file(folder / "model.safetensors"))
    return model
