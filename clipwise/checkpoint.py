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

from torch import Tensor

from .errors import CheckpointError, LedgerError, PlanMismatch
from .thresholds import State
from .training import PrivateTraining

FORMAT = "clipwise 1"


def save_checkpoint(training: PrivateTraining, path: str | Path) -> None:
    """Write a checkpoint atomically: an old one stays whole until the new one is on disk.

    A run whose ledger lives in memory can be saved, but not resumed: what it spent dies with its process.
    """
    from safetensors.torch import save

    path = Path(path)
    tensors: dict[str, Tensor] = {}
    content = {
        "model": _encoded(training.model.state_dict(), "model", tensors),
        "optimizer": _encoded(training.optimizer.state_dict(), "optimizer", tensors),
        "threshold": asdict(training.threshold_state),
        "plan": training.plan.digest,
        "ledger": training.ledger.position if training.ledger.persistent else None,
    }
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
    if content["ledger"] is None:
        raise LedgerError(
            f"Checkpoint {path} was saved by a run whose ledger lived in memory: what it had spent is lost, so it "
            "cannot be resumed under this plan. Give privatize() a ledger path next time."
        )
    if not training.ledger.holds(content["ledger"]):
        raise LedgerError(
            f"Ledger {training.ledger.path} is older than checkpoint {path}, or is another one: going on would forget "
            "what was spent. Restore the ledger that the run wrote."
        )
    _check_fit(training, content["model"], path)
    try:
        state = State(**content["threshold"])
        training.optimizer.load_state_dict(content["optimizer"])
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"Checkpoint {path} does not fit this optimizer or threshold: {error}") from error
    training.model.load_state_dict(content["model"])
    if training.plan.release is not None:  # others follow from the number of charges, which the ledger knows better
        training._restore_threshold(state)


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint file, or CheckpointError. No code of the file is run."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise CheckpointError(f"{path} is not a checkpoint of clipwise, or of another version of it.")
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        content = json.loads(header["content"])
        for part in ("model", "optimizer"):
            content[part] = _decoded(content[part], tensors)
        position = content["ledger"]
        if position is not None:
            content["ledger"] = {"lines": int(position["lines"]), "hash": str(position["hash"])}
        return {name: content[name] for name in ("model", "optimizer", "threshold", "plan", "ledger")}
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"Checkpoint {path} cannot be read ({type(error).__name__}: {error}). It is damaged or something else; "
            "use an earlier one. The ledger still knows what was spent."
        ) from error


def _check_fit(training: PrivateTraining, saved: dict[str, Any], path: str | Path) -> None:
    """Before anything is changed: the same names and shapes."""
    mine = training.model.state_dict()
    wrong = sorted(mine.keys() ^ saved.keys())
    wrong += [n for n in mine.keys() & saved.keys() if getattr(mine[n], "shape", 0) != getattr(saved[n], "shape", 0)]
    if wrong:
        raise CheckpointError(f"Checkpoint {path} was saved from another model: {', '.join(wrong[:5])} differ.")


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
