from __future__ import annotations

import json
import math
import os
import signal
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from test_training import X, Y, losses
from torch import nn

import clipwise as cw
from clipwise import errors
from clipwise.trials import NoisyScore

NUMBERS = {"epsilon": 3.0, "delta": 1e-4, "sampling_prob": 0.25, "steps": 3, "expected_batch_size": 10}


# -- the search itself ------------------------------------------------------------------------------


def train(trial):
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.candidate.get("lr", 0.1))
    plan = trial.plan(rule=cw.Abadi(), threshold=cw.FixedThreshold(trial.candidate.get("clip_norm", 1.0)))
    training = cw.privatize(model, optimizer, plan, losses, ledger=trial.folder / "run.ledger")
    for batch in training.batches((X, Y)):
        training.step(batch)
    with torch.no_grad():
        model.bias.fill_(trial.candidate.get("mark", 0.0))  # so that the score tells the candidates apart
    return training


def mark(model):
    return float(model.bias[0])


def plan(**change):
    search = change.pop("search", cw.Search(runs=3, method="composition"))
    return cw.TuningPlan(**(NUMBERS | change), search=search)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(1) as pool:
        yield pool


def search_marks(threads, **options):
    space = {"mark": [1.0, 3.0, 2.0]}
    return cw.tune(train, space, plan(), mark, score_is_public=True, executor=threads, **options)


def test_the_best_of_a_grid_wins(threads):
    winner = search_marks(threads)
    assert winner.candidate == {"mark": 3.0}
    assert winner.score == 3.0
    assert winner.weights["bias"].tolist() == [3.0] * 3
    assert winner.epsilon == plan().spent <= 3.0
    assert winner.statement["asserted_by_user"] == {"score": "declared to be public"}


@pytest.mark.parametrize("method", ["liu-talwar", "negative-binomial", "poisson"])
def test_a_random_number_of_runs(method, threads, monkeypatch):
    number = []
    chosen = cw.Search.number_of_runs
    monkeypatch.setattr(cw.Search, "number_of_runs", lambda self, coin: number.append(chosen(self, 0.7)) or number[-1])
    space = {"mark": cw.LogUniform(0.1, 10.0), "lr": [0.1, 0.2]}
    searched = plan(search=cw.Search(runs=2, method=method))
    marks = []
    score = lambda model: marks.append(mark(model)) or marks[-1]  # noqa: E731
    winner = cw.tune(train, space, searched, score, score_is_public=True, executor=threads)
    assert len(marks) == number[0]
    assert winner.score == max(marks)
    assert 0.1 <= winner.candidate["mark"] <= 10
    assert winner.score == pytest.approx(winner.candidate["mark"], rel=1e-6)
    assert len(number) == 1
    assert number[0] not in [v for v in winner.statement.values() if v != searched.steps]


def test_no_run_at_all_is_an_outcome(threads, monkeypatch):
    monkeypatch.setattr(cw.Search, "number_of_runs", lambda self, coin: 0)
    searched = plan(search=cw.Search(runs=2, method="poisson"))
    winner = cw.tune(train, {"mark": [1.0]}, searched, mark, score_is_public=True, executor=threads)
    assert winner.candidate is None
    assert winner.epsilon == searched.spent


