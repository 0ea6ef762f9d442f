"""What the papers print, to stand beside our numbers: (mean, spread) in percent, as published.

P: DP-PSAC (mean ± standard deviation of five runs). A: automatic clipping (mean ± 95% interval of five runs; tables 1
and 4). D: DC-SGD, table VIII (Adam). P gives no number without privacy: those of its tasks are A's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .sweeps import EXAMPLE, QUARTERS, SCALED, TINY

Printed = dict[str, tuple[float, float | None]]


@dataclass(frozen=True)
class Cell:
    """One task of a table: the recipe and settings that make our numbers, and the papers' numbers."""

    recipe: str
    label: str
    printed: Printed
    settings: dict[str, Any] = field(default_factory=dict)
    automatic: Printed = field(default_factory=dict)  # A's numbers for a task of P

    @property
    def plain(self) -> float:
        """What is printed without privacy."""
        return self.automatic["non-private"][0]


def _levels(
    recipe: str, label: str, printed: dict[str, tuple[float, ...]], levels: tuple[float, ...]
) -> tuple[Cell, ...]:
    """One cell for each ε."""
    return tuple(
        Cell(recipe, f"{label}, ε = {e:g}", {m: (v[i], None) for m, v in printed.items()}, {"epsilon": e})
        for i, e in enumerate(levels)
    )


def _both(of_p: tuple[tuple[float, float | None], ...], of_a: tuple[tuple[float, float], ...]) -> dict[str, Printed]:
    """Abadi, AUTO-S and PSAC as P prints them; Abadi, AUTO-S and no privacy as A does."""
    return {
        "printed": dict(zip(("abadi", "auto-s", "psac"), of_p, strict=True)),
        "automatic": dict(zip(("abadi", "auto-s", "non-private"), of_a, strict=True)),
    }


