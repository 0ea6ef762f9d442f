"""kill −9 at random instants of real training: is the ledger ever below what was released?

    python tests/faults/kills.py --trials 1000 --save benchmarks/results/kills.json

Children are forked from a warm parent, resume the same ledger, and report every optimizer step over a pipe; the parent
kills them at a random instant and compares.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from small_runs import X, Y, losses, network, plan

import clipwise as cw

PLAN = plan(steps=10**6, accountant="rdp", threshold=cw.QuantileThreshold(), rule=cw.Abadi())


def train(path: Path, writer: int) -> None:
    """Step until killed; one byte for every release, written as soon as the weights have it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = cw.privatize(model, optimizer, PLAN, losses, ledger=path, preflight=False)
    optimizer.register_step_post_hook(lambda *_: os.write(writer, b"."))
    checkpoint = path.with_suffix(".checkpoint")
    for number, batch in enumerate(training.batches((X, Y))):
        training.step(batch)
        if number % 5 == 4:
            cw.save_checkpoint(training, checkpoint)


def warm_up(path: Path) -> None:
    """Whatever is imported or built at first use, in the parent: children inherit it."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = cw.privatize(model, optimizer, PLAN, losses, ledger=path, preflight=False)
    for _, batch in zip(range(3), training.batches((X, Y)), strict=False):
        training.step(batch)
    cw.save_checkpoint(training, path.with_suffix(".checkpoint"))
    training.ledger.close()


def trial(path: Path, seconds: float | None) -> int:
    """Fork, kill after `seconds`, or when three steps are released, and count what was released."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        os.close(reader)
        try:
            train(path, writer)
        finally:
            os._exit(1)
    os.close(writer)
    released = 0
    if seconds is None:
        while released < 3 and (more := os.read(reader, 3)):
            released += len(more)
    else:
        time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the child ended by itself"
    while more := os.read(reader, 65536):
        released += len(more)
    os.close(reader)
    return released


def spent(path: Path) -> float:
    return PLAN.epsilon_after(cw.read_ledger(path).charges)


def kill_trials(folder: Path, trials: int, seed: int = 0) -> dict[str, Any]:
    """Every ledger goes through up to twenty lives; ε of the ledger must never lie below ε of the releases.

    The first life is as long as three steps take, whatever else the machine does; the others are up to twice that.
    """
    chosen, below, released_in_all, torn, behind = random.Random(seed), 0, 0, 0, 0
    warm_up(folder / "warm.ledger")
    for start in range(0, trials, 20):
        path, released, gap, pace = folder / f"{start}.ledger", 0, 0, 0.0
        for life in range(min(20, trials - start)):
            began = time.perf_counter()
            released += trial(path, chosen.uniform(0.0, 2 * pace) if life else None)
            pace = pace or time.perf_counter() - began
            state = cw.read_ledger(path)
            torn += state.torn
            behind += state.charges - released > gap
            gap = state.charges - released
            below += gap < 0
        released_in_all += released
        below += cw.read_ledger(path).charges > 0 and spent(path) < PLAN.epsilon_after(released)
        if path.with_suffix(".checkpoint").exists():  # whole, and of this ledger
            model = network()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            training = cw.privatize(model, optimizer, PLAN, losses, ledger=path, preflight=False)
            cw.load_checkpoint(training, path.with_suffix(".checkpoint"))
            training.ledger.close()
    return {
        "trials": trials,
        "released steps": released_in_all,
        "ledger below what was released": below,
        "ledger above it (killed between charge and release)": behind,
        "torn last lines": torn,
    }


def charge_milliseconds(folder: Path, charges: int = 300) -> float:
    """Median time of one durable charge."""
    ledger, times = cw.Ledger(PLAN, folder / "timed.ledger"), []
    for _ in range(charges):
        began = time.perf_counter()
        ledger.reserve()
        ledger.commit()
        times.append(time.perf_counter() - began)
    ledger.close()
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--save", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=".") as folder:  # on a real disk, not in memory
        found = kill_trials(Path(folder), options.trials, seed=random.SystemRandom().randrange(2**32))
        found["charge, median ms"] = charge_milliseconds(Path(folder))
    found = {"command": f"python tests/faults/kills.py --trials {options.trials}", **found}
    print(json.dumps(found, indent=2))
    if options.save:
        options.save.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
