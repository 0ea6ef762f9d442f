"""One rank of tests/test_distributed.py, and of benchmarks/several_gpus.py: `kind what …`; prints one line of JSON."""

from __future__ import annotations

import copy
import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import clipwise as cw
from clipwise.integrations import distributed

warnings.simplefilter("ignore")
ON_GPU = os.environ.get("CLIPWISE_DEVICE") == "cuda"
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()) if ON_GPU else "cpu"
KIND, WHAT, *REST = (*sys.argv[1:], "", "")[: max(2, len(sys.argv) - 1)]


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(11, 6), nn.Linear(6, 7), nn.ReLU(inplace=True), nn.LayerNorm(7), nn.Flatten(), nn.Linear(35, 3)
    )


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def data(n: int = 40):
    g = torch.Generator().manual_seed(1)
    return torch.randint(0, 11, (n, 5), generator=g), torch.randint(0, 3, (n,), generator=g)


def begin(model, plan, dataset, lr: float = 0.1, loss=losses, **options):
    model.to(DEVICE)
    if KIND == "sharded":
        distributed.check(model, loss, dataset, device=DEVICE)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    return distributed.privatize(model, optimizer, plan, loss, **options)


def full(x):
    return x.detach().full_tensor() if hasattr(x, "full_tensor") else x.detach()


def weights(model) -> str:
    flat = torch.cat([full(p).flatten() for p in model.parameters()])
    flat = flat.cpu()
    return " ".join(f"{v:.9g}" for v in (flat * torch.arange(1, len(flat) + 1)).double().cumsum(0)[::7].tolist())


