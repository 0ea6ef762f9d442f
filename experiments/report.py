"""`python -m experiments results` writes RESULTS.md, from result files only: our numbers, the papers', what held."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .again import again_table
from .causes import causes
from .dc_figures import grid_cells, knob_points
from .dc_tables import DC_TABLES, SEARCHED, UNTUNED, expected_best, searched
from .figures import DRAWN
from .norm_figures import STEADY, steady_run
from .papers import (
    D8,
    IMAGENETTE,
    IMAGENETTE_32,
    IMAGENETTE_READ,
    LABELS,
    NAMES_RATE,
    NAMES_READ,
    P2,
    P3,
    RESNET_READ,
    WANTED,
    Cell,
)
from .recipes import RECIPES
from .results_io import RESULTS, load
from .runs import rows_of
from .sweeps import (
    DC_KNOBS,
    FEATURE_RATES,
    FEATURE_RULES,
    KNOB_TASKS,
    KNOBS,
    PAID_TASKS,
    SEARCHES,
    STEADIED,
    STEADY_RATES,
    VIEWS,
    copies_settings,
)
from .tables import TABLES, accuracies, by_seed, heatmap_cells, interval, knob_spreads

REPORT = Path(__file__).parent / "RESULTS.md"
HOLDS, FAILS, OPEN = "holds", "**does not hold**", "cannot be told"


@dataclass(frozen=True)
class Claim:
    """A statement, the numbers that bear on it, and what they say."""

    text: str
    found: str
    verdict: str


def at_least(recipe: str, method: str, bar: float, text: str, results: Path) -> Claim:
    """A mean over seeds against a bar."""
    found = list(accuracies(recipe, method, {}, results).values())
    if len(found) < 3:
        return Claim(text, f"n = {len(found)}", "not run" if not found else OPEN)
    mean = statistics.mean(found)
    return Claim(text, f"{mean:.2f}, n = {len(found)}", HOLDS if mean >= bar else FAILS)


def compared(text: str, pairs: list[float]) -> Claim:
    """The 95% interval of differences against 0; three pairs at least."""
    if len(pairs) < 3:
        shown = ", ".join(f"{v:+.2f}" for v in pairs)
        return Claim(text, f"{shown or 'no run'} (n = {len(pairs)})", OPEN if pairs else "not run")
    shown = interval(pairs)
    mean, half = (float(part) for part in shown.split(" ± "))
    verdict = HOLDS if mean > half else FAILS if mean < -half else "no difference seen"
    return Claim(text, f"{shown} (n = {len(pairs)})", verdict)


def better(cell: Cell, first: str, second: str, text: str, results: Path) -> Claim:
    """Paired by seed."""
    a, b = (accuracies(cell.recipe, m, cell.settings, results) for m in (first, second))
    text = f"{text}: {LABELS[first]} above {LABELS[second]} on {cell.label}"
    return compared(text, [a[s] - b[s] for s in a if s in b])


def searched_for(results: Path) -> Iterator[Claim]:
    """D tables II and III: what needs no search is better than Abadi with a search that is paid for."""
    for task in PAID_TASKS:
        cell = next(c for c in D8 if c.recipe == task and c.settings["epsilon"] == PAID_TASKS[task])
        for search in SEARCHES:
            paid = {s: expected_best(list(v.values()), search) for s, v in searched(task, search, results).items()}
            if not paid:
                yield Claim(f"D tables II, III: C by {SEARCHED[search]}, on {cell.label}", "", "not run")
                continue
            for method in UNTUNED:
                ours = accuracies(task, method, cell.settings, results)
                text = f"D tables II, III: {LABELS[method]} above Abadi, C by {SEARCHED[search]}, on {cell.label}"
                yield compared(text, [ours[s] - paid[s] for s in ours if s in paid])


def near(cell: Cell, method: str, points: float, results: Path, paper: str = "") -> Claim:
    """Ours within some points of the printed number, or above it; `paper` where two of them print one."""
    printed = (cell.automatic if paper == "A" else cell.printed)[method][0]
    found = list(accuracies(cell.recipe, method, cell.settings, results).values())
    whose = f"{paper}'s" if paper else "the printed"
    text = f"{cell.label}, {LABELS[method]}: within {points:g} points of {whose} {printed:g}"
    if not found:
        return Claim(text, "", "not run")
    apart = statistics.mean(found) - printed
    verdict = HOLDS if abs(apart) <= points else "above" if apart > 0 else FAILS
    return Claim(text, f"{apart:+.2f}, n = {len(found)}", verdict if len(found) >= 3 else f"{verdict}, few seeds")


def robust(results: Path) -> Iterator[Claim]:
    """P figure 4: a rule's own knob matters less than C."""
    rows = rows_of("fashion_mnist", results)
    spreads = {method: knob_spreads(heatmap_cells(rows, method)) for method in KNOBS}
    for first, second in (("psac", "abadi"), ("auto-s", "abadi"), ("psac", "auto-s")):
        text = f"P fig. 4: accuracy depends less on the knob of {LABELS[first]} than on that of {LABELS[second]}"
        a, b = spreads[first], spreads[second]
        if not a or len(a) != len(b):
            yield Claim(text, "", "not run")
            continue
        less = sum(x < y for x, y in zip(a, b, strict=True))
        mine, other = statistics.mean(a), statistics.mean(b)
        found = f"mean spread {mine:.1f} against {other:.1f} points; less at {less} of {len(a)} rates"
        yield Claim(text, found, HOLDS if less == len(a) else FAILS if mine >= other else OPEN)


