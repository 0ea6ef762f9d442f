"""One private run on several processes, launched with torchrun: replicated weights, or sharded by `fully_shard`.

    record i belongs to rank i mod ranks; each rank flips its own secret coins for its own records
    each rank ─► clipped sum of its share ─► summed over ranks (reduce-scattered to the shards, if there are any)
    rank 0 charges the ledger, on disk ─► the others are told ─► all draw the same noise from one shared key

The union of the shares is one Poisson batch of the plan, so σ, q and ε are those of a run on one process. Noise is
addressed by element, so that sharding changes nothing. Keys and flags go over a gloo group of their own, on the CPU.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from .._types import LossFn
from ..clipping import trainable
from ..engine.preflight import PreflightReport, Probe, preflight_dataset
from ..errors import ParameterMismatch, PlanMismatch, RankFailed, UnsupportedOp
from ..ledger import Ledger
from ..noise import Mode, NoiseSource
from ..plan import Plan
from ..privatize import privatize as privatize_with
from ..ranks import Alone, Ranks, T
from ..sampling import Collate, as_dataset, collate_for
from ..training import PrivateTraining

BUCKET = 2**23  # elements that are summed over ranks in one message


@dataclass(frozen=True)
class _Checked:
    """With what a model was checked."""

    loss_fn: LossFn
    collate_fn: Collate | None
    op_rules: Any
    modes: list[bool]
    names: list[str]


_CHECKED: weakref.WeakKeyDictionary[nn.Module, _Checked] = weakref.WeakKeyDictionary()


def privatize(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, loss_fn: LossFn | None = None, **options: Any
) -> PrivateTraining:
    """`clipwise.privatize` for a run on all processes of `torch.distributed`; call it on every rank.

    Guarantee: that of one process. Batches of all ranks together are one Poisson batch; one charge is on disk, on rank
    0, before any rank draws noise; a rank that fails or dies stops the run, charged.

    Replicated weights: give the plain module, not DistributedDataParallel; it gets the weights of rank 0. Sharded ones:
    call `check(model, loss_fn, dataset)` first, then `fully_shard`, make the optimizer, and come here.
    The plan speaks of the whole run (expected_batch_size over all ranks); `microbatch` of one rank.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RankFailed(
            "No process group: launch with `torchrun --nproc-per-node 2 train.py`, and call "
            "torch.distributed.init_process_group() before privatize()."
        )
    if options.get("noise") == "fast":
        raise UnsupportedOp("noise='fast' draws differently on every rank; several processes need noise='secure'.")
    shards = _shards(model)
    ranks: Ranks = _Sharded(shards, _checked(model, loss_fn, options)) if shards else _Replicated(model)
    return privatize_with(model, optimizer, plan, loss_fn, ranks=ranks, **options)


def _checked(model: nn.Module, loss_fn: LossFn | None, options: Mapping[str, Any]) -> _Checked | None:
    """With what a sharded model was checked; None where the user goes without a check, and the ledger says so."""
    refused = {"compile": True, "noise": "hardened", "engine": "vmap", "sampling": "asserted"}
    if wrong := [f"{name}={value!r}" for name, value in refused.items() if options.get(name) == value]:
        raise UnsupportedOp(f"A sharded model does not take {wrong[0]} yet.")
    if loss_fn is None or options.get("preflight", True) is False:
        return None
    found = _CHECKED.get(model)
    if found is None or found.names != list(trainable(model)):
        raise UnsupportedOp(
            "A sharded model cannot be checked any more. Before fully_shard(model), call "
            "clipwise.integrations.distributed.check(model, loss_fn, dataset)."
        )
    if found.loss_fn is not loss_fn or found.op_rules != options.get("op_rules"):
        raise UnsupportedOp("distributed.check() was given another loss_fn or other op_rules than privatize().")
    return found