def equal() -> dict:
    """A seeded run of one step at lr = 1: the weights' change is −(clipped sum + noise) / b, both known."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    dataset = data()
    threshold = cw.MinErrorThreshold(1.0)
    plan = cw.Plan(
        noise_multiplier=1.0, delta=1e-5, sampling_prob=0.5, steps=3, expected_batch_size=20, threshold=threshold,
        rule=cw.Abadi(),
    )  # fmt: skip
    torch.manual_seed(100 + rank)  # what the user draws differs between ranks; weights and noise must not
    model = build()
    training = begin(model, plan, dataset, lr=1.0, seed=5, microbatch=4)
    before = {n: full(p).clone() for n, p in model.named_parameters()}
    batches = training.batches(dataset, device=DEVICE)
    batch = next(batches)
    mine = torch.zeros(len(dataset[0]), dtype=torch.int64)
    if batch.data is not None:
        for row, label in zip(*batch.data, strict=True):  # which records: those of this rank's share that match
            found = [
                i for i in range(rank, 40, ranks)
                if torch.equal(dataset[0][i], row.cpu()) and dataset[1][i] == label.cpu() and not mine[i]
            ]  # fmt: skip
            mine[found[0]] = 1
    mine = mine.to(DEVICE)
    dist.all_reduce(mine)
    mine = mine.cpu()
    C = training.clip_norm
    sensitivity, sigma = training.sensitivity, plan.gradient_noise_multiplier
    summed = {}
    add = training._noise.add_

    def seen(values, *, stream, **options):
        if stream == "gradient":
            summed.update({n: v.clone() for n, v in values.items()})
        return add(values, stream=stream, **options)

    training._noise.add_ = seen
    training.step(batch)
    alone = build().to(DEVICE)
    union = tuple(x[mine.bool()].to(DEVICE) for x in dataset)
    expected = cw.clipped_sum(alone, losses, union, cw.Abadi(), C)
    source = cw.noise.NoiseSource(seed=5)
    noised = source.add_(
        {n: g.clone() for n, g in expected.grads.items()},
        sensitivity=sensitivity, noise_multiplier=sigma, sequence=1, stream="gradient",
    )  # fmt: skip
    noise_error = sum_error = 0.0
    for n, p in model.named_parameters():
        scale, start = float(expected.grads[n].abs().max()), training._ranks.offsets.get(n, 0)
        mine = expected.grads[n].flatten()[start : start + summed[n].numel()]
        if len(mine):
            sum_error = max(sum_error, float((summed[n].flatten() - mine).abs().max()) / scale)
        change = (before[n] - full(p)) * plan.expected_batch_size
        noise_error = max(noise_error, float((change - noised[n]).abs().max() / noised[n].abs().max()))
    for batch in batches:
        training.step(batch)
    return {"sum_error": sum_error, "noise_error": noise_error, "clip_norm": training.clip_norm, **ended(training)}


def ended(training) -> dict:
    found = weights(training.model)
    return {"weights": found, "epsilon": training.epsilon, "charges": training.ledger.charges}


def empty() -> dict:
    dataset = data(4)
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.2, steps=20, expected_batch_size=1)
    training = begin(build(), plan, dataset)
    none = 0
    for batch in training.batches(dataset, device=DEVICE):
        none += batch.data is None
        training.step(batch)
    return {"empty_here": none, **ended(training)}


def variance() -> dict:
    """The gradient is zero, so the released steps are noise: 120,000 numbers a step."""
    plan = cw.Plan(noise_multiplier=2.0, delta=1e-5, sampling_prob=0.5, steps=2, expected_batch_size=2)
    model = nn.Sequential(nn.Linear(400, 300, bias=False))

    def zero(m, x):
        return 0.0 * m(x).sum(1)

    training = begin(model, plan, torch.ones(4, 400), lr=1.0, loss=zero)
    seen, at = [], full(model[0].weight).clone()
    for batch in training.batches(torch.ones(4, 400), device=DEVICE):
        training.step(batch)
        now = full(model[0].weight).clone()
        seen.append(((at - now) * 2 / (2.0 * training.sensitivity)).flatten())
        at = now
    second = seen[1] - 0.5 * seen[0]  # momentum keeps half of the step before
    stacked = torch.stack([seen[0], second])
    return {
        "deviation": float(stacked.std()),
        "mean": float(stacked.mean()),
        "correlation": float(torch.corrcoef(stacked)[0, 1]),
    }


def small_plan(steps: int, expected: float = 9) -> cw.Plan:
    return cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.3, steps=steps, expected_batch_size=expected)


def part(path: str, checkpoint: str) -> dict:
    """Three steps and a checkpoint; then the rest from it; or the checkpoint alone."""
    training = begin(build(), small_plan(6), data(), ledger=path)
    if WHAT != "first":
        cw.load_checkpoint(training, checkpoint)
        assert training.ledger.charges == 3
    if WHAT == "restored":
        return ended(training)
    for number, batch in enumerate(training.batches(data(), device=DEVICE)):
        training.step(batch)
        if WHAT == "first" and number == 2:
            cw.save_checkpoint(training, checkpoint)
            break
    return ended(training)


def fail(path: str) -> dict:
    """The loss fails on rank 1, in the third step."""
    calls = []

    def failing(model, batch):
        calls.append(1)
        if dist.get_rank() == 1 and armed:
            raise RuntimeError("bad record")
        return losses(model, batch)

    armed: list[int] = []
    dataset = data(400)
    training = begin(build(), small_plan(6, expected=120), dataset, loss=failing, ledger=path)
    for number, batch in enumerate(training.batches(dataset, device=DEVICE)):
        if number == 2:
            armed.append(1)
        training.step(batch)
    return ended(training)


def oversized(path: str) -> dict:
    """Each rank's share is within what was declared; all of them together are not."""
    dataset = data(120)
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=1.0, steps=3, expected_batch_size=9)
    training = begin(build(), plan, dataset, ledger=path)
    training.step(next(iter(training.batches(dataset, device=DEVICE))))
    return ended(training)


def long(path: str) -> dict:
    dataset = data()
    training = begin(build(), small_plan(100_000), dataset, ledger=path)
    for number, batch in enumerate(training.batches(dataset, device=DEVICE)):
        training.step(batch)
        print(number + 1, flush=True)
    return ended(training)