def straight(results: Path) -> Iterator[Claim]:
    """P figure 3: PSAC turns a batch's gradient less than other rules do."""
    rows = load("bias", results)["curves"] if (results / "bias.json").exists() else []
    seeds = sorted({row["seed"] for row in rows})
    for other in ("AUTO-V", "AUTO-S, γ = 0.01", "Abadi, C = 0.1", "Abadi, C = 1"):
        text = f"P fig. 3: PSAC (r = 0.1, C = 0.1) turns the gradient less than {other}, MNIST"
        runs = [[r["PSAC, r = 0.1"] - r[other] for r in rows if r["seed"] == seed] for seed in seeds]
        if not runs:
            yield Claim(text, "", "not run")
            continue
        apart = [statistics.mean(run) for run in runs]
        found = f"cosine {statistics.mean(apart):+.2f} on average over a run; {len(apart)} runs"
        yield Claim(text, found, HOLDS if min(apart) > 0 else FAILS if max(apart) < 0 else OPEN)


def turned(results: Path) -> Iterator[Claim]:
    """D figure 1 on MNIST with Adam, and the knobs of DC-SGD on that and on CIFAR-10."""
    rows = rows_of("mnist_dc", results)
    text = "D fig. 1: C matters as the learning rate does (MNIST, ε = 1, Adam, 5 epochs)"
    grid = [line for name, line in grid_cells(rows).items() if name.startswith("C")]
    if any(math.isnan(v) for line in grid for v in line):
        yield Claim(text, "", "not run")
    else:
        over_c = statistics.mean(_reach(column) for column in zip(*grid, strict=True))
        over_rate = statistics.mean(_reach(line) for line in grid)
        at_best = _reach(max(zip(*grid, strict=True), key=max))
        found = (
            f"mean spread {over_c:.1f} points over C ({at_best:.1f} at the best rate), {over_rate:.1f} over the rate"
        )
        yield Claim(text, f"{found}; one seed", HOLDS if over_c >= over_rate / 2 else FAILS)
    names = {"clip_norm": "first C", "bins": "number of bins", "histogram_noise": "σ_H"}
    for (task, epsilon), (knob, name) in itertools.product(KNOB_TASKS.items(), names.items()):
        rows = rows_of(task, results)
        points = knob_points(rows, "dc-sgd-e", knob, task)
        label = {"mnist_dc": "MNIST", "cifar10_dc": "CIFAR-10, ResNet18"}[task]
        text = f"D: DC-SGD-E does not need its {name} tuned ({label}, ε = {epsilon:g}): within 1 point"
        if len(points) < len(DC_KNOBS[knob]):
            yield Claim(text, "", "not run")
            continue
        apart = _reach([v for _, v in points])
        seeds = _reach([*by_seed(rows, "dc-sgd-e", {"epsilon": epsilon}).values()])
        found = f"{apart:.2f} points from {points[0][0]:g} to {points[-1][0]:g}; one seed (seeds alone: {seeds:.2f})"
        yield Claim(text, found, HOLDS if apart <= 1 else FAILS)


