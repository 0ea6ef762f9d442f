"""The recorded step as one compiled function: forward, backward, norms, weights and sums, traced once per shape.

    batch (padded to fixed rows), mask, a number
      ─► make_fx over the eager engine, on fake tensors ─► a graph of plain ops
      ─► torch.compile (Inductor) ─► on a GPU, one CUDA graph ─► sums, norms

Tracing sees shapes, never values: a model that branches on values is refused, not frozen in one of its branches.
Parameters and buffers are taken by reference, so that an optimizer's in-place updates are seen; when their memory,
the model's mode or the batch's shapes change, the step is traced again. A model that branches on Python's own random
numbers is found where two traces differ.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..batch import map_tensors, padded_slice, tensors
from ..errors import ClipwiseError, UnsupportedOp
from .probes import made_record
from .products import exact_products
from .state import Writes, attributes_kept, kept_state, restore_state
from .static import static, take_assumed

Step = Callable[[Any, Tensor, Tensor], tuple[dict[str, Tensor], Tensor]]
_SHOWN = (bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype, torch.device)  # whole by repr
_MOST = 8  # shapes, beyond which compiling costs more than it saves


class Compiled:
    """`step(data, mask, number)` compiled, for one model. `warm_up` holds the seconds that each shape took."""

    def __init__(self, model: nn.Module, step: Step, writes: Callable[[], Writes | None] = lambda: None) -> None:
        """`step` must be a pure function of its arguments and of the model's parameters and buffers.

        `writes` says what forward passes are known to write over with what was there.
        """
        self._model, self._step, self._writes = model, step, writes
        self._ready: dict[Any, Callable[..., Any]] = {}
        self.warm_up: list[float] = []

    def _key(self, data: Any, given: list[Tensor]) -> Any:
        shapes = tuple((x.shape, _steps(x), x.dtype, x.device) for x in given)
        held = (*self._model.parameters(), *self._model.buffers())
        memory = tuple((x.data_ptr(), x.requires_grad) for x in held)
        return shapes, _constants(data), memory, tuple(m.training for m in self._model.modules())

    def __call__(self, data: Any, mask: Tensor, number: float, keep: bool = True) -> tuple[dict[str, Tensor], Tensor]:
        """As the step itself. Without `keep`, a CUDA graph's results hold until the next call only."""
        device = next(self._model.parameters()).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # graphs are of the current device
            return self._called(data, mask, number, keep, device)

    def _called(
        self, data: Any, mask: Tensor, number: float, keep: bool, device: torch.device
    ) -> tuple[dict[str, Tensor], Tensor]:
        given = tensors(data)
        mask, threshold = mask.to(device), torch.full((), number, dtype=torch.float64, device=device)
        key = self._key(data, given)
        if key not in self._ready:
            self._ready[key] = self._compiled(data, given, mask, threshold)
        with torch.no_grad(), exact_products(device):
            names, values, norms = self._ready[key](*given, mask, threshold)
        if keep and device.type == "cuda":
            values, norms = [v.clone() for v in values], norms.clone()
        values = _apart(values)
        return dict(zip(names, values, strict=True)), norms

    def prepare(self, collate: Callable[[list[Any]], Any], like: Any, rows: int, device: Any) -> None:
        """Compile for `rows` records of the structure of `like`, on made-up values: before anything private is seen."""
        if self._ready:
            return
        made = collate([made_record(like, 1)])
        wide, _ = padded_slice(made, 0, 1, rows, 1)  # as private records will come, and lie in memory
        wide = map_tensors(wide, lambda x: x.to(device or x.device))
        self(wide, torch.ones(rows, dtype=torch.bool), 1.0)

    def _looked_at(self, data: Any, mask: Tensor, threshold: Tensor) -> None:
        """The same step as it is, once: constants that a tracer does not see have their values here."""
        before = kept_state(self._model)
        try:
            with torch.enable_grad():
                self._step(data, mask, threshold)
        finally:
            restore_state(self._model, before)

    def _compiled(self, data: Any, given: list[Tensor], mask: Tensor, threshold: Tensor) -> Callable[..., Any]:
        if len(self._ready) >= _MOST:
            raise UnsupportedOp(
                f"compile=True has met more than {_MOST} shapes of batches, or values in them that are no "
                "tensors, and each is compiled anew. Pad every batch to the same length in the collate function, make "
                "tensors of what differs between records, or leave compile=True out."
            )
        began = time.perf_counter()
        names: list[str] = []

        def flat(*inputs: Tensor) -> tuple[list[Tensor], Tensor]:
            rows = iter(inputs)
            batch = map_tensors(data, lambda x: next(rows))
            with static(), torch.enable_grad(), attributes_kept(self._model) as replaced:
                sums, norms = self._step(batch, next(rows), next(rows))
            known = self._writes()
            if frozen := sorted(set(replaced) - (known.same if known is not None else set())):
                raise UnsupportedOp(
                    f"The forward pass puts another tensor in the place of {', '.join(frozen[:5])}. A compiled step "
                    "keeps the one that was there. Write into it (add_, copy_), make it once, or do not compile."
                )
            names[:] = list(sums)
            return list(sums.values()), norms

        take_assumed()
        graph = _traced(flat, (*given, mask, threshold))
        if take_assumed():
            self._looked_at(data, mask, threshold)
        from .same_work import SameWork

        # what a fused kernel keeps in registers is rounded as if it were written: norms are those of the numbers summed
        on_gpu = mask.device.type == "cuda"
        options: Any = {"post_grad_custom_pre_pass": SameWork(on_gpu), "emulate_precision_casts": True}
        options["layout_optimization"] = on_gpu  # on a CPU it turns tensors forth and back
        if on_gpu:  # convolutions laid out as in ordinary training; each factor in one place only
            options |= {"force_layout_optimization": True, "comprehensive_padding": False}
        if any("strip_" in str(node.target) for node in graph.graph.nodes):
            options["realize_reads_threshold"] = 8  # so many a group norm's gradient reads: it is written once, cut
        backend: Callable[..., Any] = torch.compile(graph, fullgraph=True, dynamic=False, options=options)
        with warnings.catch_warnings(), torch.no_grad(), exact_products(mask.device):
            warnings.simplefilter("ignore")  # the compiler's own
            backend(*given, mask, threshold)
            if mask.device.type == "cuda":
                backend = _Replayed(backend, (*given, mask, threshold))
        self.warm_up.append(time.perf_counter() - began)
        order = tuple(names)
        return lambda *inputs: (order, *backend(*inputs))


