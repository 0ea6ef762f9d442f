"""Several processes, over gloo on the CPU: the clipped sum, noise, charges and thresholds are those of one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import clipwise as cw
from clipwise.noise import BLOCK, NoiseSource

WORKER = Path(__file__).parent / "distributed_worker.py"
STORES: list[dist.TCPStore] = []  # of ranks that are still running


def launch(ranks: int, *arguments: str, wait: bool = True, fails: bool = False, **environment: str) -> list:
    """Start the ranks of a worker; the results of all, or the processes."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # holds its port, as torchrun does
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **environment,
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), *arguments],
            env=env | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    if not wait:
        STORES.append(store)
        return processes
    ended = [process.communicate(timeout=240) for process in processes]
    if fails:
        return [(p.returncode, err) for p, (_, err) in zip(processes, ended, strict=True)]
    for process, (_, err) in zip(processes, ended, strict=True):
        assert process.returncode == 0, err[-3_000:]
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in ended]


@pytest.fixture(scope="module", params=[("replicated", 2), ("replicated", 4), ("sharded", 2), ("sharded", 4)], ids=str)
def found(request):
    """What every rank of one launch found, by check."""
    kind, ranks = request.param
    checks = ("equal", "empty", "variance")
    return dict(zip(checks, zip(*launch(ranks, kind, ",".join(checks)), strict=True), strict=True))


def test_the_sum_noise_and_weights_are_those_of_one_process(found):
    """The worker compares with clipped_sum on the union of the shares; all ranks end with equal weights."""
    results = found["equal"]
    assert all(r["sum_error"] < 1e-6 for r in results), results
    assert all(r["noise_error"] < 1e-5 for r in results), results  # read off float32 weights
    assert len({r["weights"] for r in results}) == 1
    assert len({r["epsilon"] for r in results}) == 1
    assert len({r["clip_norm"] for r in results}) == 1


def test_empty_shares_are_ordinary(found):
    """Four records at q = 0.2: most shares are empty, and nobody waits for anybody."""
    results = found["empty"]
    assert all(r["charges"] == 20 for r in results)
    assert len({r["weights"] for r in results}) == 1
    assert results[0]["empty_here"] > 0


def test_noise_has_its_variance(found):
    for r in found["variance"]:
        assert abs(r["deviation"] - 1) < 0.01, r
        assert abs(r["mean"]) < 0.015, r
        assert abs(r["correlation"]) < 0.02, r  # between one step's noise and the next


def test_what_would_be_accounted_wrongly_is_refused_on_every_rank():
    for result in launch(2, "replicated", "refused"):
        kinds = [found.split(":")[0] for found in result["found"]]
        rank_says = "WrongOrder" if kinds[7] != "nothing" else "nothing"  # only the first rank has a statement
        assert kinds == [
            "PlanMismatch", "PlanMismatch", "UnsupportedOp", "PlanMismatch", "PlanMismatch", "WrongOrder",
            "UnsupportedOp", rank_says, "UnsupportedOp", "UnsupportedOp",
        ], result  # fmt: skip


def test_ranks_without_examples_and_unusual_layers():
    results = launch(2, "replicated", "uneven,derived")
    assert results[0][0] == results[1][0]
    assert all(r[1]["error"] < 1e-6 for r in results)


def test_derived_parameters_that_are_sharded():
    assert all(r["error"] < 1e-6 for r in launch(2, "sharded", "derived"))


def test_one_charge_per_step_and_resume(tmp_path):
    path = tmp_path / "run.ledger"
    for part in ("first", "second"):
        results = launch(2, "replicated", part, str(path), str(tmp_path / "run.safetensors"))
    assert [r["charges"] for r in results] == [6, 6]
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds.count("charge") == 6
    assert len({r["weights"] for r in results}) == 1


def test_sharded_checkpoints(tmp_path):
    path = tmp_path / "run.ledger"
    before = launch(2, "sharded", "first", str(path), str(tmp_path / "run.safetensors"))
    after = launch(2, "sharded", "restored", str(path), str(tmp_path / "run.safetensors"))
    assert {r["weights"] for r in before} == {r["weights"] for r in after}


def test_a_rank_that_fails_stops_all_and_is_charged(tmp_path):
    path = tmp_path / "run.ledger"
    ended = launch(2, "replicated", "fail", str(path), fails=True)
    assert all(code != 0 for code, _ in ended)
    assert "RankFailed" in ended[0][1]
    assert "Traceback" in ended[1][1]
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["plan", "charge", "charge", "charge"]
    assert "a step failed" in lines[-1]["remark"]


def test_a_batch_too_large_over_all_ranks_is_refused_and_charged(tmp_path):
    path = tmp_path / "run.ledger"
    ended = launch(2, "replicated", "oversized", str(path), fails=True)
    assert all(code != 0 and "WrongBatch: Batches are far larger" in said for code, said in ended)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["plan", "charge"]
    assert "a step failed" in lines[-1]["remark"]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_leaves_the_ledger_safe(tmp_path, victim):
    path = tmp_path / "run.ledger"
    processes = launch(2, "replicated", "long", str(path), wait=False)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not path.exists() or path.read_text().count("charge") < 5):
        time.sleep(0.02)
    processes[victim].send_signal(signal.SIGKILL)
    outputs = [p.communicate(timeout=120)[0] for p in processes]
    assert processes[1 - victim].returncode != 0
    released = max(int(out.strip().splitlines()[-1]) for out in outputs if out.strip())
    assert released >= 4
    charges = [json.loads(line)["kind"] for line in path.read_text().splitlines()].count("charge")
    assert charges >= released
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.3, steps=100_000, expected_batch_size=9)
    model = torch.nn.Linear(3, 1)
    loss = lambda m, x: m(x)[:, 0]  # noqa: E731
    again = cw.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, loss, ledger=path)
    assert again.ledger.charges == charges


def test_a_part_gets_the_noise_of_the_whole():
    """Noise is addressed by element, whatever part of a tensor a rank holds."""
    source = NoiseSource(seed=3)
    options = {"sensitivity": 2.0, "noise_multiplier": 1.5, "sequence": 4, "stream": "gradient"}
    whole = source.add_({"w": torch.zeros(3 * BLOCK + 11)}, **options)["w"]
    for start, length in ((0, 5), (BLOCK - 3, 7), (BLOCK, 2 * BLOCK), (2 * BLOCK + 5, BLOCK + 6), (17, 0)):
        part = source.add_({"w": torch.zeros(length)}, **options, offsets={"w": start})["w"]
        assert torch.equal(part, whole[start : start + length])


def test_shares_are_one_poisson_sample():
    from clipwise.sampling import PoissonSampler

    drawn = [PoissonSampler(1.0, share=(rank, 3)).draw(10).tolist() for rank in range(3)]
    assert sorted(i for part in drawn for i in part) == list(range(10))
    rates = [sum(len(PoissonSampler(0.3, share=(rank, 2)).draw(10_001)) for rank in range(2)) for _ in range(20)]
    assert abs(sum(rates) / (20 * 10_001) - 0.3) < 0.006  # 5σ


def test_seeded_shares_differ():
    from clipwise.sampling import PoissonSampler

    a, b = (PoissonSampler(0.5, seed=1, share=(rank, 2)).draw(2_000) // 2 for rank in range(2))
    assert a.tolist() != b.tolist()


def test_without_a_process_group_it_says_how_to_launch():
    from clipwise.integrations import distributed

    model = torch.nn.Linear(3, 1)
    plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.3, steps=2, expected_batch_size=9)
    with pytest.raises(cw.errors.RankFailed, match="torchrun"):
        distributed.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan)
