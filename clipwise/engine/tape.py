"""The tape: watches a forward pass and records every use of a trained parameter.

A TorchFunctionMode sees each op. A tensor is a parameter, derived from parameters alone, data (it
depends on the batch) or a constant. Where parameter and data meet, the op runs with the parameter
detached, and the tape keeps the op's input and the gradient edge of its output. One backward pass to
all edges then gives every per-example gradient. Nothing hangs on tensors, modules or parameters, and
`p.grad` is untouched.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from ..batch import map_tensors, tensors
from ..errors import ChangedInput, LossShape, ParameterMismatch, UnrecordedGradient, UnsupportedOp
from .contributions import Contribution, Dense
from .derived import CASTS, Derived, Source, is_random, kind_of, op_name
from .gradients import Gradients
from .ops import OP_RULES, Call, OpRule, bind, check_batch_norm
from .reduce import Reduced, reduce_uses

_ELEMENTWISE = (
    "add sub rsub mul multiply div divide true_divide pow maximum minimum where lerp addcmul addcdiv "
    "gt lt ge le eq ne atan2 hypot copysign logaddexp fmod remainder "
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ "
    "__itruediv__ __div__ __rdiv__ __pow__ __rpow__ __gt__ __lt__ __ge__ __le__ __eq__ __ne__ add_ sub_ mul_ div_"
).split()
_BROADCASTS = frozenset(
    getattr(owner, name) for owner in (torch, torch.Tensor) for name in _ELEMENTWISE if hasattr(owner, name)
)
_MATMULS = frozenset((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__))
_BATCH_NORMS = {
    torch.nn.functional.batch_norm: "input running_mean running_var weight bias training momentum eps".split(),
    torch.batch_norm: "input weight bias running_mean running_var training momentum eps".split(),
}
_INPLACE = frozenset({"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__iand__"})

Trained = Source | Derived


class _Tap(torch.autograd.Function):
    """Gives an output that needs no gradient a place in the graph; the same tensor, so in-place ops still work."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor) -> Tensor:
        ctx.mark_dirty(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        return None, None


class _Unview(torch.autograd.Function):
    """The same memory, but no longer a view.

    An in-place op on a view rewrites the history of its base, and an edge recorded before it would lie off
    the path: its gradient would be missed in silence (linear with a bias on a 3-D input returns a view).
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


@dataclass(frozen=True)
class _Record:
    """One use: the edge whose gradient is needed, and how it becomes contributions."""

    edge: GradientEdge | Tensor
    targets: tuple[Trained, ...]
    contributions: Callable[[Tensor], Iterator[tuple[Trained, Contribution]]]


class Tape(TorchFunctionMode):
    """Records one forward pass of `size` examples. Use: `with tape: losses = …`, then `tape.backward(losses)`.

    The engine knows no clip norm and no noise: it gives norms, and sums for weights.
    """

    def __init__(self, model: nn.Module, data: Any, size: int, op_rules: Mapping[Any, OpRule] | None = None) -> None:
        """`data` is the batch: whatever is computed from its tensors is data too."""
        super().__init__()
        self.size = size
        self._parameters = {id(p): (name, p) for name, p in model.named_parameters()}
        self._rules = {**OP_RULES, **(op_rules or {})}
        self._sources: dict[int, Source] = {}
        self._derived: dict[int, Derived] = {}
        self._data: dict[int, weakref.ref[Tensor]] = {}
        self._records: list[_Record] = []
        self._anchor: dict[torch.device, Tensor] = {}
        self._blind: set[str] = set()  # parameters that met data under no_grad
        for x in tensors(data):
            self._mark(x)

    # -- what a tensor is ---------------------------------------------------------------------------

    def _mark(self, out: Any) -> None:
        for x in tensors(out):
            self._data[id(x)] = weakref.ref(x)

    def _is_data(self, x: Tensor) -> bool:
        known = self._data.get(id(x))
        return known is not None and known() is x

    def _trained(self, x: Any) -> Trained | None:
        if isinstance(x, nn.Parameter):
            return self._source(x) if x.requires_grad else None
        found = self._derived.get(id(x))
        return found if found is not None and found.value is x else None

    def _source(self, parameter: nn.Parameter) -> Source:
        source = self._sources.get(id(parameter))
        if source is None:
            if id(parameter) not in self._parameters:
                raise ParameterMismatch(
                    f"A trainable parameter of shape {tuple(parameter.shape)} is used in the loss but does not belong "
                    "to the model, so it would not be clipped. Make its module a part of the model, or freeze it."
                )
            source = self._sources[id(parameter)] = Source(self._parameters[id(parameter)][0], parameter)
        return source

    # -- what an op does ----------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See one op."""
        kwargs = kwargs or {}
        given = list(tensors((args, kwargs)))
        data = any(self._is_data(x) for x in given)
        if data and func in _BATCH_NORMS:
            check_batch_norm(dict(zip(_BATCH_NORMS[func], args, strict=False)) | kwargs)
        trained = [t for t in map(self._trained, given) if t is not None]
        if not trained or not torch.is_grad_enabled():
            out = func(*args, **kwargs)
            if data:
                self._blind.update(name for t in trained for name in t.names)
        elif not data:
            return self._derive(func, args, kwargs, trained)
        elif (rule := self._rules.get(func)) is not None and not self._wide_matmul(func, trained):
            out = self._record(func, rule, args, kwargs)
        else:
            out = self._broadcast(func, args, kwargs, trained)
        if data:
            self._mark(out)
            if _is_inplace(func) and args:
                self._mark(args[0])
        return out

    def _wide_matmul(self, func: Any, trained: list[Trained]) -> bool:
        return func in _MATMULS and any(t.value.dim() > 2 for t in trained)

    def _derive(self, func: Any, args: Any, kwargs: Any, trained: list[Trained]) -> Any:
        """Parameters and constants only: the result is a derived parameter."""
        name = op_name(func)
        if _is_inplace(func):
            raise UnsupportedOp(
                f"{name} changes {_names(trained)} in place during the forward pass, which cannot be undone per "
                "example. Compute a new tensor instead."
            )
        narrow = any(t.value.dtype != t.shadow.dtype for t in trained)
        if narrow and is_random(name):
            raise UnsupportedOp(f"{name} of {_names(trained)} is random: train this parameter in float32.")
        if name in CASTS and len(trained) == 1 and trained[0].value.is_floating_point():
            value = func(*self._with(args, "value"), **self._with(kwargs, "value"))
            return self._keep(value.detach(), trained[0].shadow, trained, name)
        shadow = func(*self._with(args, "shadow"), **self._with(kwargs, "shadow"))
        if not any(x.requires_grad for x in tensors(shadow)):
            return func(*args, **kwargs) if narrow else shadow
        if not narrow:
            return map_tensors(shadow, lambda s: self._keep(s.detach(), s, trained, name) if s.requires_grad else s)
        value = func(*self._with(args, "value"), **self._with(kwargs, "value"))
        shadows = list(tensors(shadow))
        return map_tensors(value, lambda v: self._keep(v, shadows.pop(0), trained, name))

    def _keep(self, value: Tensor, shadow: Tensor, trained: list[Trained], name: str) -> Tensor:
        sources = {id(s): s for t in trained for s in (t.sources if isinstance(t, Derived) else [t])}
        derived = Derived(value, shadow, list(sources.values()), kind_of(name, trained, value))
        self._derived[id(value)] = derived
        return value

    def _with(self, tree: Any, form: str) -> Any:
        """Arguments with parameters replaced by their detached values, or by their shadows."""

        def swap(x: Tensor) -> Tensor:
            trained = self._trained(x)
            return x if trained is None else getattr(trained, form)

        return map_tensors(tree, swap)

    def _record(self, func: Any, rule: OpRule, args: Any, kwargs: Any) -> Tensor:
        """Parameter meets data in an op with a rule."""
        given = bind(rule, args, kwargs)
        targets = {name: t for name, x in given.items() if (t := self._trained(x)) is not None}
        name = op_name(func)
        if not targets.keys() <= rule.parameters:
            wrong = [targets[n] for n in targets.keys() - rule.parameters]
            raise _no_rule(name, wrong, "as an argument that its rule does not train")
        values = {n: targets[n].value if n in targets else x for n, x in given.items()}
        call = Call(name, values, frozenset(targets), self.size)
        rule.check(call)
        out = func(*self._with(args, "value"), **self._with(kwargs, "value"))
        out = self._tapped(out)
        kept = {n: x.detach() if isinstance(x, Tensor) else x for n, x in values.items()}
        versions = {n: (x, x._version) for n, x in kept.items() if n in rule.keep and isinstance(x, Tensor)}
        call = Call(name, kept, frozenset(targets), self.size)

        def contributions(grad: Tensor) -> Iterator[tuple[Trained, Contribution]]:
            for n, (x, version) in versions.items():
                if x._version != version:
                    raise ChangedInput(
                        f"The {n} of {name} (parameter {_names(list(targets.values()))}) was changed in place after "
                        "the op had used it; plain PyTorch raises here too. Replace the in-place op by an ordinary one."
                    )
            for n, use in rule.uses(call, grad):
                yield targets[n], use

        self._records.append(_Record(get_gradient_edge(out), tuple(targets.values()), contributions))
        return out

    def _tapped(self, out: Tensor) -> Tensor:
        if out._is_view():
            out = _Unview.apply(out)
        if out.requires_grad:
            return out
        if out.device not in self._anchor:
            self._anchor[out.device] = torch.zeros((), device=out.device, requires_grad=True)
        tapped: Tensor = _Tap.apply(out, self._anchor[out.device])
        return tapped

    def _broadcast(self, func: Any, args: Any, kwargs: Any, trained: list[Trained]) -> Any:
        """Give every example its own copy of the parameter along the first axis, and let autograd do the rest.

        Right where the op broadcasts (elementwise ops, batched matmul), and where the parameter was already
        expanded over the batch (stride 0), whatever the op.
        """
        name, batched = op_name(func), func in _BROADCASTS or func in _MATMULS
        others = [x for x in tensors((args, kwargs)) if self._trained(x) is None]
        dims = max(x.dim() for x in others + [t.value for t in trained])
        rows = max((x.shape[0] for x in others if x.dim() == dims), default=0)

        def copies(x: Tensor) -> Tensor:
            target = self._trained(x)
            if target is None:
                return x
            value = target.value
            if batched and rows % self.size == 0 and rows:
                value = value.reshape((1,) * (dims - value.dim()) + tuple(value.shape))
                if value.shape[0] == 1:
                    return self._leaf(target, value.expand(rows, *value.shape[1:]))
            if value.dim() and value.shape[0] == self.size and (value.stride(0) == 0 or self.size == 1):
                return self._leaf(target, value)
            raise _no_rule(name, [target], f"of shape {tuple(target.value.shape)} together with data")

        return func(*map_tensors(args, copies), **map_tensors(kwargs, copies))

    def _leaf(self, target: Trained, value: Tensor) -> Tensor:
        leaf = value.detach().requires_grad_()
        if self.size > 1 and leaf.shape == target.value.shape:
            # Expanded over the batch: all rows are one row, and example i reaches it through row i alone.
            target = self._derived[id(self._keep(target.value[0], target.shadow[0], [target], "select"))]
        shape = target.value.shape

        def contributions(grad: Tensor) -> Iterator[tuple[Trained, Contribution]]:
            rows = grad.reshape(self.size, -1, *grad.shape[1:]).sum(1)
            yield target, Dense(rows.reshape(self.size, *shape))

        self._records.append(_Record(leaf, (target,), contributions))
        return leaf

    # -- afterwards ---------------------------------------------------------------------------------

    def backward(self, losses: Tensor) -> Gradients:
        """One backward pass; then every parameter's per-example gradient, in its cheapest form."""
        check_losses(losses, self.size)
        grads = self._gradients(losses)
        self._check_blind()
        parameters = {name: p for name, p in self._parameters.values() if p.requires_grad}
        left = Counter(name for record in self._records for t in record.targets for name in t.names)
        uses: dict[str, list[Contribution]] = {}
        reduced: dict[str, Reduced | None] = dict.fromkeys(parameters)
        derived: dict[int, tuple[Derived, list[Contribution]]] = {}

        def done(names: list[str]) -> None:
            """After a parameter's last use: reduce it at once, which frees what the uses hold."""
            for name in names:
                left[name] -= 1
                if left[name] == 0 and name in uses:
                    reduced[name] = reduce_uses(uses.pop(name), parameters[name].shape)

        for i in reversed(range(len(grads))):
            record, grad = self._records.pop(), grads[i]
            grads[i] = None
            for target, use in () if grad is None else record.contributions(grad):
                if isinstance(target, Derived) and (direct := target.as_source(use)) is not None:
                    target, use = direct
                if isinstance(target, Source):
                    uses.setdefault(target.name, []).append(use)
                else:
                    left.update(target.names)  # to be pushed back below
                    derived.setdefault(id(target), (target, []))[1].append(use)
            for target in record.targets:
                done(target.names)
        for node, given in derived.values():
            for source, use in node.push_back(given):
                uses.setdefault(source.name, []).append(use)
            for _ in given:
                done(node.names)
        return Gradients(losses.detach(), reduced, parameters)

    def _check_blind(self) -> None:
        """A parameter used under no_grad alone is frozen, or hidden by reentrant checkpointing: never guess."""
        recorded = {name for record in self._records for t in record.targets for name in t.names}
        if hidden := sorted(self._blind - recorded):
            raise UnrecordedGradient(
                f"Parameter(s) {', '.join(hidden[:5])} are used under torch.no_grad() alone. If that is activation "
                "checkpointing, use use_reentrant=False or none; if they are not trained, freeze them with "
                "requires_grad_(False)."
            )

    def _gradients(self, losses: Tensor) -> list[Tensor | None]:
        """Gradients at all recorded edges, and the proof that no parameter was reached by another way."""
        if not losses.requires_grad:
            return [None] * len(self._records)
        named = [(name, p) for name, p in self._parameters.values() if p.requires_grad]
        leaves = named + [(s.name, s.shadow) for s in self._sources.values()]
        before = {name: p.grad for name, p in named}
        edges = [record.edge for record in self._records]
        wanted: Any = [*edges, *(x for _, x in leaves)]
        found = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
        missed = {name for (name, _), g in zip(leaves, found[len(edges) :], strict=True) if g is not None}
        missed |= {name for name, p in named if p.grad is not before[name]}
        if missed:
            raise UnrecordedGradient(
                f"Parameter(s) {', '.join(sorted(missed))} got a gradient by a way the tape did not see (a scripted or "
                "compiled function, a custom autograd.Function, activation checkpointing, or an in-place write). It "
                "would not be clipped. Use plain PyTorch ops there, or engine='vmap'."
            )
        return list(found[: len(edges)])


def check_losses(losses: Any, size: int) -> None:
    """One number per example, or refuse."""
    if not isinstance(losses, Tensor) or losses.shape != (size,):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise LossShape(
            f"loss_fn must return one loss per example, shape ({size},), but gave {shape}. A mean or sum over the "
            "batch hides the examples from clipping. Use reduction='none', and average over positions, not examples."
        )


def _names(trained: list[Trained]) -> str:
    return ", ".join(sorted({name for t in trained for name in t.names}))


def _no_rule(op: str, trained: list[Trained], how: str) -> UnsupportedOp:
    name = _names(trained)
    module = name.rpartition(".")[0] or "the model itself"
    return UnsupportedOp(
        f"Parameter {name} (module {module}) enters the op {op!r} {how}, for which there is no per-example rule. "
        "Write it with supported ops, expand the parameter over the batch first, pass op_rules={…}, freeze it, or use "
        "engine='vmap'."
    )


def _is_inplace(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    return name in _INPLACE or (name.endswith("_") and not name.endswith("__"))
