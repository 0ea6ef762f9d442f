"""GPU kernels on a CPU, one program after the other: started by tests/test_kernels.py, with Triton's interpreter."""

from __future__ import annotations

import contextlib
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


class NoStream:
    def wait_stream(self, other):
        pass


@pytest.fixture(autouse=True)
def new_numpy(monkeypatch):
    """Triton 3.6 turns arrays of one element into numbers in a way that NumPy has given up."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """What the launchers ask of a GPU, besides kernels."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: NoStream())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: NoStream())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