def _steps(x: Tensor) -> tuple[int, ...]:
    """How it lies in memory; an axis of one entry lies anyhow."""
    return tuple(step for step, n in zip(x.stride(), x.shape, strict=True) if n > 1)


def _constants(data: Any) -> Any:
    """All of a batch that is no tensor, whole: a compiled step keeps it as it was."""
    if isinstance(data, Tensor):
        return Tensor
    if isinstance(data, np.ndarray) and not data.dtype.hasobject:
        return data.dtype.str, data.shape, data.tobytes()
    if isinstance(data, Mapping):
        return tuple((repr(key), _constants(item)) for key, item in data.items())
    if isinstance(data, (list, tuple)):
        return type(data), tuple(map(_constants, data))
    if is_dataclass(data) and not isinstance(data, type):
        return type(data), tuple(_constants(getattr(data, name)) for name in data.__dataclass_fields__)
    if isinstance(data, _SHOWN):
        return type(data), repr(data)
    raise UnsupportedOp(
        f"compile=True: a batch holds a {type(data).__name__}, which a compiled step would keep as it first was. Make "
        "a tensor of it in the collate function, or leave compile=True out."
    )


def _apart(values: list[Tensor]) -> list[Tensor]:
    """Each in memory of its own: equal sums of two parameters may share it, and noise is added in place."""
    seen: set[int] = set()
    apart = []
    for v in values:
        apart.append(v.clone() if v.data_ptr() in seen else v)
        seen.add(v.data_ptr())
    return apart


def _most_memory(run: Callable[[], Any]) -> int:
    """Bytes that are held at once while it runs. CUDA's count of the most so far begins anew."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before


def _one_piece(size: int, stream: torch.cuda.Stream, device: torch.device) -> torch.cuda.MemPool | None:
    """Memory for a graph that is captured on `stream`: pieces of many sizes would leave gaps. Where torch can do so."""
    settings = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
    if torch.cuda.get_allocator_backend() != "native" or "max_split_size_mb" in settings:  # a larger piece is not cut
        return None
    pool = torch.cuda.MemPool()
    with torch.cuda.stream(stream), torch.cuda.use_mem_pool(pool):
        torch.empty(size, dtype=torch.uint8, device=device)
    return pool


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """What cuBLAS works in lies in the graph's memory, and goes with it. Left to torch, it would keep that memory.

    As torch's own CUDA graphs do it, for all streams: another graph must not count on a workspace outside its memory.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class _Replayed:
    """A function of fixed shapes as one CUDA graph: inputs are copied to where it reads; it starts in one launch."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> None:
        self._inputs = [x.clone() for x in inputs]
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            most = _most_memory(lambda: function(*self._inputs))
        torch.cuda.current_stream().wait_stream(beside)
        torch.cuda.empty_cache()  # what the pass above has used; the graph has memory of its own
        self._pool = _one_piece(most, capture := torch.cuda.Stream(), inputs[-1].device)
        self._graph = torch.cuda.CUDAGraph()
        handle: Any = None if self._pool is None else self._pool.id
        with _own_workspaces(), torch.cuda.graph(self._graph, pool=handle, stream=capture):
            self._outputs = function(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Any:
        for place, x in zip(self._inputs, inputs, strict=True):
            place.copy_(x, non_blocking=True)
        self._graph.replay()
        return self._outputs


def _traced(flat: Callable[..., Any], inputs: tuple[Tensor, ...]) -> torch.fx.GraphModule:
    """A graph of plain ops, from shapes alone; twice, to see whether Python's own random numbers decide anything."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    by_value = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)

    graphs = []
    for _ in range(2):
        try:
            graphs.append(make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs))
        except ClipwiseError:
            raise
        except by_value as error:
            raise UnsupportedOp(
                "compile=True cannot trace this model: it decides by values of its data, which a compiled step "
                "would freeze. Leave compile=True out, or write the branch with torch.where."
            ) from error
    if graphs[0].code != graphs[1].code:
        raise UnsupportedOp(
            "compile=True cannot trace this model: two passes did different things, so Python's own random numbers or "
            "some state decide what runs. Leave compile=True out."
        )
    return graphs[1]
