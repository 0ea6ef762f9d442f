"""Colors and panels that all figures share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

COLORS = ("#3465a4", "#cc5500", "#4e9a06")
LINES = ("#555555", "#3465a4", "#729fcf", "#4e9a06", "#cc5500", "#75507b")


def panels(count: int, **options: Any) -> Any:
    """A figure with `count` axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * count, 3.6))
    return figure, figure.subplots(1, count, squeeze=False, **options)[0]


def heatmap(axis: Any, grid: Sequence[Sequence[float]], low: float, high: float) -> None:
    """Numbers on colors; an empty cell is a run that there is not."""
    axis.imshow(grid, origin="lower", cmap="viridis", vmin=low, vmax=high, aspect="auto")
    for i, row in enumerate(grid):
        for j, value in enumerate(row):
            color = "white" if value < (low + high) / 2 + 5 else "black"
            shown = "" if math.isnan(value) else f"{value:.1f}"
            axis.text(j, i, shown, ha="center", va="center", fontsize=8, color=color)
