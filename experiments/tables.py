"""Tables, drawn from result files only: `python -m experiments table tuning`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .papers import A4, A4_SCRATCH, BEYOND, D8, LABELS, NAMES_RATE, NAMES_READ, P2, P3, RESNET_READ, WANTED, Cell
from .recipes import NON_PRIVATE
from .results_io import RESULTS, load
from .runs import rows_of
from .sweeps import (
    BEST,
    COPIES,
    FEATURE_RATES,
    FEATURE_RULES,
    IMAGENETTE_CHANGES,
    KNOBS,
    RATES,
    VIEWS,
    WITHOUT,
    choice,
    copies_settings,
)


def tuning_table(results: Path = RESULTS) -> str:
    """Tuning-free methods against tuned Abadi, in Markdown."""
    found = load("tuning", results)
    lines = ["| method | noise multiplier of a run | test accuracy | n |", "|---|---|---|---|"]
    for name, row in found["rows"].items():
        lines.append(f"| {name} | {row['noise_multiplier']:.2f} | {_mean(row['accuracy'])} | {len(row['accuracy'])} |")
    unpaid = {c: statistics.mean(values) for c, values in found["unpaid"].items()}
    best, worst = max(unpaid, key=unpaid.__getitem__), min(unpaid, key=unpaid.__getitem__)
    sigma = found["rows"]["PSAC"]["noise_multiplier"]
    for label, c in (("best", best), ("worst", worst)):
        name = f"Abadi at the {label} of ten C ({c}), tuning NOT paid for: not private at this ε"
        lines.append(f"| {name} | {sigma:.2f} | {_mean(found['unpaid'][c])} | {len(found['unpaid'][c])} |")
    return "\n".join(lines)


def _mean(values: list[float]) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{100 * statistics.mean(values):.1f}% ± {100 * spread:.1f}"


def models_table(results: Path = RESULTS) -> str:
    """Which models can be trained, with the error of each."""
    found = load("models", results)
    lines = ["| model | norms | clipped sum | |", "|---|---|---|---|"]
    for name, row in found["rows"].items():
        if "refused" in row:
            why = row["refused"].split(", for which")[0].split(". ")[0].rstrip(",")
            lines.append(f"| {name} | | | refused: {why} |")
        else:
            lines.append(f"| {name} | {row['norms']:.0e} | {row['sum']:.0e} | |")
    return "\n".join(lines)


def accuracies(recipe: str, method: str, settings: Mapping[str, Any], results: Path = RESULTS) -> dict[int, float]:
    """Percent by seed, from a result file."""
    return by_seed(rows_of(recipe, results), method, settings)


def by_seed(rows: Iterable[Mapping[str, Any]], method: str, settings: Mapping[str, Any]) -> dict[int, float]:
    """Percent by seed, of the device that has most runs; without privacy there is no ε to match."""
    rows = _alike(rows, method, settings)
    device = main_device(rows)
    return {r["seed"]: 100 * r["accuracy"] for r in rows if r["device"] == device}


def _alike(rows: Iterable[Mapping[str, Any]], method: str, settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    wanted = {k: v for k, v in settings.items() if k != "epsilon" or method != NON_PRIVATE}
    return [r for r in rows if r["method"] == method and r["settings"] == wanted]


def main_device(rows: Iterable[Mapping[str, Any]]) -> str:
    """That of most runs."""
    devices = [r["device"] for r in rows]
    return max(devices, key=lambda d: (devices.count(d), d), default="")


def ran_on(recipe: str, method: str, settings: Mapping[str, Any], results: Path = RESULTS) -> str:
    """CPU or GPU: where the runs behind `accuracies` ran."""
    found = _alike(rows_of(recipe, results), method, settings)
    return _machine(main_device(found)) if found else ""


def devices_apart(names: Iterable[str], results: Path = RESULTS) -> dict[str, float]:
    """Points between the same run (recipe, method, settings, seed) on a CPU and on a GPU, wherever there are both."""
    found: dict[str, dict[str, float]] = {}
    for name in names:
        for r in rows_of(name, results):
            where = f"{name} {r['method']} {r['settings']} {r['seed']}"
            found.setdefault(where, {})[_machine(r["device"])] = 100 * r["accuracy"]
    return {where: one["CPU"] - one["GPU"] for where, one in found.items() if len(one) == 2}


def _machine(device: str) -> str:
    return "CPU" if device == "cpu" else "GPU"


def papers_table(cells: Sequence[Cell], results: Path = RESULTS) -> str:
    """Ours beside the papers', with n; PSAC is also compared with each other method seed by seed."""
    heads = ["printed in P", "printed in A"] if any(cell.automatic for cell in cells) else ["printed"]
    lines = [
        f"| task | method | ours | n | PSAC − method, pairs | {' | '.join(heads)} |",
        "|---" * (5 + len(heads)) + "|",
    ]
    for cell in cells:
        found = {method: accuracies(cell.recipe, method, cell.settings, results) for method in LABELS}
        for method, ours in found.items():
            printed = [of.get(method) for of in (cell.printed, cell.automatic)[: len(heads)]]
            if not ours and not any(printed):
                continue
            pairs = [found["psac"][s] - v for s, v in ours.items() if s in found["psac"] and method != "psac"]
            shown = " | ".join("" if one is None else _printed(*one) for one in printed)
            lines.append(
                f"| {cell.label} | {LABELS[method]} | {spread(ours.values())} | {len(ours)} | {interval(pairs)} | "
                f"{shown} |"
            )
    return "\n".join(lines)


