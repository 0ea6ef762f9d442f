"""The tape: watches a forward pass and records every use of a trained parameter.

A TorchFunctionMode sees each op. A tensor is a parameter, derived from parameters alone, data (it depends on the batch)
or a constant. Where parameter and data meet, the op runs with the parameter detached, and the tape keeps the op's input
and the gradient edge of its output. One backward pass to all edges then gives every per-example gradient. Nothing hangs
on tensors, modules or parameters, and `p.grad` is untouched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from ..batch import map_tensors, tensors
from ..errors import ChangedInput, UnrecordedGradient, UnsupportedOp
from .composites import COMPOSITES, per_example_einsum
from .contributions import Contribution, Dense
from .derived import CASTS, Derived, Origin, Source, is_random, kind_of, names_of, no_rule, op_name, shares_rows
from .each import each_example
from .edges import Record, Tap, Unview, name_now, not_seen
from .forbidden import check_op
from .gradients import Gradients, check_losses
from .kinds import BATCHED, BROADCASTS, JOINS, LOOKS_ONLY, MATMULS
from .op_rule import Call, OpRule
from .ops import OP_RULES, bind, works_on_rows
from .pooling import quicker
from .prepared import prepared, uses_of
from .products import exact_products
from .recompute import no_recompute
from .reduce import Paths, Reduced, reduce_uses
from .rows import no_complex, spread_rows
from .seen import Seen, is_inplace

Trained = Source | Derived


class Tape(TorchFunctionMode):
    """Records one forward pass of `size` examples. Use: `with tape: losses = …`, then `tape.backward(losses)`.

    The engine knows no clip norm and no noise: it gives norms, and sums for weights.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Any,
        size: int,
        op_rules: Mapping[Any, OpRule] | None = None,
        paths: Paths | None = None,
    ) -> None:
        """`data` is the batch; `paths` remembers, over a run, how each parameter is reduced."""
        super().__init__()
        self.size = size
        self._model = model
        self._parameters = {id(p): (name, p) for name, p in model.named_parameters()}
        self._sharded = any(hasattr(p, "placements") for _, p in self._parameters.values())  # then in pieces
        self._strange: dict[int, nn.Parameter] = {}  # whole ones before a module holds them; no gradient may reach them
        self._own_rules = op_rules or {}
        self._rules = {**OP_RULES, **self._own_rules}
        self._paths = {} if paths is None else paths
        self._sources: dict[int, Source] = {}
        self._derived: dict[int, Derived] = {}
        self._records: list[Record] = []
        self._anchor: dict[torch.device, Tensor] = {}
        self._blind: set[str] = set()  # parameters that met data under no_grad
        self._once: list[Any] = []
        self._seen = Seen(size)
        self._seen.mark(data)

    def _trained(self, x: Any) -> Trained | None:
        if type(x) is not Tensor and isinstance(x, nn.Parameter):
            return self._source(x) if x.requires_grad else None
        found = self._derived.get(id(x))
        return found if found is not None and found.value is x else None

    def _source(self, parameter: nn.Parameter) -> Source | None:
        source = self._sources.get(id(parameter))
        if source is None:
            known = self._parameters.get(id(parameter))
            name = known[0] if known is not None else name_now(self._model, parameter, self._sharded)
            if name is None:
                self._strange[id(parameter)] = parameter
                return None
            source = self._sources[id(parameter)] = Source(name, parameter, self._sharded)
        return source

    def __enter__(self) -> Any:
        self._once.append(no_recompute())
        self._once[-1].__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._once.pop().__exit__(None, None, None)

    # -- what an op does ----------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See one op."""
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        data = any(map(self._seen.is_data, given))
        trained = [t for t in map(self._trained, given) if t is not None]
        name = op_name(func)
        check_op(func, name, args, kwargs, data)
        unordered = data and self._seen.loses_order(name, args, kwargs, given)
        if not trained or not torch.is_grad_enabled():
            out = quicker(func)(*args, **kwargs)
            if data:
                self._blind.update(n for t in trained for n in t.names)
        elif not data:
            return self._derive(func, name, args, kwargs, trained)
        elif name in LOOKS_ONLY:
            if (first := self._trained(args[0])) is not None:
                return self._derive(func, name, args, kwargs, [first])
            out = func(*self._with(args, "value"), **self._with(kwargs, "value"))
        elif unordered:
            raise no_rule(name, trained, "together with rows that the data itself selected, in an unknown order")
        else:
            out = self._meet(func, name, args, kwargs, trained)
        if data:
            self._seen.after(func, args, out, unordered)
        return out

    def _meet(self, func: Any, name: str, args: Any, kwargs: Any, trained: list[Trained]) -> Any:
        """Parameter and data in one op."""
        arguments: list[Any] = list(args)
        no_complex(name, trained, (args, kwargs))
        if is_inplace(func) and self._trained(arguments[0]) is not None:
            raise no_rule(name, trained, "in place, on a tensor made of parameters")
        table = self._trained(arguments[0]) if arguments else None
        if table is not None and table.value.dim() == 2 and len(trained) == 1:  # w[ids], w.index_select(0, ids)
            rest = arguments[1:] if name == "__getitem__" else []
            if name == "index_select" and len(arguments) == 3 and arguments[1] == 0:
                rest = arguments[2:]
            if len(rest) == 1 and isinstance(rest[0], Tensor) and rest[0].dtype in (torch.int64, torch.int32):
                return self._record(F.embedding, self._rules[F.embedding], (rest[0], arguments[0]), {})
        if (written_out := COMPOSITES.get(func)) is not None and func not in self._own_rules:
            with self:
                return written_out(*args, **kwargs)
        if func is torch.einsum:
            return per_example_einsum(args, self.size, names_of(trained), self._copy_of)
        wide_matmul = func in MATMULS and any(t.value.dim() > 2 for t in trained)
        if (rule := self._rules.get(func)) is not None and not wide_matmul:
            return self._record(func, rule, args, kwargs)
        if func not in BROADCASTS | MATMULS | JOINS | BATCHED:
            before = len(self._records)
            out = each_example(func, name, args, kwargs, self.size, self._seen.is_data, self._copy_of)
            if out is not None:
                return out
            del self._records[before:]
        return self._broadcast(func, args, kwargs, trained)

    def _derive(self, func: Any, name: str, args: Any, kwargs: Any, trained: list[Trained]) -> Any:
        """Parameters and constants only: the result is a derived parameter."""
        if is_inplace(func):
            raise UnsupportedOp(
                f"{name} changes {names_of(trained)} in place during the forward pass, which cannot be undone per "
                "example. Compute a new tensor instead."
            )
        no_complex(name, trained, (args, kwargs))
        narrow = any(t.value.dtype != t.shadow.dtype for t in trained)
        if narrow and is_random(name):
            raise UnsupportedOp(f"{name} of {names_of(trained)} is random: train this parameter in float32.")
        if name in CASTS and len(trained) == 1 and trained[0].value.is_floating_point():
            value = func(*self._with(args, "value"), **self._with(kwargs, "value"))
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            shadow = trained[0].shadow
            if name in ("contiguous", "clone") or "memory_format" in kwargs:  # what comes after may look at strides
                shadow = torch.empty_like(value, dtype=shadow.dtype).copy_(shadow)
            return self._keep(value.detach(), shadow, trained, name)
        shadow = func(*self._with(args, "shadow"), **self._with(kwargs, "shadow"))
        no_complex(name, trained, shadow)
        if not any(x.requires_grad for x in tensors(shadow)):
            return func(*self._with(args, "value"), **self._with(kwargs, "value")) if narrow else shadow
        origin = self._origin(func, args, kwargs)
        if not narrow:
            keep = lambda s: self._keep(s.detach(), s, trained, name, origin) if s.requires_grad else s  # noqa: E731
            return map_tensors(shadow, keep)
        value = func(*self._with(args, "value"), **self._with(kwargs, "value"))
        shadows = tensors(shadow)
        return map_tensors(value, lambda v: self._keep(v, shadows.pop(0), trained, name, origin))

    def _keep(
        self, value: Tensor, shadow: Tensor, trained: list[Trained], name: str, origin: Origin | None = None
    ) -> Tensor:
        sources = {id(s): s for t in trained for s in (t.sources if isinstance(t, Derived) else [t])}
        shared = shares_rows(name, trained, value)
        kind = kind_of(name, trained, value)
        self._derived[id(value)] = Derived(value, shadow, list(sources.values()), kind, shared, origin)
        return value

    def _origin(self, func: Any, args: Any, kwargs: Any) -> Origin | None:
        """For an op with a rule on a constant: its contributions, should the result be used row by row."""
        rule = self._rules.get(func)
        if rule is None:
            return None
        given = bind(rule, args, kwargs)
        targets = {n: t for n, x in given.items() if (t := self._trained(x)) is not None}
        if not targets.keys() <= rule.parameters:
            return None
        values = {n: targets[n].value if n in targets else x for n, x in given.items()}
        call = Call(op_name(func), values, frozenset(targets), self.size)
        if not works_on_rows(rule, call):
            return None
        return lambda grad: ((targets[n], use) for n, use in rule.uses(call, grad))

    def _with(self, tree: Any, form: str) -> Any:
        """Arguments with parameters replaced by their detached values, or by their shadows."""

        def swap(x: Tensor) -> Tensor:
            trained = self._trained(x)
            if trained is not None:
                found: Tensor = getattr(trained, form)
                return found
            return x.float() if form == "shadow" and x.dtype in (torch.float16, torch.bfloat16) else x

        return map_tensors(tree, swap)

    def _record(self, func: Any, rule: OpRule, args: Any, kwargs: Any) -> Tensor:
        """Parameter meets data in an op with a rule."""
        given = bind(rule, args, kwargs)
        targets = {name: t for name, x in given.items() if (t := self._trained(x)) is not None}
        name = op_name(func)
        if not targets.keys() <= rule.parameters:
            wrong = [targets[n] for n in targets.keys() - rule.parameters]
            raise no_rule(name, wrong, "as an argument that its rule does not train")
        values = {n: targets[n].value if n in targets else x for n, x in given.items()}
        call = Call(name, values, frozenset(targets), self.size)
        rule.check(call)
        ready = prepared(rule, values)
        out = func(*self._with(args, "value"), **self._with(kwargs, "value")) if ready is None else ready.out
        if out.dim() == 0 or out.shape[0] % self.size:
            raise UnsupportedOp(
                f"{name} with parameter {names_of(list(targets.values()))} gives an output of "
                f"{out.dim()} axes, whose first axis does not run over the examples. Keep the batch axis first."
            )
        out = self._tapped(out)
        kept = {n: x.detach() if isinstance(x, Tensor) else x for n, x in (ready.values if ready else values).items()}
        versions = {n: (x, x._version) for n, x in kept.items() if n in rule.keep and isinstance(x, Tensor)}
        call = Call(name, kept, frozenset(targets), self.size)

        def contributions(grad: Tensor) -> Iterator[tuple[Trained, Contribution]]:
            for n, (x, version) in versions.items():
                if x._version != version:
                    raise ChangedInput(
                        f"The {n} of {name} (parameter {names_of(list(targets.values()))}) was changed in place after "
                        "the op had used it; plain PyTorch raises here too. Replace the in-place op by an ordinary one."
                    )
            yield from ((targets[n], use) for n, use in uses_of(rule, call, grad, ready))

        self._records.append(Record(get_gradient_edge(out), tuple(targets.values()), contributions))
        return out if ready is None else ready.shown(out)

    def _tapped(self, out: Tensor) -> Tensor:
        if out._is_view():
            out = Unview.apply(out)
        if out.requires_grad:
            return out
        if out.device not in self._anchor:
            self._anchor[out.device] = torch.zeros((), device=out.device, requires_grad=True)
        return Tap.apply(out, self._anchor[out.device])  # type: ignore[no-any-return]

    def _broadcast(self, func: Any, args: Any, kwargs: Any, trained: list[Trained]) -> Any:
        """Give every example its own copy of the parameter along the first axis, and let autograd do the rest.

        Right where the op broadcasts (elementwise ops, batched matmul), and, for a parameter that already has one
        row per example, in ops that work row by row.
        """
        aligned = func in BROADCASTS or func in MATMULS or func is F.scaled_dot_product_attention
        given = tensors((args, kwargs))
        others = [x for x in given if self._trained(x) is None and self._seen.is_data(x)]
        dims = max(x.dim() for x in given)
        along = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        joins = func in JOINS and along % (max(dims, 1) + (func is torch.stack)) != 0
        rows = max((x.shape[0] for x in others if x.dim() == dims and dims), default=0)

        def copies(x: Tensor) -> Tensor:
            target = self._trained(x)
            if target is None:
                return x
            value = target.value
            if aligned and rows and rows % self.size == 0:
                value = value.reshape((1,) * (dims - value.dim()) + tuple(value.shape))
                if value.shape[0] == 1:
                    return self._leaf(target, value.expand(rows, *value.shape[1:]), None)
            beside = any(x.dim() == dims and x.shape[0] == value.shape[0] for x in others)  # the same axis, in data
            row_by_row = (aligned or joins or func in BATCHED) and value.dim() == dims and beside
            made = value.shape[0] % self.size == 0  # a parameter's own rows are not the examples, whatever their number
            if row_by_row and made and isinstance(target, Derived) and target.kind == "other":
                return self._rows(target, value)
            raise no_rule(op_name(func), [target], f"of shape {tuple(target.value.shape)} together with data")

        return func(*map_tensors(args, copies), **map_tensors(kwargs, copies))

    def _copy_of(self, x: Tensor) -> Tensor | None:
        """A parameter once for every example [b, *shape]: each example reaches it through its own copy alone."""
        target = self._trained(x)
        return None if target is None else self._leaf(target, target.value.expand(self.size, *x.shape), None)

    def _rows(self, target: Derived, value: Tensor) -> Tensor:
        """A derived parameter with k rows per example: example i reaches it through rows i·k … i·k + k − 1 alone."""
        if target.shared_rows:  # all rows are one row
            kept = self._keep(target.value[0], target.shadow[0], [target], "select")
            return self._leaf(self._derived[id(kept)], value, None)
        return self._leaf(target, value, target.origin or (lambda grad: spread_rows(target, grad, self.size)))

    def _leaf(self, target: Trained, value: Tensor, uses: Origin | None) -> Tensor:
        leaf = value.detach().requires_grad_()

        def summed(grad: Tensor) -> Iterator[tuple[Trained, Contribution]]:
            rows = grad.reshape(self.size, -1, *grad.shape[1:]).sum(1)
            yield target, Dense(rows.reshape(self.size, *target.value.shape))

        self._records.append(Record(leaf, (target,), uses or summed))
        return leaf

    # -- afterwards ---------------------------------------------------------------------------------

    def backward(self, losses: Tensor) -> Gradients:
        """One backward pass; then every parameter's per-example gradient, in its cheapest form."""
        check_losses(losses, self.size)
        if self._trained(losses) is not None or not losses.requires_grad:
            raise UnrecordedGradient(
                "No loss depends on both the data and a trained parameter in a way that the tape can see: it went "
                "through numpy, a scripted function or no_grad, or the loss does not use the batch."
            )
        grads = self._gradients(losses)
        self._check_blind()
        with exact_products(losses.device):
            return self._reduced(losses, grads)

    def _reduced(self, losses: Tensor, grads: list[Tensor | None]) -> Gradients:
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
                    reduced[name] = reduce_uses(uses.pop(name), parameters[name].shape, name, self._paths)

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
        """A parameter used under no_grad alone is meant to be frozen, or hidden by mistake: never guess."""
        recorded = {name for record in self._records for t in record.targets for name in t.names}
        if hidden := sorted(self._blind - recorded):
            raise UnrecordedGradient(
                f"Parameter(s) {', '.join(hidden[:5])} are used under torch.no_grad() alone, so they get noise and no "
                "gradient. If they are not to be trained, freeze them with requires_grad_(False)."
            )

    def _gradients(self, losses: Tensor) -> list[Tensor | None]:
        """Gradients at all recorded edges, and the proof that no parameter was reached by another way."""
        named = [(name, p) for name, p in self._parameters.values() if p.requires_grad]
        leaves = named + [(s.name, x) for s in self._sources.values() for x in (s.made, s.parameter) if x is not None]
        leaves += [("of no module", p) for p in self._strange.values()]
        before = {name: p.grad for name, p in named}
        edges = [record.edge for record in self._records]
        wanted: Any = [*edges, *(x for _, x in leaves)]
        found = torch.autograd.grad(losses.sum(), wanted, allow_unused=True)
        missed = {name for (name, _), g in zip(leaves, found[len(edges) :], strict=True) if g is not None}
        missed |= {name for name, p in named if p.grad is not before[name]}
        if missed:
            raise not_seen(sorted(missed))
        return list(found[: len(edges)])
