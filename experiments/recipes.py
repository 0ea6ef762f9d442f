"""One function per run: a data set, a model, the papers' settings, a method and a seed in; one result row out.

    recipe ─► plan (σ from ε) ─► privatize(seed=…) ─► all steps ─► accuracy on the public test set ─► a row

Rows of one seed share initial weights, batches and noise, so that methods can be compared in pairs. A seed makes a run
repeatable and NOT PRIVATE, which is right for public data and for nothing else.
"""

from __future__ import annotations

import dataclasses
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import clipwise as cw

from . import decoder, e2e, encoder, losses, models, scattering
from .datasets import BYTES, LETTERS, Data, Part, folders, load


@dataclass(frozen=True)
class Recipe:
    """The settings of one task. Everything here is public."""

    data: str
    model: str
    epochs: int
    batch_size: int
    lr: float
    epsilon: float
    delta: float
    clip_norm: float = 0.1
    optimizer: str = "sgd"
    accountant: str = "pld"
    r: float = 0.1  # of PSAC
    gamma: float = 0.01  # of AUTO-S
    percentile: float = 0.5  # of DC-SGD-P
    bins: int = 20  # of DC-SGD's histograms
    histogram_noise: float = 0.0  # of each bin; 0 leaves it to σ, as the paper does
    copies: int = 1  # augmented views per example, averaged before clipping
    ema: float = 0.0  # share that the averaged weights keep at every step
    flip: bool = True
    shift: int = 4  # pixels by which such a view may move
    edges: bool = False  # what moves in: the border once more, instead of 0
    channels: int = 1
    features: str = "pixels"  # or "scattering"
    groups: int = 27  # of channels, in which scattering features are standardised
    decay: bool = False  # of the learning rate, linearly to 0
    weight_decay: float = 0.0  # of AdamW
    search: str = ""  # the way in which a search is paid for: a method of clipwise.Search, or none
    searched: int = 1  # runs of that search, all with the same noise
    precision: str = "highest"  # of matrix products on a GPU; "high" is TF32; "bfloat16" runs the model in autocast
    microbatch: int = 0  # rows at a time, for memory's sake; 0 is the whole batch
    watch: int = 0  # steps between two looks at the length of the mean gradient, on public records; 0 is never

    def changed(self, settings: Mapping[str, Any]) -> Recipe:
        """With other settings, given as words on the command line."""
        kinds = {f.name: type(getattr(self, f.name)) for f in dataclasses.fields(self)}
        if unknown := settings.keys() - kinds.keys():
            raise SystemExit(f"No setting {', '.join(sorted(unknown))}; known: {', '.join(kinds)}.")
        return dataclasses.replace(self, **{k: _as(kinds[k], v) for k, v in settings.items()})


def _as(kind: type, value: Any) -> Any:
    return str(value).lower() in ("1", "true", "yes") if kind is bool else kind(value)


def _lstm(recipe: Recipe, data: Data, **options: Any) -> nn.Module:
    letters = BYTES if recipe.data == "names_bytes" else len(LETTERS) + 1
    return models.NamesLstm(letters, data.classes, **options)


MODELS: dict[str, Callable[[Recipe, Data], nn.Module]] = {
    "cnn": lambda recipe, data: models.paper_cnn(recipe.channels, data.classes),
    "resnet9": lambda recipe, data: models.resnet9(data.classes),
    "resnet9-scaled": lambda recipe, data: models.resnet9(data.classes, scaled=True),
    "resnet9-16-groups": lambda recipe, data: models.resnet9(data.classes, groups=16),
    "resnet9-2x2": lambda recipe, data: models.resnet9(data.classes, places=2),
    "resnet9-2x2-scaled": lambda recipe, data: models.resnet9(data.classes, scaled=True, places=2),
    "resnet18": lambda recipe, data: models.resnet18(data.classes),
    "resnet18-ws": lambda recipe, data: models.resnet18(data.classes, standardised=True),
    "resnet34": lambda recipe, data: models.resnet34(data.classes),
    "lstm": lambda recipe, data: _lstm(recipe, data),
    "lstm-one-hot": lambda recipe, data: _lstm(recipe, data, one_hot=True),
    "lstm-padding": lambda recipe, data: _lstm(recipe, data, padding=True),
    "lstm-narrow": lambda recipe, data: _lstm(recipe, data, width=32),
    "lstm-narrow-padding": lambda recipe, data: _lstm(recipe, data, width=32, padding=True),
    "logistic": lambda recipe, data: models.linear_probe(data.train[0].shape[1], data.classes),
    "flat": lambda recipe, data: models.flat_probe(data.train[0][0].numel(), data.classes),
    "small-cnn": lambda recipe, data: models.small_cnn(data.train[0].shape[1], data.train[0].shape[2], data.classes),
    "minilm": lambda recipe, data: encoder.classifier(data.classes),
    "minilm-last": lambda recipe, data: encoder.LastLayer(encoder.classifier(data.classes)),
    "decoder": lambda recipe, data: decoder.Decoder(data.classes, e2e.LENGTH),
}