def heatmap_cells(rows: Sequence[Mapping[str, Any]], method: str) -> dict[tuple[float, float], float]:
    """P figure 4: percent by (learning rate, knob), seed 0."""
    knob, values = KNOBS[method]
    return {
        (rate, value): found[0]
        for rate in RATES
        for value in values
        if 0 in (found := by_seed(rows, method, {"lr": rate, knob: value}))
    }


def knob_spreads(cells: Mapping[tuple[float, float], float]) -> list[float]:
    """For every learning rate, how far the accuracies over the knob lie apart."""
    by_rate = [[v for (r, _), v in cells.items() if r == rate] for rate in RATES]
    return [max(values) - min(values) for values in by_rate if values]


def tuned(cells: Mapping[tuple[float, float], float]) -> dict[float, float]:
    """For every value of the knob, the accuracy at its own best learning rate."""
    return {value: max(v for (_, k), v in cells.items() if k == value) for value in dict.fromkeys(k for _, k in cells)}


def heatmap_table(results: Path = RESULTS) -> str:
    """P figure 4 in numbers."""
    lines = [
        "| method | knob | best cell | worst cell | spread over the knob: at the best lr | mean over all lr | "
        "lr tuned for each value | cells within 1 point of the best |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rows = rows_of("fashion_mnist", results)
    for method, (knob, values) in KNOBS.items():
        cells = heatmap_cells(rows, method)
        if not cells:
            lines.append(f"| {LABELS[method]} | {knob} | not run | | | | | |")
            continue
        best = max(cells, key=cells.__getitem__)
        at_best = [v for (rate, _), v in cells.items() if rate == best[0]]
        near = sum(v >= cells[best] - 1 for v in cells.values())
        lines.append(
            f"| {LABELS[method]} | {knob} from {values[0]:g} to {values[-1]:g} | {cells[best]:.1f} (lr {best[0]:g}, "
            f"{knob} {best[1]:g}) | {min(cells.values()):.1f} | {max(at_best) - min(at_best):.1f} | "
            f"{statistics.mean(knob_spreads(cells)):.1f} | {_range(tuned(cells)):.1f} | {near} of {len(cells)} |"
        )
    return "\n".join(lines)


def _range(found: Mapping[float, float]) -> float:
    return max(found.values()) - min(found.values())


def text_table(results: Path = RESULTS) -> str:
    """A table 4: BLEU and ROUGE-L on E2E."""
    lines = ["| method | BLEU | ROUGE-L | n |", "|---|---|---|---|"]
    rows = [r for r in rows_of("e2e", results) if not r["settings"]]
    for method in LABELS:
        if found := [r for r in rows if r["method"] == method]:
            bleu, rouge = (spread(r[k] for r in found) for k in ("bleu", "rouge_l"))
            lines.append(f"| {LABELS[method]}, decoder from scratch | {bleu} | {rouge} | {len(found)} |")
    for name, printed in (
        ("AUTO-S, GPT-2", A4),
        *((f"{LABELS[m]}, GPT-2 from scratch", scratch) for m, scratch in A4_SCRATCH.items()),
    ):
        lines.append(f"| printed: {name} | {' | '.join(_printed(*printed[k]) for k in ('bleu', 'rouge_l'))} | |")
    return "\n".join(lines)


def best_table(results: Path = RESULTS) -> str:
    """The best recipes, what each part of them brings, and the bars that were set beforehand."""
    lines = ["| recipe | run | accuracy | n | wanted |", "|---|---|---|---|---|"]
    for name in BEST:
        runs_: list[tuple[str, str, dict[str, Any]]] = [("PSAC", "psac", {})]
        runs_ += [(f"without {part}", "psac", change) for part, change in WITHOUT.items()]
        runs_ += [("Abadi at the same C", "abadi", {}), ("not private", NON_PRIVATE, {})]
        for label, method, settings in runs_:
            ours = accuracies(name, method, settings, results)
            wanted = f"≥ {WANTED[name]:g}" if label == "PSAC" else ""
            lines.append(f"| {name} | {label} | {spread(ours.values())} | {len(ours)} | {wanted} |")
    return "\n".join(lines)


def best_caveat(results: Path = RESULTS) -> str:
    """How the best recipes were chosen, and where their rate does not suit the run without privacy."""
    text = (
        "**Best recipes**: model and learning rate were chosen from the runs in table `choice`, with one seed, by test "
        "accuracy on these public benchmarks; on private data that search would have to be paid for. C, r, the "
        "averaging, batch and epochs were not searched."
    )
    for name in BEST:
        plain, ours = (accuracies(name, m, {}, results) for m in (NON_PRIVATE, "psac"))
        if plain and ours and (mean := statistics.mean(plain.values())) < statistics.mean(ours.values()):
            text += (
                f" Without privacy {name} trains at the private recipe's rate, which was not chosen for it, and ends "
                f"at {mean:.1f} (n = {len(plain)}), below the private runs: gradients that nobody clips make longer "
                "steps. "
                "No other rate was tried, so this row is no ceiling."
            )
    return text


def choice_table(results: Path = RESULTS) -> str:
    """The runs that the best recipes' model and learning rate were chosen from."""
    lines = ["| recipe | model | learning rate | accuracy, one seed |", "|---|---|---|---|"]
    for name, method, settings in choice():
        found = accuracies(name, method, settings, results)
        lines.append(f"| {name} | {settings['model']} | {settings['lr']:g} | {spread(found.values())} |")
    return "\n".join(lines)


def features_table(results: Path = RESULTS) -> str:
    """CIFAR-10 on features: whether the order of the rules is that of one learning rate."""
    heads = " | ".join(f"lr {rate:g}" for rate in FEATURE_RATES)
    lines = [f"| method | {heads} |", "|---" * (len(FEATURE_RATES) + 1) + "|"]
    for method in FEATURE_RULES:
        cells = []
        for rate in FEATURE_RATES:
            found = accuracies("cifar10_features", method, {} if rate == 4.0 else {"lr": rate}, results)
            cells.append(f"{spread(found.values())} (n = {len(found)})" if found else "not run")
        lines.append(f"| {LABELS[method]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def imagenette_table(results: Path = RESULTS) -> str:
    """Which choice moves the number without privacy, and which the cost of privacy, on seed 0."""
    lines = [
        "| images and network | PSAC | its best epoch | not private | what privacy costs |",
        "|---|---|---|---|---|",
    ]
    for label, settings in IMAGENETTE_CHANGES.items():
        ours, plain = (accuracies("imagenette", m, settings, results).get(0) for m in ("psac", NON_PRIVATE))
        last, top = ("not run" if v is None else f"{v:.2f}" for v in (ours, plain))
        best = best_epochs("psac", settings, results).get(0)
        cost = "" if ours is None or plain is None else f"{plain - ours:.2f}"
        lines.append(f"| {label} | {last} | {'' if best is None else f'{best:.2f}'} | {top} | {cost} |")
    return "\n".join(lines)


def best_epochs(method: str, settings: Mapping[str, Any], results: Path = RESULTS) -> dict[int, float]:
    """Percent by seed on imagenette after the epoch that tests best, chosen by the very test set: it flatters."""
    rows = [r for r in rows_of("imagenette", results) if "by_epoch" in r]
    return by_seed([r | {"accuracy": max(*r["by_epoch"], r["accuracy"])} for r in rows], method, settings)


def copies_table(results: Path = RESULTS) -> str:
    """What several moved views of each example bring."""
    return _views_table({str(k): copies_settings(k) for k in COPIES}, results)


def views_table(results: Path = RESULTS) -> str:
    """Which choice makes four views worse than one."""
    return _views_table(VIEWS, results)


def _views_table(kinds: Mapping[str, Mapping[str, Any]], results: Path) -> str:
    """Accuracies on MNIST, each kind against the first."""
    lines = ["| views | accuracy | n | views − one, pairs |", "|---|---|---|---|"]
    first = next(iter(kinds.values()))
    one = accuracies("mnist", "psac", first, results)
    for label, settings in kinds.items():
        found = accuracies("mnist", "psac", settings, results)
        pairs = [found[s] - one[s] for s in found if s in one and settings is not first]
        apart = interval(pairs) or ", ".join(f"{v:+.2f}" for v in pairs)
        lines.append(f"| {label} | {spread(found.values())} | {len(found)} | {apart} |")
    return "\n".join(lines)


def spread(given: Iterable[float]) -> str:
    """Mean and standard deviation."""
    values = list(given)
    if not values:
        return "not run"
    apart = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{apart}"


def interval(differences: list[float]) -> str:
    """Mean and 95% interval by Student's t; nothing for fewer than three pairs."""
    if len(differences) < 3:
        return ""
    from scipy import stats

    half = stats.t.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{statistics.mean(differences):+.2f} ± {half:.2f}"


def _printed(mean: float, spread: float | None) -> str:
    return f"{mean:.2f}" if spread is None else f"{mean:.2f} ± {spread:.2f}"


TABLES: dict[str, Callable[..., str]] = {
    "tuning": tuning_table,
    "models": models_table,
    "P2": partial(papers_table, P2),
    "P3": partial(papers_table, P3),
    "P4": heatmap_table,
    "A4": text_table,
    "D8": partial(papers_table, (*D8, NAMES_READ, NAMES_RATE, *RESNET_READ)),
    "adult": partial(papers_table, BEYOND),
    "best": best_table,
    "choice": choice_table,
    "copies": copies_table,
    "views": views_table,
    "features": features_table,
    "imagenette": imagenette_table,
}