def steadied(results: Path) -> Iterator[Claim]:
    """A figures 14 and 15, at the learning rates at which anything is learnt; one seed."""
    rows = rows_of("sst2_last", results)
    found = {(rate, gamma): steady_run(rows, rate, gamma) for rate in STEADY_RATES for gamma in STEADY}
    known = {at: run for at, run in found.items() if run is not None}
    learnt = sorted({rate for (rate, _), run in known.items() if run["accuracy"] > 0.6})
    middle = [gamma for gamma in STEADIED if gamma <= 1]
    text = "A fig. 15: accuracy depends little on γ from 1e-4 to 1 (SST-2, MiniLM's last layer, ε = 3): within 2 points"
    if len(known) < len(found) or not learnt:
        yield Claim(text, "", "not run")
        return
    apart = {rate: _reach([100 * known[rate, gamma]["accuracy"] for gamma in middle]) for rate in learnt}
    shown = ", ".join(f"{v:.1f} at lr {rate:g}" for rate, v in apart.items())
    yield Claim(text, f"{shown}; one seed", HOLDS if max(apart.values()) <= 2 else FAILS)
    ends = {at: statistics.mean(run["gradients"][-3:]) for at, run in known.items()}
    for gamma in (0.01, 1.0):
        pairs = [(ends[rate, gamma], ends[rate, 0.0]) for rate in learnt]
        shown = ", ".join(f"{a:.2f} against {b:.2f} at lr {rate:g}" for rate, (a, b) in zip(learnt, pairs, strict=True))
        text = f"A fig. 14: with γ = {gamma:g} the mean gradient ends shorter than with AUTO-V (SST-2, the same runs)"
        less = [a < b for a, b in pairs]
        yield Claim(text, f"{shown}; one seed", HOLDS if all(less) else OPEN if any(less) else FAILS)


def _reach(values: Sequence[float]) -> float:
    return max(values) - min(values)


def views(results: Path) -> Iterator[Claim]:
    """Augmentation multiplicity."""
    text = "Beyond the papers: four views of an example are better than one (MNIST, ε = 3, PSAC,"
    moved = "four, the border moves in, by 1 pixel at most"
    for how, kinds in (
        ("10 epochs, moved by up to 4 pixels)", (copies_settings(1), copies_settings(4))),
        ("3 epochs, moved by up to 1 pixel)", (VIEWS["one view"], VIEWS[moved])),
    ):
        one, four = (accuracies("mnist", "psac", settings, results) for settings in kinds)
        yield compared(f"{text} {how}", [four[s] - one[s] for s in four if s in one])


def best_rates(results: Path) -> Iterator[Claim]:
    """P table 2 on features, with the learning rate chosen for every rule by itself, seed by seed."""
    rates = [{} if rate == 4.0 else {"lr": rate} for rate in FEATURE_RATES]
    found = {m: [accuracies("cifar10_features", m, s, results) for s in rates] for m in FEATURE_RULES}
    seeds = set.intersection(*(set(one) for every in found.values() for one in every))
    best = {m: {s: max(one[s] for one in every) for s in seeds} for m, every in found.items()}
    text = f"P table 2 on CIFAR-10's features, each rule at its best of {len(FEATURE_RATES)} rates: PSAC above"
    for other in ("abadi", "auto-s"):
        yield compared(f"{text} {LABELS[other]}", [best["psac"][s] - best[other][s] for s in sorted(seeds)])


