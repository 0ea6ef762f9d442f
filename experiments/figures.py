"""Figures, drawn from result files only: `python -m experiments figure D2` writes a PNG and an SVG."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .results_io import RESULTS, load

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
COLORS = ("#3465a4", "#cc5500", "#4e9a06")


def draw(name: str, results: Path = RESULTS, out: Path = FIGURES) -> list[Path]:
    """Draw one figure; returns the files."""
    if name not in DRAWN:
        raise ValueError(f"Unknown figure {name!r}; there are {', '.join(DRAWN)}.")
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "clipwise"})
    result, paint = DRAWN[name]
    figure = paint(load(result, results))
    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{name}.{kind}" for kind in ("png", "svg")]
    for path in paths:
        figure.savefig(path, dpi=120, bbox_inches="tight", metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths


def _panels(count: int, **options: Any) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * count, 3.6))
    return figure, figure.subplots(1, count, **options)


def percentile_figure(found: dict[str, Any]) -> Any:
    """DC-SGD, figure 2: C against the percentile, one panel per number of bins."""
    bins = sorted({curve["bins"] for curve in found["curves"]})
    figure, axes = _panels(len(bins), sharey=True)
    for axis, number in zip(axes, bins, strict=True):
        curves = [c for c in found["curves"] if c["bins"] == number]
        points = [row["p"] for row in curves[0]["rows"]]
        for color, curve in zip(COLORS, curves, strict=True):
            rows = curve["rows"]
            axis.plot(points, [r["median"] for r in rows], color=color, label=f"σ_H = {curve['noise']:g}")
            axis.fill_between(
                points, [r["low"] for r in rows], [r["high"] for r in rows], color=color, alpha=0.15, lw=0
            )
        axis.plot(points, [row["truth"] for row in curves[0]["rows"]], "k--", label="true percentile")
        axis.set(title=f"b = {number} bins", xlabel="percentile p")
    axes[0].set_ylabel("clip norm C")
    axes[0].legend(frameon=False)
    figure.suptitle(f"DC-SGD-P on 256 draws of N(100, 20²): median and 5–95% of {found['trials']} trials", y=1.02)
    return figure


def error_figure(found: dict[str, Any]) -> Any:
    """DC-SGD, figure 3: expected squared error against C, exact and as noisy histograms show it."""
    bins = sorted({curve["bins"] for curve in found["curves"]})
    figure, axes = _panels(len(bins), sharey=True)
    for axis, number in zip(axes, bins, strict=True):
        for color, curve in zip(COLORS, [c for c in found["curves"] if c["bins"] == number], strict=True):
            axis.plot(found["grid"], curve["median"], color=color, label=f"σ_H = {curve['noise']:g}")
            axis.fill_between(found["grid"], curve["low"], curve["high"], color=color, alpha=0.15, lw=0)
            axis.axvline(curve["chosen"]["median"], color=color, lw=0.8, ls=":")
        axis.plot(found["grid"], found["exact"], "k--", label="exact")
        axis.set(title=f"b = {number} bins", xlabel="clip norm C", ylim=(0, 1.4 * max(found["exact"][-1], 1)))
    axes[0].set_ylabel("expected squared error")
    axes[0].legend(frameon=False, loc="lower right")
    figure.suptitle("DC-SGD-E: σ_T = 1, B = 256, d = 100,000, R = 120; dotted: the C that is chosen", y=1.02)
    return figure


def convergence_figure(found: dict[str, Any]) -> Any:
    """C_t over a run on digits, one panel per threshold."""
    names = list(dict.fromkeys(curve["threshold"] for curve in found["curves"]))
    figure, axes = _panels(len(names), sharey=True)
    for axis, name in zip(axes, names, strict=True):
        for curve in (c for c in found["curves"] if c["threshold"] == name):
            color = COLORS[[0.01, 1.0, 100.0].index(curve["initial"])]
            label = f"C_0 = {curve['initial']:g}" if curve["seed"] == 0 else None
            axis.plot(range(len(curve["clip_norms"])), curve["clip_norms"], color=color, lw=0.9, alpha=0.8, label=label)
        axis.set(title=name, xlabel="step", yscale="log")
    axes[0].set_ylabel("clip norm C")
    axes[0].legend(frameon=False, loc="center right")
    figure.suptitle(f"Digits at ε = {found['epsilon']:g}: the clip norm over the run, three runs each", y=1.02)
    return figure


DRAWN: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "D2": ("percentiles", percentile_figure),
    "D3": ("errors", error_figure),
    "thresholds": ("thresholds", convergence_figure),
}