def check(
    model: nn.Module,
    loss_fn: LossFn,
    dataset: Any,
    *,
    collate_fn: Collate | None = None,
    device: torch.device | str | None = None,
    probe: Any = None,
    op_rules: Mapping[Any, Any] | None = None,
) -> PreflightReport:
    """The preflight, for a model that is to be sharded: before `fully_shard`, on every rank, on made-up records."""
    report = preflight_dataset(
        model,
        loss_fn,
        as_dataset(dataset),
        Probe(records=probe),
        collate_for(dataset, collate_fn),
        device,
        {"op_rules": op_rules},
    )
    modes = [module.training for module in model.modules()]
    _CHECKED[model] = _Checked(loss_fn, collate_fn, op_rules, modes, list(trainable(model)))
    return report


def _shards(model: nn.Module) -> dict[str, DTensor]:
    """The sharded parameters; refuses what is sharded in another way than by rows over all ranks."""
    found: dict[str, DTensor] = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    for name, p in found.items():
        if p.device_mesh.size() != dist.get_world_size() or tuple(p.placements) != (Shard(0),):
            raise UnsupportedOp(
                f"Parameter {name} is laid out as {p.placements} over {p.device_mesh.size()} ranks. Shard it along its "
                "first axis over all ranks, as fully_shard(model) does."
            )
    if found and (whole := sorted(trainable(model).keys() - found.keys())):
        raise ParameterMismatch(
            f"Parameters {', '.join(whole[:5])} are not sharded, others are: shard the whole model."
        )
    return found


class _Together(Alone):
    """What replicated and sharded runs share: rank 0 leads, over a gloo group of their own."""

    def __init__(self) -> None:
        self._control = dist.new_group(backend="gloo")
        self.share = (dist.get_rank(), dist.get_world_size())

    @property
    def _first(self) -> bool:
        return self.share[0] == 0

    def _told(self, numbers: list[int]) -> list[int]:
        """The numbers of rank 0."""
        sent = torch.tensor(numbers, dtype=torch.int64)
        dist.broadcast(sent, 0, group=self._control)
        return sent.tolist()

    def same(self, what: str, facts: str) -> None:
        """By their fingerprints."""
        mine = torch.frombuffer(bytearray(hashlib.blake2b(facts.encode(), digest_size=32).digest()), dtype=torch.uint8)
        all_ = [torch.empty_like(mine) for _ in range(self.share[1])]
        dist.all_gather(all_, mine, group=self._control)
        if any(not torch.equal(mine, other) for other in all_):
            raise PlanMismatch(f"The ranks do not agree about {what}. Every rank must be given the same.")

    def lead(self, action: Callable[[], T]) -> T:
        """Run on rank 0; all get its answer, and all fail if it fails."""
        if not self._first:
            fine, answer = self._told([0, 0])
            if not fine:
                raise RankFailed("Rank 0 failed; its message says why.")
            return answer  # type: ignore[return-value]
        try:
            answer_here = action()
        except BaseException:
            self._told([0, 0])
            raise
        self._told([1, int(answer_here)])
        return answer_here

    def noise(self, mode: Mode, seed: int | None) -> NoiseSource:
        """Rank 0 draws the key; the others get it over the control group."""
        source = NoiseSource(mode, seed)
        key = torch.frombuffer(bytearray(source.shared_key() if self._first else bytes(32)), dtype=torch.uint8)
        dist.broadcast(key, 0, group=self._control)
        return source if self._first else NoiseSource(mode, seed, bytes(key.tolist()))

    def ledger(self, opened: Callable[[], Ledger], mirror: Callable[[], Ledger]) -> Ledger:
        """The file on rank 0; on the others a mirror in memory that counts along."""
        here: list[Ledger] = []

        def open_here() -> int:
            here.append(opened())
            return here[0].charges

        charges = self.lead(open_here)
        looks = self._told([here[0].looks if here else 0])[0]
        if here:
            return here[0]
        followed = mirror()
        followed.charges, followed.looks = charges, looks
        return followed

    def charge(self, commit: Callable[[], int]) -> int:
        """Rank 0 first: nobody draws noise before its charge is on disk."""
        number = self.lead(commit)
        if not self._first and commit() != number:
            raise RankFailed("This rank has counted other charges than rank 0: the run is over.")
        return number

    def agree(self, fine: bool) -> bool:
        """The least of all answers; False if a rank is gone."""
        flag = torch.tensor([int(fine)])
        try:
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=self._control)
        except RuntimeError:
            return False
        return bool(flag.item())

    def examples(self, here: int) -> int:
        """The sum of all."""
        return int(self.observed(torch.tensor([here])).item())

    def observed(self, seen: Tensor) -> Tensor:
        """Counts are whole numbers: their sum does not round."""
        summed = seen.detach().cpu().clone()
        dist.all_reduce(summed, group=self._control)
        return summed.to(seen.device)


