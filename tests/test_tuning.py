from __future__ import annotations

import json
import math
import os
import signal
import tempfile
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_training import X, Y, losses
from torch import nn

import clipwise as cw
from clipwise import errors
from clipwise.accounting.tuning import METHODS
from clipwise.sampling import Coins
from clipwise.trials import NoisyScore

RUN = {"sampling_prob": 0.01, "steps": 1000, "delta": 1e-5}
NUMBERS = {"epsilon": 3.0, "delta": 1e-4, "sampling_prob": 0.25, "steps": 3, "expected_batch_size": 10}


def rdp(*events, delta=1e-5):
    accountant = dp_accounting.rdp.RdpAccountant()
    for event, times in events:
        accountant.compose(event, times)
    return accountant.get_epsilon(delta)


def training_event(sigma=2.0):
    release = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(sigma))
    return dp_accounting.SelfComposedDpEvent(release, 1000)


# -- what a search costs ----------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [10, 45, 90])
def test_costs_agree_with_dp_accounting(runs):
    def found(**how):
        return cw.tuning_epsilon(cw.Search(runs=runs, **how), noise_multiplier=2.0, **RUN)

    def repeated(shape):
        return rdp((dp_accounting.dp_event.RepeatAndSelectDpEvent(training_event(), runs, shape), 1))

    assert found(method="composition") == pytest.approx(rdp((training_event(), runs)), rel=1e-9)
    assert found(method="composition", accountant="pld") == pytest.approx(
        cw.epsilon(noise_multiplier=2.0, sampling_prob=0.01, steps=1000 * runs, delta=1e-5), rel=1e-9
    )
    for shape in (0.0, 0.5, 1.0):
        assert found(method="negative-binomial", shape=shape) == pytest.approx(repeated(shape), rel=1e-9)
    assert found(method="poisson") == pytest.approx(repeated(math.inf), rel=1e-9)


@pytest.mark.parametrize("runs", [10, 45, 90])
def test_liu_talwar_is_the_formula(runs):
    total = cw.tuning_epsilon(cw.Search(runs=runs, method="liu-talwar"), noise_multiplier=2.0, **RUN)
    longest = 2 * runs * math.log(1e20)
    delta_1 = ((1e-5 - 1e-20) / (3 * longest)) ** 2 / 2
    assert 3 * math.sqrt(2 * delta_1) * longest + 1e-20 == pytest.approx(1e-5)
    expected = 3 * rdp((training_event(), 1), delta=delta_1) + 3 * math.sqrt(2 * delta_1)
    assert total == pytest.approx(expected, rel=1e-9)


def test_a_noisy_score_is_paid_for():
    search = cw.Search(runs=10)
    free = cw.tuning_epsilon(search, noise_multiplier=2.0, **RUN)
    paid = cw.tuning_epsilon(search, noise_multiplier=2.0, score_noise=4.0, **RUN)
    both = dp_accounting.ComposedDpEvent([training_event(), dp_accounting.GaussianDpEvent(4.0)])
    assert paid == pytest.approx(rdp((dp_accounting.dp_event.RepeatAndSelectDpEvent(both, 10, 1.0), 1)), rel=1e-9)
    assert paid > free


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("score_noise", [None, 20.0])
def test_calibration_never_exceeds_the_target(method, score_noise):
    search = cw.Search(runs=10, method=method)
    sigma = cw.calibrate_search(search, epsilon=3.0, score_noise=score_noise, **RUN)
    spent = cw.tuning_epsilon(search, noise_multiplier=sigma, score_noise=score_noise, **RUN)
    assert 3.0 - 1e-3 <= spent <= 3.0
    assert sigma > cw.calibrate(epsilon=3.0, **RUN)  # tuning is never free


def test_an_impossible_search_says_so():
    with pytest.raises(ValueError, match="The search alone costs"):
        cw.calibrate_search(cw.Search(runs=10), epsilon=0.5, score_noise=1.0, **RUN)


