"""Wheel and sdist: what is in them, and that the package works without its extras, which errors name."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXTRAS = (
    "sklearn",
    "matplotlib",
    "transformers",
    "lightning",
    "pytorch_lightning",
    "tensorboard",
    "peft",
    "accelerate",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(out)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def bare(built, tmp_path_factory):
    """A folder with the wheel's content, and an interpreter for which no extra is installed."""
    folder = tmp_path_factory.mktemp("bare")
    with zipfile.ZipFile(built[0]) as archive:
        archive.extractall(folder)
    (folder / "sitecustomize.py").write_text(
        f"import sys\nfor name in {EXTRAS!r}:\n    sys.modules[name] = None\n"  # importing it raises ImportError
    )

    def run(code: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": str(folder)}
        return subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True)

    return run


def test_what_is_in_them(built):
    wheel, sdist = built
    files = zipfile.ZipFile(wheel).namelist()
    assert {"clipwise/py.typed", "clipwise/__init__.py", "clipwise/integrations/transformers.py"} <= set(files)
    assert all(name.startswith(("clipwise/", "clipwise-")) for name in files)
    with tarfile.open(sdist) as archive:
        names = [name.split("/", 1)[1] for name in archive.getnames()]
        assert all(member.size < 10**6 for member in archive.getmembers())
    assert {"LICENSE", "README.md", "pyproject.toml", "clipwise/py.typed"} <= set(names)
    assert not any(name.startswith(("data/", ".carry", "runs/", ".venv")) for name in names)


def test_a_private_run_without_extras(bare):
    done = bare(
        "import clipwise as cw, torch\n"
        "print(cw.__file__)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "plan = cw.Plan(noise_multiplier=1.0, delta=1e-5, sampling_prob=0.5, steps=2, expected_batch_size=4)\n"
        "run = cw.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, lambda m, x: m(x)[:, 0] ** 2)\n"
        "for batch in run.batches(torch.ones(8, 2)): run.step(batch)\n"
        "print(run.epsilon == plan.epsilon)\n"
    )
    assert done.returncode == 0, done.stderr
    path, fine = done.stdout.split("\n")[:2]
    assert "bare" in path  # the wheel's code, not the checkout's
    assert fine == "True"


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import clipwise.integrations.transformers", "transformers"),
        ("import clipwise.integrations.lightning", "lightning"),
        ("from clipwise.integrations.logs import TensorBoardLog; TensorBoardLog('x')", "tensorboard"),
        ("from clipwise.recipes.digits import load_digits; load_digits()", "digits"),
    ],
)
def test_missing_extras_are_named(bare, code, extra):
    done = bare(code)
    assert done.returncode != 0
    assert f"clipwise[{extra}]" in done.stderr.strip().splitlines()[-1], done.stderr[-500:]
