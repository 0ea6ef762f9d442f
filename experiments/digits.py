"""Digits under a total ε of 3: the path of C under each threshold, and what tuning really buys.

1,200 digits train, 197 choose (declared public), 400 report: whoever tunes never reports on what it chose by.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise.recipes.digits import cross_entropy, digits_model, load_digits

TRAIN, CHOOSE = 1_200, 197
EPSILON, DELTA, STEPS, PROB, LR = 3.0, 1e-4, 200, 0.25, 0.2
NUMBERS: dict[str, Any] = {"delta": DELTA, "sampling_prob": PROB, "steps": STEPS, "expected_batch_size": PROB * TRAIN}
CLIP_NORMS = [0.01, 0.03, 0.1, 0.2, 0.4, 0.8, 1.6, 3.0, 6.0, 12.0]
SEARCHES = {
    "composition": cw.Search(runs=len(CLIP_NORMS), method="composition"),
    "liu-talwar": cw.Search(runs=len(CLIP_NORMS), method="liu-talwar"),
    "random stopping": cw.Search(runs=len(CLIP_NORMS), method="negative-binomial"),
}
UNTUNED: dict[str, tuple[cw.Rule, cw.Threshold]] = {
    "PSAC": (cw.PSAC(), cw.FixedThreshold(1.0)),
    "AUTO-S": (cw.AutoS(), cw.FixedThreshold(1.0)),
    "DC-SGD-E": (cw.Abadi(), cw.MinErrorThreshold()),
}


def split() -> list[tuple[Tensor, Tensor]]:
    """Train, choose, report."""
    (a, la), (b, lb) = load_digits()
    images, labels = torch.cat([a, b]), torch.cat([la, lb])
    cuts = [0, TRAIN, TRAIN + CHOOSE, len(images)]
    return [(images[i:j], labels[i:j]) for i, j in itertools.pairwise(cuts)]


def trained(plan: cw.Plan, look: Callable[[cw.PrivateTraining], None] | None = None) -> cw.PrivateTraining:
    """One run."""
    model = digits_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    training = cw.privatize(model, optimizer, plan, cross_entropy)
    for batch in training.batches(split()[0]):
        if look is not None:
            look(training)
        training.step(batch)
    return training


def train_trial(trial: cw.Trial) -> cw.PrivateTraining:
    """One run of a search."""
    return trained(trial.plan(rule=cw.Abadi(), threshold=cw.FixedThreshold(trial.candidate["clip_norm"])))


def accuracy(model: nn.Module, part: int) -> float:
    """On one part of the split."""
    images, labels = split()[part]
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def choose_by(model: nn.Module) -> float:
    """The score of a search."""
    return accuracy(model, 1)


def processes() -> ProcessPoolExecutor:
    """Two, with a thread each."""
    return ProcessPoolExecutor(2, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))


def tuning(seeds: int = 5) -> dict[str, Any]:
    """Tuning-free methods against Abadi tuned over ten clip norms, all at the same total ε."""
    rows: dict[str, Any] = {}
    for name, (rule, threshold) in UNTUNED.items():
        plan = cw.Plan(epsilon=EPSILON, rule=rule, threshold=threshold, **NUMBERS)
        found = [accuracy(trained(plan).model, 2) for _ in range(seeds)]
        rows[name] = {"accuracy": found, "epsilon": plan.epsilon, "noise_multiplier": plan.noise_multiplier}
        print(name, found, flush=True)
    plan = cw.Plan(epsilon=EPSILON, rule=cw.Abadi(), **NUMBERS)
    unpaid: dict[str, list[float]] = {}
    for c in CLIP_NORMS:
        one = cw.Plan(
            noise_multiplier=plan.noise_multiplier, rule=cw.Abadi(), threshold=cw.FixedThreshold(c), **NUMBERS
        )
        unpaid[str(c)] = [accuracy(trained(one).model, 2) for _ in range(seeds)]
    print("unpaid", unpaid, flush=True)
    for name, search in SEARCHES.items():
        paid = cw.TuningPlan(epsilon=EPSILON, search=search, **NUMBERS)
        found, chosen = [], []
        for _ in range(seeds):
            space = {"clip_norm": CLIP_NORMS}
            winner = cw.tune(train_trial, space, paid, choose_by, score_is_public=True, executor=processes)
            model = digits_model()
            model.load_state_dict(winner.weights)
            found.append(accuracy(model, 2))
            chosen.append(None if winner.candidate is None else winner.candidate["clip_norm"])
        rows[f"Abadi tuned, {name}"] = {
            "accuracy": found, "chosen": chosen, "epsilon": paid.spent, "noise_multiplier": paid.noise_multiplier,
        }  # fmt: skip
        print(name, found, chosen, flush=True)
    return {"seeds": seeds, "epsilon": EPSILON, "delta": DELTA, "steps": STEPS, "rows": rows, "unpaid": unpaid}


def _noting(path: list[float]) -> Callable[[cw.PrivateTraining], None]:
    return lambda training: path.append(training.clip_norm)


def thresholds(seeds: int = 3) -> dict[str, Any]:
    """C_t over a run for every threshold, from three first values; made of released values, so it may be shown."""
    curves = []
    kinds: dict[str, Callable[[float], Any]] = {
        "decay": lambda c: cw.DecayThreshold(c, 0.5),
        "quantile": lambda c: cw.QuantileThreshold(0.5, initial=c),
        "percentile (DC-SGD-P)": lambda c: cw.PercentileThreshold(0.5, initial=c),
        "least error (DC-SGD-E)": lambda c: cw.MinErrorThreshold(c),
    }
    for name, make in kinds.items():
        for initial in (0.01, 1.0, 100.0):
            plan = cw.Plan(epsilon=EPSILON, rule=cw.Abadi(), threshold=make(initial), **NUMBERS)
            for seed in range(seeds):
                path: list[float] = []
                training = trained(plan, _noting(path))
                curves.append({"threshold": name, "initial": initial, "seed": seed, "clip_norms": path,
                               "accuracy": accuracy(training.model, 2)})  # fmt: skip
    return {"epsilon": EPSILON, "delta": DELTA, "steps": STEPS, "curves": curves}