class _Replicated(_Together):
    """Every rank holds all weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        with torch.no_grad():
            for x in [*model.parameters(), *model.buffers()]:
                dist.broadcast(x.detach(), 0)

    def total(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """In few messages, each the sum of many tensors end to end."""
        for bucket in _buckets(sums.values()):
            flat = torch.cat([x.reshape(-1) for x in bucket])
            dist.all_reduce(flat)
            for x, part in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
                x.copy_(part.view(x.shape))
        return sums


def _buckets(given: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one kind, up to BUCKET elements together."""
    found: list[list[Tensor]] = []
    filled: dict[Any, int] = {}
    for x in given:
        kind = (x.dtype, x.device)
        at = filled.get(kind)
        if at is None or sum(y.numel() for y in found[at]) + x.numel() > BUCKET:
            found.append([])
            at = filled[kind] = len(found) - 1
        found[at].append(x)
    return found


class _Sharded(_Together):
    """Every rank holds rows of every parameter (FSDP2)."""

    in_step = True

    def __init__(self, shards: dict[str, DTensor], checked: _Checked | None) -> None:
        super().__init__()
        self._shards, self._checked = shards, checked
        self.offsets = {name: self._rows(p)[0] * (p.numel() // max(p.shape[0], 1)) for name, p in shards.items()}

    def _rows(self, p: Tensor) -> tuple[int, int]:
        """First and last row of this rank: as many as `chunk` would give it."""
        each = -(-p.shape[0] // self.share[1])
        return min(self.share[0] * each, p.shape[0]), min((self.share[0] + 1) * each, p.shape[0])

    def as_checked(self, collate_fn: object, modes: list[bool]) -> None:
        """The collate function and the modes that `check` saw."""
        if self._checked is not None and (self._checked.collate_fn, self._checked.modes) != (collate_fn, modes):
            raise UnsupportedOp(
                "batches() was given another collate_fn than distributed.check(), or model.train() or model.eval() was "
                "called in between: what was checked is not what would run."
            )

    def rounds(self, microbatches: int) -> int:
        """As many as the busiest rank has: every forward pass gathers weights from all."""
        most = torch.tensor([microbatches])
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._control)
        return int(most.item())

    def total(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """Each rank gets the rows that it holds."""
        return {name: self._scattered(self._shards[name], x) for name, x in sums.items()}

    def _scattered(self, p: DTensor, x: Tensor) -> Tensor:
        each = -(-p.shape[0] // self.share[1])
        padded = torch.zeros(each * self.share[1], *p.shape[1:], dtype=x.dtype, device=x.device)
        padded[: len(x)] = x
        mine = torch.empty_like(padded[:each])
        dist.reduce_scatter_tensor(mine, padded)
        first, last = self._rows(p)
        return mine[: last - first].contiguous()

    def as_gradient(self, parameter: nn.Parameter, value: Tensor) -> Tensor:
        """This rank's rows of it."""
        p: Any = parameter
        return DTensor.from_local(value, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())

    def whole(self, x: Tensor) -> Tensor:
        """Gathered from all ranks."""
        return x.full_tensor() if isinstance(x, DTensor) else x

    def part(self, whole: Tensor, like: Tensor) -> Tensor:
        """This rank's rows."""
        if not isinstance(like, DTensor):
            return whole
        first, last = self._rows(like)
        rows = whole[first:last].to(like.device, like.dtype).contiguous()
        return self.as_gradient(like, rows)  # type: ignore[arg-type]