_IMAGENETTE = _both(((63.66, 0.05), (63.44, 0.24), (64.00, 0.16)), ((60.29, 0.53), (60.71, 0.48), (71.11, 0.37)))
P2 = (
    Cell(
        "mnist",
        "MNIST, 4-layer CNN, (3, 1e-5)",
        **_both(((98.12, 0.07), (98.17, 0.07), (98.24, 0.07)), ((98.04, 0.09), (98.15, 0.07), (99.11, 0.07))),
    ),
    Cell(
        "fashion_mnist",
        "Fashion-MNIST, 4-layer CNN, (3, 1e-5)",
        **_both(((86.22, 0.29), (86.30, 0.21), (86.56, 0.16)), ((86.04, 0.26), (86.36, 0.18), (89.57, 0.13))),
    ),
    Cell(
        "cifar10_features",
        "CIFAR-10, linear on ResNet-50's features at 64 pixels (stands in for SimCLRv2), (2, 1e-5)",
        **_both(((92.47, 0.07), (92.72, 0.16), (92.78, 0.13)), ((92.44, 0.13), (92.70, 0.02), (94.42, 0.01))),
    ),
    Cell(
        "imagenette",
        "imagenette at 96 pixels, ResNet9, (8, 1e-4)",
        **_IMAGENETTE,
    ),
    Cell(
        "imagenette",
        "imagenette at 32 pixels, ResNet9 whose head sees quarters of the image, (8, 1e-4)",
        settings=TINY | QUARTERS,
        **_IMAGENETTE,
    ),
    Cell(
        "celeba_smiling",
        "CelebA Smiling, ResNet9, (8, 5e-6)",
        **_both(((91.17, None), (91.10, None), (91.41, None)), ((90.75, 0.11), (91.08, 0.08), (92.61, 0.20))),
    ),
    Cell(
        "celeba_male",
        "CelebA Male, ResNet9, (8, 5e-6)",
        **_both(((95.46, None), (95.48, None), (95.57, None)), ((95.54, 0.14), (95.70, 0.07), (97.90, 0.04))),
    ),
    Cell(
        "celeba_all",
        "CelebA, 40 labels, ResNet9, (8, 5e-6)",
        **_both(((88.56, None), (88.49, None), (88.69, None)), ((87.52, 0.15), (87.58, 0.04), (90.30, 0.02))),
    ),
)
FEATURES, IMAGENETTE, IMAGENETTE_32 = (c for c in P2 if c.recipe in ("cifar10_features", "imagenette"))
A4: Printed = {"bleu": (63.6, None), "rouge_l": (67.07, None)}  # GPT-2, AUTO-S, ε = 8
A4_SCRATCH: dict[str, Printed] = {  # GPT-2 without its pretraining, with Abadi at ε = 8 and without privacy
    "abadi": {"bleu": (24.247, None), "rouge_l": (39.951, None)},
    "non-private": {"bleu": (65.731, None), "rouge_l": (68.751, None)},
}
P3 = _levels(
    "sst2",
    "SST-2, MiniLM (stands in for RoBERTa-base)",
    {"abadi": (91.86, 92.09), "auto-s": (92.32, 92.43), "psac": (92.43, 92.55)},
    (3.0, 8.0),
)
D8 = (
    *_levels(
        "mnist_dc",
        "MNIST, CNN of 28,058 parameters",
        {
            "abadi": (94.78, 95.62, 95.95),
            "dc-sgd-p": (94.72, 95.08, 95.60),
            "dc-sgd-e": (94.04, 94.19, 94.65),
            "auto-s": (96.54, 96.83, 97.21),
        },
        (1.0, 2.0, 4.0),
    ),
    *_levels(
        "cifar10_dc",
        "CIFAR-10, ResNet18",
        {
            "abadi": (48.34, 51.28, 53.81),
            "dc-sgd-p": (48.63, 51.46, 54.18),
            "dc-sgd-e": (48.89, 51.42, 53.76),
            "auto-s": (48.10, 51.44, 53.67),
        },
        (2.0, 4.0, 8.0),
    ),
    *_levels(
        "names_dc",
        "NAMES, LSTM",
        {
            "abadi": (55.14, 57.24, 59.91),
            "dc-sgd-p": (55.55, 59.56, 60.96),
            "dc-sgd-e": (55.26, 58.56, 60.71),
            "auto-s": (54.48, 55.22, 56.34),
        },
        (2.0, 4.0, 8.0),
    ),
)
NAMES_READ = Cell(  # the task as Opacus' public example reads it
    "names_dc",
    "NAMES, LSTM, ε = 8, bytes between marks, the state after the padding (16 places)",
    D8[-1].printed,
    D8[-1].settings | EXAMPLE | {"model": "lstm-padding"},
)
NAMES_RATE = replace(  # 0.001 is Adam's default and not in D's grid of rates
    NAMES_READ,
    label=f"{NAMES_READ.label}, lr 0.00128, the next of the paper's grid",
    settings=NAMES_READ.settings | {"lr": 0.00128},
)
_RESNET = next(c for c in D8 if c.recipe == "cifar10_dc" and c.settings == {"epsilon": 8.0})
RESNET_READ = (  # knobs that D tunes, or does not name
    *(
        replace(
            _RESNET,
            label=f"{_RESNET.label}, p = {p}",
            printed={"dc-sgd-p": _RESNET.printed["dc-sgd-p"]},
            settings=_RESNET.settings | {"percentile": p},
        )
        for p in (0.3, 0.7)
    ),
    replace(
        _RESNET,
        label=f"{_RESNET.label}, C = 0.1",
        printed={"abadi": _RESNET.printed["abadi"]},
        settings=_RESNET.settings | {"clip_norm": 0.1},
    ),
    replace(
        _RESNET,
        label=f"{_RESNET.label}, γ = 1",
        printed={"auto-s": _RESNET.printed["auto-s"]},
        settings=_RESNET.settings | {"gamma": 1.0},
    ),
)
IMAGENETTE_READ = (
    replace(
        IMAGENETTE_32,
        label="imagenette at 32 pixels, the same with a norm after each sum, (8, 1e-4)",
        settings=TINY | SCALED,
    ),
    replace(
        IMAGENETTE_32,
        label="imagenette at 32 pixels, a norm after each sum, lr 0.004 falling to 0, (8, 1e-4)",
        settings=TINY | SCALED | {"lr": 4e-3, "decay": True},
    ),
)
BEYOND = (Cell("adult", "Adult census, logistic regression, (1, 1e-5)", {}),)
WANTED = {"mnist_best": 98.6, "fashion_mnist_best": 88.0, "cifar10_best": 65.0}  # of the best recipes, set beforehand
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
