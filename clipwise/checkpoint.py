"""Checkpoints: weights, optimizer, threshold and plan. The ledger stays its own file and always wins.

One safetensors file: tensors as they are, everything else as JSON in its header. Loading runs no code (no pickle). A
checkpoint holds no key, no coins and no batch: a resumed run draws everything anew.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._check import count
from .batch import map_tensors
from .errors import CheckpointError, LedgerError, PlanMismatch
from .ledger import Ledger
from .thresholds import State
from .training import PrivateTraining

FORMAT = "clipwise 1"


def save_checkpoint(training: PrivateTraining, path: str | Path) -> None:
    """Write a checkpoint atomically: an old one stays whole until the new one is on disk.

    A run whose ledger lives in memory can be saved, but not resumed: what it spent dies with its process. On several
    processes call it on every rank; the first one writes.
    """
    whole = training._ranks.whole
    states = [map_tensors(part.state_dict(), whole) for part in (training.model, training.optimizer)]

    def write() -> bool:
        tensors: dict[str, Tensor] = {}
        content = {
            "model": _encoded(states[0], "model", tensors),
            "optimizer": _encoded(states[1], "optimizer", tensors),
            "threshold": asdict(training.threshold_state),
            "plan": training.plan.digest,
            "ledger": training.ledger.position if training.ledger.persistent else None,
        }
        _write(Path(path), tensors, content)
        return True

    training._ranks.lead(write)


def _write(path: Path, tensors: dict[str, Tensor], content: dict[str, Any]) -> None:
    from safetensors.torch import save

    raw = save(tensors, {"format": FORMAT, "content": json.dumps(content)})
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(draft, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def load_checkpoint(training: PrivateTraining, path: str | Path) -> None:
    """Restore weights, optimizer and threshold into a run made with the same plan and ledger.

    Guarantee: ε never falls. The ledger must have passed through the state that the checkpoint remembers; steps
    charged since then stay charged. A file that is refused leaves the run as it was.
    """
    content = read_checkpoint(path)
    if content["plan"] != training.plan.digest:
        raise PlanMismatch(f"Checkpoint {path} belongs to another plan. Resume with the plan that it was saved under.")
    training._ranks.lead(lambda: _check_ledger(training.ledger, content, path))
    threshold = _check_fit(training, content, path)
    before = training.optimizer.state_dict(), {n: x.clone() for n, x in training.model.state_dict().items() if _is(x)}
    _divide(training, content)
    try:
        training.optimizer.load_state_dict(content["optimizer"])
        training.model.load_state_dict(content["model"])
    except Exception as error:
        training.optimizer.load_state_dict(before[0])
        training.model.load_state_dict(before[1], strict=False)
        raise CheckpointError(f"Checkpoint {path} does not fit this model or optimizer: {error}") from error
    if training.plan.release is not None:  # others follow from the number of charges, which the ledger knows better
        training._restore_threshold(threshold)


def _divide(training: PrivateTraining, content: dict[str, Any]) -> None:
    """Of every tensor, this rank's part."""
    part, mine = training._ranks.part, training.model.state_dict()
    content["model"] = {n: part(x, mine[n]) if _is(x) else x for n, x in content["model"].items()}
    parameters = [p for group in training.optimizer.param_groups for p in group["params"]]
    for number, state in content["optimizer"]["state"].items():
        for name, x in state.items():
            if _is(x) and x.shape == parameters[number].shape:
                state[name] = part(x, parameters[number])