def test_the_ledger_holds_one_selection_and_refuses_another(tmp_path, threads):
    path = tmp_path / "search.ledger"
    search_marks(threads, ledger=path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["plan", "charge"]
    assert lines[1]["event"] == "selection"
    assert "mark" not in path.read_text()
    with pytest.raises(errors.BudgetExhausted, match="spent whole"):
        search_marks(threads, ledger=path)


def test_a_crash_of_the_search_has_charged_it(tmp_path):
    class Crashing(ThreadPoolExecutor):
        def submit(self, *args, **kwargs):
            raise KeyboardInterrupt

    path = tmp_path / "search.ledger"
    with pytest.raises(KeyboardInterrupt):
        search_marks(Crashing(1), ledger=path)
    assert cw.read_ledger(path).charges == 1


def kept(trial, seen=[]):  # noqa: B006
    seen.append(trial.folder)
    (trial.folder / "note").write_text("secret")
    return train(trial)


def test_folders_and_ledgers_of_the_runs_are_gone(threads):
    cw.tune(kept, {"mark": [1.0, 3.0, 2.0]}, plan(), mark, score_is_public=True, executor=threads)
    folders = kept.__defaults__[0]
    assert len(folders) == 3
    assert not any(folder.exists() for folder in folders)


def failing(trial):
    if trial.candidate["mark"] == 3.0:
        raise RuntimeError("diverged")
    return train(trial)


def test_a_run_that_fails_loses(threads):
    winner = cw.tune(failing, {"mark": [1.0, 3.0, 2.0]}, plan(), mark, score_is_public=True, executor=threads)
    assert winner.candidate == {"mark": 2.0}


def test_a_nan_score_loses(threads):
    def score(model):
        return math.nan if mark(model) == 3.0 else mark(model)

    winner = cw.tune(train, {"mark": [1.0, 3.0, 2.0]}, plan(), score, score_is_public=True, executor=threads)
    assert winner.candidate == {"mark": 2.0}


def cheating(trial):
    numbers = dict(trial.numbers) | {"noise_multiplier": 0.5}
    return train(cw.Trial(trial.candidate, numbers, trial.folder))


@pytest.mark.parametrize("wrong", [cheating, lambda trial: trial.plan(noise_decay=0.5), lambda trial: "a model"])
def test_a_run_under_other_numbers_is_refused(wrong, threads):
    with pytest.raises(errors.TuningFailed, match=r"PlanMismatch|TypeError"):
        cw.tune(wrong, {"mark": [1.0, 3.0, 2.0]}, plan(), mark, score_is_public=True, executor=threads)


def test_where_scores_come_from_must_be_said(threads):
    with pytest.raises(ValueError, match="Say where scores come from"):
        cw.tune(train, {"mark": [1.0, 3.0, 2.0]}, plan(), mark, executor=threads)
    noisy = plan(score_noise=30.0, score_size=40)
    with pytest.raises(ValueError, match="Not both"):
        cw.tune(train, {"mark": [1.0, 3.0, 2.0]}, noisy, mark, score_is_public=True, executor=threads)
    with pytest.raises(ValueError, match="together"):
        plan(score_noise=3.0)


def test_a_private_score_is_noised_and_bounded(threads):
    noisy = plan(score_noise=30.0, score_size=40)
    assert noisy.noise_multiplier > plan().noise_multiplier

    def huge(model):
        return torch.full((40,), 1e9)

    noise = NoisyScore(3.0, 1.0)
    sums = [noise(torch.full((50,), 2.0)) for _ in range(4000)]  # values are clamped to 1
    assert np.mean(sums) == pytest.approx(50, abs=0.25)
    assert np.std(sums) == pytest.approx(3.0, rel=0.08)
    with pytest.raises(errors.PlanMismatch, match="one value per record"):
        noise(torch.ones(4, 5))
    scores = [
        cw.tune(train, {"lr": [0.1, 0.2, 0.3]}, noisy, huge, executor=threads).score for _ in range(3)
    ]  # fmt: skip
    assert len(set(scores)) == 3
    assert all(abs(s - 1) < 8 * 30 / 40 for s in scores)


@pytest.mark.parametrize("space", [{}, {"mark": []}, {"mark": "abc"}, {"mark": [1.0, 2.0]}, [1, 2, 3]])
def test_bad_spaces_are_refused_before_anything_is_charged(space, threads, tmp_path):
    with pytest.raises(ValueError):  # noqa: PT011
        cw.tune(train, space, plan(), mark, score_is_public=True, executor=threads, ledger=tmp_path / "l")
    assert not (tmp_path / "l").exists()


# -- workers that die -------------------------------------------------------------------------------


def dying(trial):
    """Kills its own process at the first attempt of the winner-to-be."""
    marker = Path(os.environ["CLIPWISE_TEST_FOLDER"]) / "died"
    if trial.candidate["mark"] == 3.0 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return train(trial)


def processes():
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def test_a_dead_process_is_replaced_and_its_run_repeated(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPWISE_TEST_FOLDER", str(tmp_path))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    winner = cw.tune(
        dying, {"mark": [1.0, 3.0, 2.0]}, plan(), mark, score_is_public=True, executor=processes, ledger=tmp_path / "l"
    )
    assert (tmp_path / "died").exists()
    assert winner.candidate == {"mark": 3.0}
    assert cw.read_ledger(tmp_path / "l").charges == 1
    assert not list((tmp_path / "temporary").iterdir())  # nothing of the run that was killed is left


def test_a_broken_executor_that_cannot_be_made_again(tmp_path, monkeypatch):
    monkeypatch.setenv("CLIPWISE_TEST_FOLDER", str(tmp_path))
    with processes() as pool, pytest.raises(errors.TuningFailed, match="cannot be made again"):
        cw.tune(dying, {"mark": [1.0, 3.0, 2.0]}, plan(), mark, score_is_public=True, executor=pool)


def test_a_run_that_always_kills_its_worker_ends_the_search(monkeypatch):
    class Dead(ThreadPoolExecutor):
        def submit(self, *args, **kwargs):
            return super().submit(lambda: (_ for _ in ()).throw(OSError("gone")))

    with pytest.raises(errors.TuningFailed, match="Workers cannot run the search"):
        search_marks(Dead(1))


def test_a_cluster_of_two_workers_one_of_which_is_killed(tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setenv("CLIPWISE_TEST_FOLDER", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    options = {"n_workers": 2, "threads_per_worker": 1, "processes": True, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        winner = cw.tune(
            dying, {"mark": [1.0, 3.0, 2.0]}, plan(), mark, score_is_public=True, executor=client.get_executor()
        )
    assert (tmp_path / "died").exists()
    assert winner.candidate == {"mark": 3.0}


def test_processes_by_default():
    winner = cw.tune(train, {"mark": [1.0, 3.0, 2.0]}, plan(), mark, score_is_public=True)
    assert winner.candidate == {"mark": 3.0}


def test_functions_that_processes_cannot_import_are_refused_before_the_charge(tmp_path):
    with pytest.raises(TypeError, match="functions of a module"):
        cw.tune(lambda t: train(t), {"mark": [1.0]}, plan(search=cw.Search(runs=2)), mark, score_is_public=True,
                ledger=tmp_path / "l")  # fmt: skip
    assert not (tmp_path / "l").exists()


def seeded(trial):
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return cw.privatize(model, optimizer, trial.plan(), losses, seed=7)


def twice(trial):
    train(trial)
    return train(cw.Trial(trial.candidate, trial.numbers, trial.folder / "again"))


def warmed(trial):
    """Two steps under a plan of its own, then the weights go on under the trial's; fewer steps in all than allowed."""
    dear = cw.Plan(noise_multiplier=0.5, delta=1e-5, sampling_prob=0.5, steps=1, expected_batch_size=20)
    model = nn.Linear(6, 3)
    run = cw.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), dear, losses)
    run.step(next(run.batches((X, Y))))
    later = nn.Linear(6, 3)
    later.load_state_dict(model.state_dict())
    run = cw.privatize(later, torch.optim.SGD(later.parameters(), lr=0.1), trial.plan(), losses)
    run.step(next(run.batches((X, Y))))
    return run


def elsewhere(trial):
    """Several runs, each in a thread of its own; one is given back."""
    with ThreadPoolExecutor(3) as pool:
        folders = [trial.folder / str(number) for number in range(3)]
        runs = [pool.submit(train, cw.Trial(trial.candidate, trial.numbers, folder)) for folder in folders]
        return [run.result() for run in runs].pop()


WRONG = [
    (seeded, "must be private: leave out seed"),
    (twice, "charged 6 steps"),
    (warmed, r"holds 1 charges, but the thread of train\(trial\) made 2"),
    (elsewhere, r"holds 3 charges, but the thread of train\(trial\) made 0"),
]


@pytest.mark.parametrize(("wrong", "why"), WRONG)
def test_runs_that_are_not_what_was_paid_for_are_refused(wrong, why, threads):
    with pytest.raises(errors.TuningFailed, match=why):
        cw.tune(wrong, {"mark": [1.0, 3.0, 2.0]}, plan(), mark, score_is_public=True, executor=threads)


def telling(trial):
    raise ValueError("cannot parse record 17: 0.619")


def leaving(trial):
    raise SystemExit("record 17 is bad")


@pytest.mark.parametrize(("wrong", "kind"), [(telling, "ValueError"), (leaving, "SystemExit")])
def test_failures_do_not_quote_records(wrong, kind, threads):
    with pytest.raises(errors.TuningFailed, match=kind) as caught:
        cw.tune(wrong, {"mark": [1.0, 3.0, 2.0]}, plan(), mark, score_is_public=True, executor=threads)
    assert "record 17" not in str(caught.value)


def test_a_failed_run_ranks_below_a_run_without_a_score(threads):
    def nowhere(model):
        return math.nan

    winner = cw.tune(failing, {"mark": [3.0, 1.0, 2.0]}, plan(), nowhere, score_is_public=True, executor=threads)
    assert winner.candidate == {"mark": 1.0}
    assert not winner.statement["certified"]


def test_many_dying_workers_do_not_end_a_search_that_goes_on(tmp_path, monkeypatch):
    """Every run kills its worker once: progress is made all the same."""
    monkeypatch.setenv("CLIPWISE_TEST_FOLDER", str(tmp_path))
    space = {"mark": [float(k) for k in range(5)]}
    searched = plan(search=cw.Search(runs=5, method="composition"))
    winner = cw.tune(dying_once, space, searched, mark, score_is_public=True, executor=processes)
    assert winner.candidate == {"mark": 4.0}


def dying_once(trial):
    marker = Path(os.environ["CLIPWISE_TEST_FOLDER"]) / f"died-{trial.candidate['mark']}"
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return train(trial)


def test_the_statement_reads_aloud():
    text = str(plan(search=cw.Search(runs=4, method="liu-talwar")))
    assert "a secret number (8 on average)" in text
    assert "public data, as declared" in text
    made = cw.TuningPlan.for_dataset(size=1000, batch_size=100, epochs=1, epsilon=2.0, delta=1e-5)
    assert (made.steps, made.expected_batch_size) == (10, 100)
    assert json.dumps(made.statement())
