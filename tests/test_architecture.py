"""DESIGN's import and access rules, read off the source with ast."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import clipwise

ROOT = Path(clipwise.__file__).parent
FILES = {str(path.relative_to(ROOT).with_suffix("")): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}

# Each file may import from the package only what stands here; `engine` and `accounting` are whole folders.
BASE = {"_check", "_types", "errors"}
ALLOWED = {
    "_check": set(),
    "_types": set(),
    "errors": set(),
    "_show": set(),
    "batch": {"errors"},
    "batch_norm": {"_check", "errors"},
    "rules": {"_check", "_types"},
    "thresholds": {"_check", "_types", "rules"},
    "chacha": set(),
    "native": set(),
    "chacha_cpu": {"chacha", "native"},
    "chacha_cuda": {"chacha"},
    "rounded": set(),
    "noise": {"_check", "chacha", "chacha_cpu", "chacha_cuda", "errors", "rounded"},
    "sampling": {"_check", "batch", "chacha", "errors"},
    "accounting": {"_check", "errors", "accounting"},
    "engine": BASE | {"batch", "engine", "native"},
    "plan": BASE | {"_show", "accounting", "rules", "thresholds"},
    "ledger_file": {"errors"},
    "ledger": {"_show", "errors", "ledger_file"},
    "tuning": BASE | {"_show", "accounting", "ledger", "plan", "sampling", "trials"},
    "trials": BASE | {"accounting", "evaluation", "ledger", "noise", "plan", "statement", "training"},
    "clipping": BASE | {"batch", "engine", "rules"},
    "threshold_check": {"thresholds"},
    "guard": {"errors", "ledger"},
    "statement": {"_show", "accounting", "clipping", "errors", "ledger", "noise", "plan"},
    "evaluation": BASE | {"batch", "engine", "guard", "sampling", "training"},
    "parts": BASE | {"engine", "noise", "plan", "thresholds"},
    "ranks": {"ledger", "noise"},
    "training": BASE
    | {"batch", "clipping", "engine", "guard", "ledger", "noise", "parts", "plan", "ranks", "rules", "sampling"}
    | {"statement", "thresholds"},
    "privatize": BASE
    | {"_show", "clipping", "engine", "guard", "ledger", "noise", "parts", "plan", "ranks", "sampling", "statement"}
    | {"training"},
    "checkpoint": BASE | {"batch", "ledger", "thresholds", "training"},
    "integrations": BASE
    | {"_show", "batch", "checkpoint", "clipping", "engine", "evaluation", "ledger", "noise", "plan", "privatize"}
    | {"integrations", "ranks", "sampling", "thresholds", "training"},
    "recipes": {
        "errors",
        "plan",
        "privatize",
        "recipes",
        "report",
        "rules",
        "statement",
        "thresholds",
        "training",
        "trials",
    },
    "cli": BASE
    | {"__init__", "_show", "accounting", "plan", "recipes", "report", "rules", "thresholds", "training"}
    | {"cli_audit", "cli_ledger", "cli_tuning"},
    "report": {"_show", "plan"},
    "audit": {"_check", "accounting"},
    "audit_training": BASE
    | {"accounting", "audit", "batch", "clipping", "noise", "plan", "privatize", "rules", "sampling", "training"},
    "cli_audit": {"audit", "audit_training", "plan", "rules", "thresholds"},
    "cli_ledger": {"_show", "accounting", "errors", "ledger_file"},
    "cli_tuning": BASE | {"_show", "accounting", "recipes", "rules", "tuning"},
}


def owner(name: str) -> str:
    return name.split("/")[0]


def package_imports(name: str, tree: ast.Module) -> set[str]:
    """Top-level members of clipwise that a file imports, by relative or absolute name."""
    folder = name.split("/")[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = folder[: len(folder) - (node.level - 1)]
                path = [*base, *(node.module or "").split(".")] if node.module else base
                targets = [[*path, alias.name] for alias in node.names] if not node.module else [path]
                found |= {t[0] if t and t[0] else "__init__" for t in targets}
            elif (node.module or "").split(".")[0] == "clipwise":
                found.add((node.module or "").split(".")[1])
    return {"__init__" if x == "__version__" else x for x in found}


def external_imports(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("name", FILES)
def test_imports_point_one_way(name):
    if name in ("__init__", "__main__"):
        return
    allowed = ALLOWED[owner(name)]
    assert package_imports(name, FILES[name]) <= allowed, f"{name} imports what it may not"


def test_accounting_does_not_import_torch():
    for name, tree in FILES.items():
        if owner(name) in ("accounting", "_check", "errors"):
            assert not any(m.split(".")[0] == "torch" for m in external_imports(tree)), name


def test_only_distributed_imports_torch_distributed():
    for name, tree in FILES.items():
        if name != "integrations/distributed":
            assert not any(m.startswith("torch.distributed") for m in external_imports(tree)), name
            assert "torch.distributed" not in ast.unparse(tree), name


DRAWING = {"rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "standard_normal", "random"}
DRAWING |= {"rand_like", "randn_like", "normal_", "uniform_", "bernoulli_", "token_bytes", "randbits", "urandom"}


def calls(tree: ast.Module) -> set[str]:
    return {
        node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }


def test_only_noise_and_sampling_draw():
    for name, tree in FILES.items():
        if name not in ("noise", "sampling"):
            drawn = calls(tree) & DRAWING
            drawn -= {"randperm"} if name == "recipes/digits" else set()  # the public split of a public data set
            assert not drawn, f"{name} draws: {drawn}"


def test_only_training_writes_grad():
    for name, tree in FILES.items():
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute) and target.attr == "grad":
                    assert name == "training", f"{name} writes .grad in line {node.lineno}"


def test_engine_knows_no_noise_and_no_clip_norm():
    for name, tree in FILES.items():
        if owner(name) == "engine":
            names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
            names |= {a.arg for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) for a in n.args.args}
            assert not names & {"clip_norm", "noise_multiplier", "sigma", "sensitivity"}, name


def test_training_contains_no_maths():
    assert "math" not in external_imports(FILES["training"])


def test_files_stay_short():
    for path in ROOT.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, f"{path.name} has grown past one idea"


def test_import_is_quick_and_lazy():
    """≤ 0.3 s on top of torch is a matter of what is imported: none of the slow packages may be."""
    code = (
        "import torch, sys; before = set(sys.modules); import clipwise; "
        "print([m for m in ('dp_accounting', 'scipy', 'sklearn', 'typer', 'rich', 'matplotlib', 'cryptography') "
        "if m in set(sys.modules) - before])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_is_documented():
    for name in vars(clipwise):
        value = getattr(clipwise, name)
        if not name.startswith("_") and callable(value):
            assert (value.__doc__ or "").strip(), f"{name} has no docstring"