_GLUE: tuple[tuple[Any, ...], dict[str, Any]] = ((0.1, "adamw", "rdp"), {"decay": True, "precision": "high"})
_LAST: dict[str, Any] = {"decay": True, "watch": 6}
RECIPES = {
    # P table 2, A table 1
    "mnist": Recipe("mnist", "cnn", 40, 512, 0.5, 3.0, 1e-5),
    "fashion_mnist": Recipe("fashion_mnist", "cnn", 40, 2048, 4.0, 3.0, 1e-5),
    "cifar10_features": Recipe("cifar10_resnet50", "logistic", 50, 1024, 4.0, 2.0, 1e-5),
    "imagenette": Recipe(
        "imagenette", "resnet9", 50, 1000, 5e-4, 8.0, 1e-4, 1.5, "nadam", precision="bfloat16", microbatch=144
    ),
    "celeba_smiling": Recipe("celeba_smiling", "resnet9", 10, 500, 1e-3, 8.0, 5e-6, 0.1, "adam", precision="high"),
    "celeba_male": Recipe("celeba_male", "resnet9", 10, 500, 1e-3, 8.0, 5e-6, 0.1, "adam", precision="high"),
    "celeba_all": Recipe("celeba_all", "resnet9", 10, 500, 1e-3, 8.0, 5e-6, 0.1, "adam", precision="high"),
    # D tables IV and VIII
    "mnist_dc": Recipe("mnist", "cnn", 10, 256, 1e-3, 1.0, 1 / 60_000, 1.0, "adam", "rdp", channels=3),
    "cifar10_dc": Recipe(
        "cifar10", "resnet18", 20, 256, 1e-3, 8.0, 1 / 50_000, 1.0, "adam", "rdp", precision="bfloat16"
    ),
    "names_dc": Recipe("names", "lstm", 20, 256, 1e-3, 8.0, 1 / 16_040, 1.0, "adam", "rdp"),
    # P table 3, A table 2: MiniLM stands in for RoBERTa
    "sst2": Recipe("sst2", "minilm", 3, 1000, 5e-4, 3.0, 1 / (2 * 67_349), *_GLUE[0], **_GLUE[1]),
    "sst2_last": Recipe("sst2_last", "minilm-last", 1, 1000, 5e-4, 3.0, 1 / (2 * 67_349), *_GLUE[0], **_LAST),
    "qnli": Recipe("qnli", "minilm", 6, 2000, 5e-4, 3.0, 1 / (2 * 104_743), *_GLUE[0], **_GLUE[1]),
    "qqp": Recipe("qqp", "minilm", 18, 6000, 5e-4, 3.0, 1 / (2 * 363_846), *_GLUE[0], **_GLUE[1]),
    "mnli": Recipe("mnli", "minilm", 18, 6000, 5e-4, 3.0, 1 / (2 * 392_702), *_GLUE[0], **_GLUE[1]),
    # A table 4: a small decoder from scratch stands in for GPT-2
    "e2e": Recipe(
        "e2e", "decoder", 10, 1024, 2e-3, 8.0, 8e-6, 0.1, "adamw", "rdp", weight_decay=0.01, precision="high"
    ),
    # beyond the papers: no threshold, rate or number of epochs was tuned on private data; these are public
    "mnist_best": Recipe("mnist", "small-cnn", 40, 4096, 4.0, 3.0, 1e-5, ema=0.95, features="scattering"),
    "fashion_mnist_best": Recipe("fashion_mnist", "flat", 40, 8192, 16.0, 3.0, 1e-5, ema=0.95, features="scattering"),
    "cifar10_best": Recipe("cifar10", "small-cnn", 60, 8192, 4.0, 3.0, 1e-5, ema=0.95, features="scattering"),
    "adult": Recipe("adult", "logistic", 10, 512, 1.0, 1.0, 1e-5, 1.0),
}