def _check_ledger(ledger: Ledger, content: dict[str, Any], path: str | Path) -> bool:
    if content["ledger"] is None:
        raise LedgerError(
            f"Checkpoint {path} was saved by a run whose ledger lived in memory: what it had spent is lost, so it "
            "cannot be resumed under this plan. Give privatize() a ledger path next time."
        )
    if not ledger.persistent:
        raise LedgerError(
            f"This run's ledger lives in memory, so it cannot know what the run of checkpoint {path} had spent. Give "
            "privatize() the path of the ledger that it wrote."
        )
    if not ledger.holds(content["ledger"]):
        raise LedgerError(
            f"Ledger {ledger.path} is older than checkpoint {path}, or is another one: going on would forget "
            "what was spent. Restore the ledger that the run wrote."
        )
    return True


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint file, or CheckpointError. No code of the file is run."""
    from safetensors import safe_open

    if not Path(path).exists():
        raise CheckpointError(f"There is no checkpoint at {path}.")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not a checkpoint of clipwise, or of another version of it.")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        content = json.loads(header["content"])
        found = {part: _decoded(content[part], tensors) for part in ("model", "optimizer")}
        if not all(isinstance(tree, dict) for tree in found.values()) or not all(map(_is_text, found["model"])):
            raise ValueError("weights or optimizer are not what they should be")
        if (position := content["ledger"]) is not None:
            position = {"lines": count(lines=position["lines"]), "hash": str(position["hash"])}
        return {**found, "threshold": content["threshold"], "plan": str(content["plan"]), "ledger": position}
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged file leads to
        raise CheckpointError(
            f"Checkpoint {path} cannot be read ({type(error).__name__}: {error}). It is damaged or something else; "
            "use an earlier one. The ledger still knows what was spent."
        ) from error


def _is(x: Any) -> bool:
    return isinstance(x, Tensor)


def _is_text(x: Any) -> bool:
    return isinstance(x, str)


def _check_fit(training: PrivateTraining, content: dict[str, Any], path: str | Path) -> State:
    """Before anything is changed: the same names, shapes and settings, and a threshold that belongs to the plan."""
    mine, saved = training.model.state_dict(), content["model"]
    wrong = sorted(mine.keys() ^ saved.keys())
    wrong += [n for n in mine.keys() & saved.keys() if getattr(mine[n], "shape", 0) != getattr(saved[n], "shape", 0)]
    if wrong:
        raise CheckpointError(f"Checkpoint {path} was saved from another model: {', '.join(wrong[:5])} differ.")
    try:
        _check_optimizer(training.optimizer, content["optimizer"])
        threshold = State(**content["threshold"])
        if (threshold.range > 0) != (training.threshold_state.range > 0):
            raise ValueError(f"{threshold!r} does not belong to {training.plan.threshold!r}")
    except Exception as error:
        raise CheckpointError(f"Checkpoint {path} does not fit this optimizer or threshold: {error}") from error
    return threshold


def _check_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Settings of the same kinds, and a state for each parameter with its shape or a single number."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for mine, theirs in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for name in mine.keys() - {"params"}:
            if name not in theirs or not _alike(mine[name], theirs[name]):
                raise ValueError(f"its setting {name} is {theirs.get(name)!r}, where this one's is {mine[name]!r}")
    for number, state in saved["state"].items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameters[number].shape:
                raise ValueError(f"its {name} has the shape {tuple(value.shape)}")


def _alike(mine: Any, theirs: Any) -> bool:
    """Numbers for numbers, and everything else of the same type."""
    numbers = (bool, int, float)
    if isinstance(mine, (*numbers, Tensor)):
        return isinstance(theirs, (*numbers, Tensor))
    if isinstance(mine, (list, tuple)):
        return isinstance(theirs, (list, tuple)) and len(mine) == len(theirs) and all(map(_alike, mine, theirs))
    return type(mine) is type(theirs) or mine is None or theirs is None


def _encoded(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A tree of tensors and plain values as JSON; its tensors go into `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach().cpu().contiguous().clone()  # tied weights share memory; files do not
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[_encoded(k, name, tensors), _encoded(v, f"{name}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        items = [_encoded(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise CheckpointError(
        f"{name} holds a {type(value).__name__}, which cannot be saved without running code when it is loaded. "
        "Keep tensors, numbers and texts in the state of model and optimizer."
    )


def _decoded(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decoded(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "tuple":
        return tuple(_decoded(v, tensors) for v in inner)
    return {_decoded(k, tensors): _decoded(v, tensors) for k, v in inner}
