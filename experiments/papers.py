"""What the papers print, to stand beside our numbers: (mean, spread) in percent, as published.

P: DP-PSAC (mean ± standard deviation of five runs). A: automatic clipping. D: DC-SGD, table VIII (Adam).
"""

from __future__ import annotations

Printed = dict[str, tuple[float, float | None]]

PRINTED: dict[str, Printed] = {
    "mnist": {"abadi": (98.12, 0.07), "auto-s": (98.17, 0.07), "psac": (98.24, 0.07), "non-private": (99.11, None)},
    "fashion_mnist": {
        "abadi": (86.22, 0.29),
        "auto-s": (86.30, 0.21),
        "psac": (86.56, 0.16),
        "non-private": (89.57, None),
    },
    "mnist_dc": {"abadi": (94.78, None), "dc-sgd-p": (94.72, None), "dc-sgd-e": (94.04, None), "auto-s": (96.54, None)},
    "cifar10_dc": {
        "abadi": (53.81, None),
        "dc-sgd-p": (54.18, None),
        "dc-sgd-e": (53.76, None),
        "auto-s": (53.67, None),
    },
    "names_dc": {"abadi": (59.91, None), "dc-sgd-p": (60.96, None), "dc-sgd-e": (60.71, None), "auto-s": (56.34, None)},
}
TASKS = {
    "mnist": "MNIST, 4-layer CNN, (3, 1e-5)",
    "fashion_mnist": "Fashion-MNIST, 4-layer CNN, (3, 1e-5)",
    "mnist_dc": "MNIST, CNN of 28,058 parameters, ε = 1",
    "cifar10_dc": "CIFAR-10, ResNet18, ε = 8",
    "names_dc": "NAMES, LSTM, ε = 8",
}
LABELS = {
    "abadi": "Abadi",
    "auto-s": "AUTO-S",
    "auto-v": "AUTO-V",
    "psac": "PSAC",
    "quantile": "quantile",
    "dc-sgd-p": "DC-SGD-P",
    "dc-sgd-e": "DC-SGD-E",
    "non-private": "not private",
}