@pytest.mark.parametrize(
    "bad",
    [
        {"method": "best"},
        {"runs": 0},
        {"runs": 0.5},
        {"runs": math.nan},
        {"runs": True},
        {"method": "composition", "runs": 2.5},
        {"shape": -1},
        {"shape": math.inf},
        {"shape": 1e-9},
        {"accountant": "gdp"},
        {"accountant": "pld"},
    ],
    ids=str,
)
def test_searches_that_do_not_exist_are_refused(bad):
    with pytest.raises((ValueError, TypeError)):
        cw.Search(**bad)


# -- the secret number of runs ----------------------------------------------------------------------


def probabilities(search, most=3000):
    """P[K = k] by definition 1 of Papernot & Steinke, written out, for k = 0, 1, …"""
    if search.method == "poisson":
        return [math.exp(-search.runs + k * math.log(search.runs) - math.lgamma(k + 1)) for k in range(most)]
    if search.method == "liu-talwar":
        gamma, longest = 1 / (2 * search.runs), math.floor(2 * search.runs * math.log(1e20))
        head = [0.0] + [gamma * (1 - gamma) ** (k - 1) for k in range(1, min(longest, most))]
        return [*head, 1 - sum(head)]
    low, high = 1e-12, 1.0
    for _ in range(200):
        gamma = (low + high) / 2
        weights = pmf(search.shape, gamma, most)
        low, high = (gamma, high) if np.dot(weights, np.arange(most)) > search.runs else (low, gamma)
    return list(weights)


def pmf(shape, gamma, most):
    k = np.arange(1, most)
    if shape == 0:
        log = k * math.log1p(-gamma) - np.log(k) - math.log(math.log(1 / gamma))
    else:
        falling = np.cumsum(np.log((np.arange(most - 1) + shape) / (np.arange(most - 1) + 1)))
        log = k * math.log1p(-gamma) - math.log(gamma**-shape - 1) + falling
    return np.concatenate([[0.0], np.exp(log)])


@pytest.mark.parametrize(
    "search",
    [cw.Search(runs=4), cw.Search(runs=6, shape=0), cw.Search(runs=5, shape=0.5), cw.Search(runs=3, method="poisson"),
     cw.Search(runs=4, method="liu-talwar")],
    ids=str,
)  # fmt: skip
def test_the_number_of_runs_has_its_distribution(search):
    coins = (np.arange(40_000) + 0.5) / 40_000
    drawn = np.bincount([search.number_of_runs(float(c)) for c in coins], minlength=40) / len(coins)
    expected = np.array(probabilities(search))[: len(drawn)]
    assert np.abs(drawn[: len(expected)] - expected).max() <= 1e-3


@given(coin=st.floats(0, 1, exclude_max=True), runs=st.integers(1, 200), method=st.sampled_from(METHODS))
def test_any_coin_gives_a_number_of_runs(coin, runs, method):
    found = cw.Search(runs=runs, method=method).number_of_runs(coin)
    assert found >= (0 if method == "poisson" else 1)
    if method == "composition":
        assert found == runs


@pytest.mark.parametrize("shape", [0, 1e-6, 1e-3, 1, 50])
def test_extreme_coins_give_reasonable_numbers(shape):
    search = cw.Search(runs=3, shape=shape)
    assert search.number_of_runs(1 - 2**-53) < 10_000
    assert search.number_of_runs(0.0) == 1


def test_coins_differ_between_searches():
    assert len({Coins().uniform() for _ in range(50)}) == 50


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
    assert np.std(sums) == pytest.approx(3.0, rel=0.05)
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
    return train(cw.Trial(trial.candidate, trial.numbers, trial.folder.parent))


@pytest.mark.parametrize(("wrong", "why"), [(seeded, "must be private: leave out seed"), (twice, "charged 6 steps")])
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