METHODS: dict[str, Callable[[Recipe], dict[str, Any]]] = {
    "psac": lambda c: {"rule": cw.PSAC(r=c.r), "threshold": cw.FixedThreshold(c.clip_norm)},
    "auto-s": lambda c: {"rule": cw.AutoS(gamma=c.gamma), "threshold": cw.FixedThreshold(c.clip_norm)},
    "auto-v": lambda c: {"rule": cw.AutoV(), "threshold": cw.FixedThreshold(c.clip_norm)},
    "abadi": lambda c: {"rule": cw.Abadi(), "threshold": cw.FixedThreshold(c.clip_norm)},
    "quantile": lambda c: {"rule": cw.Abadi(), "threshold": cw.QuantileThreshold(0.5, initial=c.clip_norm)},
    "dc-sgd-p": lambda c: {
        "rule": cw.Abadi(),
        "threshold": cw.PercentileThreshold(c.percentile, c.clip_norm, c.bins, c.histogram_noise or None),
    },
    "dc-sgd-e": lambda c: {
        "rule": cw.Abadi(),
        "threshold": cw.MinErrorThreshold(c.clip_norm, c.bins, c.histogram_noise or None),
    },
}
NON_PRIVATE = "non-private"


def losses_of(recipe: Recipe) -> Callable[[nn.Module, Any], Tensor]:
    """One loss per example; over several views of it, their mean."""

    def plain(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if recipe.copies > 1:
            x = models.flipped_and_shifted(x, recipe.copies, recipe.shift, recipe.flip, recipe.edges)
            found = losses.losses(model(x), y.repeat_interleave(recipe.copies, dim=0))
            return found.view(len(y), recipe.copies).mean(dim=1)
        return losses.losses(model(x), y)

    def cast(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            return plain(model, batch)

    return cast if recipe.precision == "bfloat16" else plain


def _optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=0.9)
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "nadam": torch.optim.NAdam, "adamw": torch.optim.AdamW}
    options = {"weight_decay": recipe.weight_decay} if recipe.optimizer == "adamw" else {}
    made: torch.optim.Optimizer = kinds[recipe.optimizer](model.parameters(), lr=recipe.lr, **options)
    return made


def _set_rate(recipe: Recipe, optimizer: torch.optim.Optimizer, step: int, steps: int) -> None:
    """Before step `step` of `steps`."""
    if recipe.decay:
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * (1 - step / steps)


@lru_cache(maxsize=1)
def _prepared(name: str, features: str, groups: int, channels: int, device: str, where: tuple[Path, ...]) -> Data:
    """A data set on its device, as the model takes it; the runs of one process share it."""
    data = load(name)
    parts = []
    for x, y in (data.train, data.test):
        x = x.to(device)
        if channels > x.shape[1] and x.dim() == 4:
            x = x.expand(-1, channels, -1, -1).contiguous()
        if features == "scattering":
            x = scattering.features(x, groups)
        parts.append((x, y.to(device)))
    return Data(parts[0], parts[1], data.classes)


def prepared(recipe: Recipe, device: str) -> Data:
    """The data of a recipe."""
    if recipe.features not in ("pixels", "scattering"):
        raise SystemExit(f"features must be pixels or scattering, not {recipe.features}.")
    return _prepared(recipe.data, recipe.features, recipe.groups, recipe.channels, device, tuple(folders()))


def plan_of(recipe: Recipe, method: str, size: int) -> cw.Plan:
    """Solves σ, for one run or so that a whole search of such runs stays within ε."""
    given: dict[str, Any] = {"size": size, "batch_size": recipe.batch_size, "epochs": recipe.epochs}
    given["delta"] = recipe.delta
    budget: dict[str, Any] = {"epsilon": recipe.epsilon}
    if recipe.search:
        search = cw.Search(runs=recipe.searched, method=recipe.search)
        whole = cw.TuningPlan.for_dataset(**given, epsilon=recipe.epsilon, search=search)
        budget = {"noise_multiplier": whole.noise_multiplier}
    return cw.Plan.for_dataset(**given, **budget, accountant=recipe.accountant, **METHODS[method](recipe))


def accuracy(model: nn.Module, part: Part, rows: int = 1_000) -> float:
    """On public records."""
    model.eval()
    right, asked = 0, 0
    with torch.no_grad():
        for start in range(0, len(part[1]), rows):
            x, y = (v[start : start + rows] for v in part)
            more, of = losses.right(model(x), y)
            right, asked = right + more, asked + of
    return right / asked


def mean_gradient(model: nn.Module, losses: Callable[[nn.Module, Any], Tensor], part: Part, rows: int = 256) -> float:
    """The length of the mean gradient, on public records."""
    loss = losses(model, tuple(v[:rows] for v in part)).mean()
    found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
    return float(f"{torch.stack([g.double().norm() for g in found]).norm():.5g}")


def balanced(model: nn.Module, part: Part, classes: int) -> float:
    """The mean over classes of the share that is found, on public records."""
    x, y = part
    with torch.no_grad():
        found = model.eval()(x).argmax(dim=1)
    return statistics.mean(float((found[y == k] == k).float().mean()) for k in range(classes) if (y == k).any())


