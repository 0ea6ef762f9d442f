"""One private run on two processes.

    torchrun --nproc-per-node 2 examples/two_processes.py [--shard]

Each rank draws its own share of every Poisson batch; sums are added over the ranks, one charge is written, and all
ranks add the same noise. With --shard the weights are sharded by `fully_shard` (FSDP2).
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import clipwise as cw
from clipwise.integrations import distributed


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shard", action="store_true")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    train, test = (x[:1500], y[:1500]), (x[1500:], y[1500:])

    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).to(device)
    if given.shard:
        distributed.check(model, loss_fn, train, device=device)
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    plan = cw.Plan(epsilon=3.0, delta=1e-4, sampling_prob=0.2, steps=given.steps, expected_batch_size=300)
    training = distributed.privatize(model, optimizer, plan, loss_fn)
    for batch in training.batches(train, device=device):
        training.step(batch)

    model.eval()
    with torch.no_grad():
        accuracy = (model(test[0].to(device)).argmax(1).cpu() == test[1]).float().mean()
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.1%} at epsilon {training.epsilon:.4f}, {dist.get_world_size()} processes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
