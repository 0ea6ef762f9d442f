"""Colors and panels that all figures share."""

from __future__ import annotations

from typing import Any

COLORS = ("#3465a4", "#cc5500", "#4e9a06")
LINES = ("#555555", "#3465a4", "#729fcf", "#4e9a06", "#cc5500", "#75507b")


def panels(count: int, **options: Any) -> Any:
    """A figure with `count` axes side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * count, 3.6))
    return figure, figure.subplots(1, count, squeeze=False, **options)[0]