def refused() -> dict:
    """What would be accounted wrongly is refused on every rank: the kinds of error, in order."""
    rank, dataset, found = dist.get_rank(), data(), []

    def tried(action):
        try:
            action()
            found.append("nothing")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")

    def run_of(plan_, **options):
        model = build()
        return distributed.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan_, losses, **options)

    other = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=1.0, steps=3, expected_batch_size=9)
    tried(lambda: run_of(other if rank else small_plan(3)))
    tried(lambda: run_of(small_plan(3), seed=rank + 1))
    tried(lambda: run_of(small_plan(3), noise="fast"))
    training = run_of(small_plan(3))
    order = torch.randperm(40, generator=torch.Generator().manual_seed(rank))
    tried(lambda: training.batches(tuple(x[order] for x in dataset)))
    tried(lambda: training.batches(data(40 - rank)))
    tried(lambda: copy.deepcopy(training))
    tried(lambda: cw.private_score(training, dataset, lambda m, b: b[1].float(), size=40))
    tried(training.statement)
    model = build()
    distributed.check(model, losses, dataset)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tried(lambda: distributed.privatize(model, optimizer, small_plan(3), lambda m, b: losses(m, b)))
    sharded = distributed.privatize(model, optimizer, small_plan(3), losses)
    tried(lambda: sharded.batches(dataset, collate_fn=lambda records: records))
    return {"found": found}


def uneven() -> dict:
    """Rank 1 has no example: half precision and other orders of layers change nothing."""
    dataset = (data(1)[0].repeat(2, 1), data(1)[1].repeat(2))
    layers = {"weight": "a", "bias": "b"}
    rule = cw.PerLayer(cw.PSAC(), layer_of=lambda name: layers.get(name.split(".")[-1], "c"))
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.5, steps=12, expected_batch_size=1, rule=rule)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        training = begin(build().to(dtype), plan, dataset)
        for batch in training.batches(dataset, device=DEVICE):
            training.step(batch)
        found[str(dtype)] = weights(training.model.float())
    return found


def derived() -> dict:
    """Parameters that are squared or normalised before use: sharded ones are freed after the backward pass."""

    class Squared(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.linspace(0.5, 1.5, 6))
            self.v = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6))

        def forward(self, x):
            return (x * self.w.square()) @ (self.v / self.v.norm(dim=1, keepdim=True)).T

    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    loss = lambda m, b: m(b).square().sum(1)  # noqa: E731
    expected = cw.clipped_sum(Squared(), loss, x, cw.PSAC()).grads
    model = nn.Sequential(Squared())
    wrapped = lambda m, b: loss(m, b)  # noqa: E731
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=1.0, steps=1, expected_batch_size=4)
    training, summed = begin(model, plan, x, loss=wrapped), {}
    add = training._noise.add_

    def seen(values, **options):
        summed.update({n: v.clone() for n, v in values.items()})
        return add(values, **options)

    training._noise.add_ = seen
    for batch in training.batches(x):
        training.step(batch)
    worst = 0.0
    for n, g in expected.items():
        part = summed[f"0.{n}"].flatten()
        start = training._ranks.offsets.get(f"0.{n}", 0)
        if len(part):
            worst = max(worst, float((part - g.flatten()[start : start + len(part)]).abs().max() / g.abs().max()))
    return {"error": worst}


if __name__ == "__main__":
    torch.set_num_threads(1)
    backend = os.environ.get("CLIPWISE_BACKEND", "nccl" if ON_GPU else "gloo")
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group(backend, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    runs = {"first": part, "second": part, "restored": part}
    found = [runs.get(what, globals().get(what))(*REST) for what in WHAT.split(",")]
    print(json.dumps(found[0] if len(found) == 1 else found), flush=True)
    dist.destroy_process_group()