def claims(results: Path = RESULTS) -> list[Claim]:
    """Those that the result files can decide."""
    mnist_dc, cifar, names = (
        tuple(c for c in D8 if c.recipe == name) for name in ("mnist_dc", "cifar10_dc", "names_dc")
    )
    return [
        at_least("fashion_mnist", "psac", 86.5, "Fashion-MNIST, PSAC at the paper's settings: ≥ 86.5", results),
        at_least("mnist", "psac", 98.1, "MNIST, PSAC at the paper's settings: ≥ 98.1", results),
        *(better(cell, "psac", other, "P table 2", results) for cell in P2[:3] for other in ("abadi", "auto-s")),
        *best_rates(results),
        *robust(results),
        *straight(results),
        *(
            at_least(name, "psac", bar, f"Best recipe, {name}, ε = 3, no threshold tuned: ≥ {bar:g}", results)
            for name, bar in WANTED.items()
        ),
        *(better(cell, "psac", "abadi", "P table 3", results) for cell in P3),
        *(better(cell, "auto-s", "abadi", "D table VIII", results) for cell in mnist_dc),
        *(better(cell, "abadi", "dc-sgd-e", "D table VIII", results) for cell in mnist_dc),
        *(better(cell, "dc-sgd-e", "abadi", "D table VIII", results) for cell in names),
        *(near(cell, method, 2.0, results) for cell in (names[-1], NAMES_READ, NAMES_RATE) for method in cell.printed),
        *(better(NAMES_READ, "dc-sgd-e", other, "D table VIII", results) for other in ("abadi", "auto-s")),
        *(near(cell, method, 1.5, results) for cell in (*cifar[::-1], *RESNET_READ) for method in cell.printed),
        *(better(cifar[-1], "dc-sgd-e", other, "D table VIII", results) for other in ("abadi", "auto-s")),
        *searched_for(results),
        *turned(results),
        *steadied(results),
        *views(results),
        *(
            near(cell, method, 2.0, results, paper)
            for cell in (IMAGENETTE, IMAGENETTE_32, *IMAGENETTE_READ)
            for paper, printed in (("P", cell.printed), ("A", cell.automatic))
            for method in printed
            if cell not in IMAGENETTE_READ or accuracies(cell.recipe, method, cell.settings, results)
        ),
    ]


def claims_table(found: Sequence[Claim]) -> str:
    """In Markdown."""
    lines = ["| claim | found | |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {c.text} | {c.found} | {c.verdict} |" for c in found)])


def missing(results: Path = RESULTS) -> str:
    """What has a recipe and no run, and what has no recipe."""
    cells = (*P2, *P3, *D8, NAMES_READ, NAMES_RATE, *RESNET_READ)
    lines = [
        f"- {c.label}: no run." for c in cells if not any(accuracies(c.recipe, m, c.settings, results) for m in LABELS)
    ]
    for cell in cells:
        seeds = {
            LABELS[m]: len(accuracies(cell.recipe, m, cell.settings, results)) for m in cell.printed | cell.automatic
        }
        few = ", ".join(f"{name} ({n})" for name, n in seeds.items() if n < 3)
        if few and any(seeds.values()):
            lines.append(f"- {cell.label}: fewer than three seeds for {few}.")
    lines += [
        f"- {name}: no run." for name in RECIPES if not rows_of(name, results) and name not in {c.recipe for c in cells}
    ]
    lines += [
        "- GLUE but SST-2 and CelebA: no data here.",
        "- A tables 3 and 5–10, figures D 4–7, the bound of D, the second branch of P's: not drawn. Of D 4 and 8–11 "
        "and of D's theorem 3 we had no description; A5 and A7 show the quantities of theorems 4 to 6 that A 5–11 are "
        "about, in panels of our own; `dc_knobs` and `dc_knobs_cifar10` stand in the place of D 8–11; in A14 and A15 "
        "only MiniLM's last layer and head learn, for one epoch, which a CPU can train.",
    ]
    return "\n".join(lines)