@contextmanager
def products_in(precision: str) -> Iterator[None]:
    """Matrix products of float32 in a precision; afterwards as they were."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def run_one(recipe: Recipe, method: str, seed: int, device: str = "cpu", compile: bool = False) -> dict[str, Any]:
    """Train once; a row of the result file."""
    with products_in("high" if recipe.precision == "bfloat16" else recipe.precision):
        return _run_one(recipe, method, seed, device, compile)


def _run_one(recipe: Recipe, method: str, seed: int, device: str, compile: bool) -> dict[str, Any]:
    began = time.perf_counter()
    data = prepared(recipe, device)
    train, test = data.train, data.test
    torch.manual_seed(seed)
    model = MODELS[recipe.model](recipe, data).to(device)
    optimizer = _optimizer(recipe, model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.ema)) if recipe.ema else None
    row: dict[str, Any] = {"method": method, "seed": seed, "compiled": compile and method != NON_PRIVATE}
    steps = _plain_steps if method == NON_PRIVATE else _private_steps
    clip_norms: list[float] = []
    for step in _told(steps(recipe, method, seed, model, optimizer, train, compile, row), f"{method} seed {seed}", row):
        if average is not None:
            average.update_parameters(model)
        if recipe.watch and len(clip_norms) % recipe.watch == 0:
            row.setdefault("gradients", []).append(mean_gradient(model, losses_of(recipe), test))
        clip_norms.append(step)
        if recipe.data.startswith("imagenette") and len(clip_norms) % max(1, len(train[0]) // recipe.batch_size) == 0:
            row.setdefault("by_epoch", []).append(round(accuracy(model, test), 4))
            model.train()
    row["accuracy"] = accuracy(model if average is None else average, test)
    if recipe.data.startswith("names"):
        row["balanced"] = balanced(model, test, data.classes)
    if recipe.data == "e2e":
        row |= e2e.scores(model, device)
    if average is not None:
        row["accuracy_last"] = accuracy(model, test)
    if len(set(clip_norms)) > 1:
        row["clip_norms"] = [float(f"{c:.4g}") for c in clip_norms[:: max(1, len(clip_norms) // 100)]]
    row["seconds"] = round(time.perf_counter() - began, 1)
    row["machine"] = torch.cuda.get_device_name() if device.startswith("cuda") else platform.machine()
    row["torch"] = torch.__version__
    return row


def _told(steps: Iterator[float], name: str, row: Mapping[str, Any], every: float = 20.0) -> Iterator[float]:
    """The same steps; says on stderr, now and then, how far a run has come and how long a step takes."""
    told, last = time.perf_counter(), 0
    for number, step in enumerate(steps, 1):
        yield step
        if (now := time.perf_counter()) - told >= every:
            pace = 1e3 * (now - told) / (number - last)
            print(f"  {name}: step {number} of {row['steps']}, {pace:.0f} ms a step", file=sys.stderr, flush=True)
            told, last = now, number


def _private_steps(
    recipe: Recipe,
    method: str,
    seed: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Part,
    compile: bool,
    row: dict[str, Any],
) -> Iterator[float]:
    plan = plan_of(recipe, method, len(train[0]))
    row |= {"epsilon": plan.epsilon, "noise_multiplier": plan.noise_multiplier, "steps": plan.steps}
    rows = recipe.microbatch or None
    training = cw.privatize(model, optimizer, plan, losses_of(recipe), seed=seed, compile=compile, microbatch=rows)
    for step, batch in enumerate(training.batches(train)):
        _set_rate(recipe, optimizer, step, plan.steps)
        training.step(batch)
        yield training.clip_norm


def _plain_steps(
    recipe: Recipe,
    method: str,
    seed: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Part,
    compile: bool,
    row: dict[str, Any],
) -> Iterator[float]:
    """The same model, batches and epochs without clipping and noise; the step is scaled by C, as clipped ones are."""
    losses, generator = losses_of(recipe), torch.Generator().manual_seed(seed)
    size, steps = len(train[0]), recipe.epochs * len(train[0]) // recipe.batch_size
    scale = recipe.clip_norm if recipe.optimizer == "sgd" else 1.0
    row["steps"] = steps
    for step in range(steps):
        _set_rate(recipe, optimizer, step, steps)
        chosen = torch.randint(0, size, (recipe.batch_size,), generator=generator).to(train[0].device)
        optimizer.zero_grad()
        (scale * losses(model, tuple(v[chosen] for v in train)).mean()).backward()
        optimizer.step()
        yield scale