def sources(results: Path = RESULTS) -> str:
    """Which command, at which commit, on which machine made each file."""
    lines = ["| file | command | commit | machine | rows |", "|---|---|---|---|---|"]
    for name in RECIPES:
        made: dict[tuple[Any, ...], int] = {}
        for row in rows_of(name, results):
            key = (row["command"], row["commit"], f"{row['machine']}, torch {row['torch']}")
            made[key] = made.get(key, 0) + 1
        lines += [f"| {name}.json | `{a}` | {b} | {c} | {n} |" for (a, b, c), n in made.items()]
    return "\n".join(lines)


def pictures() -> str:
    """What is drawn, and from which file."""
    lines = ["| figure | what it shows | drawn from |", "|---|---|---|"]
    for name, (result, paint) in DRAWN.items():
        shown = (paint.__doc__ or "").strip().splitlines()[0]
        lines.append(f"| [{name}](../docs/figures/{name}.svg) | {shown} | {result}.json |")
    return "\n".join(lines)


def text(results: Path = RESULTS) -> str:
    """The whole page."""
    parts = {
        "Claims": "From the numbers below. Differences are paired by seed, with 95% intervals by Student's t; of "
        "twenty such intervals one misses the truth by chance.\n\n" + claims_table(claims(results)),
        "P table 2, A table 1": TABLES["P2"](results=results),
        "P table 2 on features at other learning rates": TABLES["features"](results=results),
        "imagenette with other images and another head (seed 0)": TABLES["imagenette"](results=results),
        "P figure 4 in numbers (Fashion-MNIST, one seed)": TABLES["P4"](results=results),
        "P table 3, A table 2: SST-2": TABLES["P3"](results=results),
        "A table 4: E2E at (8, 8e-6)": TABLES["A4"](results=results),
        "D table VIII": TABLES["D8"](results=results),
        "D tables II and III: the search for C, paid for": DC_TABLES["D2"](results),
        "D table I: how long a search takes": DC_TABLES["D1"](results),
        "D tables IV and V: other clip norms and percentiles": DC_TABLES["D4"](results),
        "NAMES at ε = 8, one choice changed at a time": DC_TABLES["names"](results),
        "NAMES at ε = 8, Abadi, 32 states a layer, on a CPU": DC_TABLES["names_narrow"](results),
        "Beyond the papers: Adult": TABLES["adult"](results=results),
        "Beyond the papers: several views of each example (MNIST, ε = 3, 10 epochs)": TABLES["copies"](results=results),
        "Several views with one choice changed (MNIST, ε = 3, 3 epochs)": TABLES["views"](results=results),
        "Best recipes at (3, 1e-5)": TABLES["best"](results=results),
        "What they were chosen from": TABLES["choice"](results=results),
        "Where we and the papers lie apart": causes(results),
        "Figures": "`python -m experiments figure NAME` draws one, as PNG and SVG.\n\n" + pictures(),
        "Runs trained again": "In the seeded mode, by `python -m experiments again NAME`. Where the commits "
        "differ, so may the order in which the engine adds; and since 8505df3 the noise and the batches of a seed are "
        "others on a CPU, so that a CPU run of before is repeated with the code of its own commit.\n\n"
        + again_table(results),
        "Not run": missing(results),
        "Commands": sources(results),
    }
    head = (
        "# Results\n\nWritten by `python -m experiments results` from `experiments/results/*.json`, which hold every "
        "run. Ours: mean ± standard deviation over n seeds, in percent. Runs are seeded, which makes them repeatable "
        "and NOT PRIVATE: right for public data, and for nothing else. P, A and D are the papers on DP-PSAC, automatic "
        "clipping and DC-SGD ([references](../docs/references.md)). An empty column of pairs means fewer than three."
    )
    return "\n\n".join([head, *(f"## {title}\n\n{body}" for title, body in parts.items())]) + "\n"


def write(path: Path = REPORT, results: Path = RESULTS) -> Path:
    """Write the page."""
    path.write_text(text(results))
    return path
