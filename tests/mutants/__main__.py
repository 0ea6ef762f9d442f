"""Run every mutant against the tests of its row, and show that each is killed.

    python tests/mutants            all of them
    python tests/mutants 25 31      those of some rows

A warm parent forks one child per mutant; the child puts a changed copy of the package first on its path, and runs
pytest there. Two at a time.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("DNNL_MAX_CPU_ISA", "AVX512_CORE")
sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

import cryptography.hazmat.primitives.ciphers  # noqa: F401
import dp_accounting  # noqa: F401  (warm)
import pytest
import scipy.stats  # noqa: F401
import sklearn.datasets  # noqa: F401
import torch
import transformers  # noqa: F401
from mutants import MUTANTS, ROOT, Mutant, mutated

from hatch_build import build

LIMIT = 120.0  # seconds after which a mutant that only makes things slow or hang counts as killed


def child(mutant: Mutant, folder: Path) -> None:
    """Never returns. Exit code 1 (tests failed) is a kill."""
    shutil.copytree(ROOT / "clipwise", folder / "clipwise", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / mutant.file).write_text(mutated(mutant)[1])
    if mutant.file.endswith(".c"):
        build(folder / "clipwise" / "native")
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    for name in [n for n in sys.modules if n == "clipwise" or n.startswith("clipwise.")]:
        del sys.modules[name]
    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    os.chdir(ROOT)
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:anyio", "--override-ini=addopts="]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main([*options, *mutant.tests])
    import clipwise

    wrong_copy = not str(Path(clipwise.__file__)).startswith(str(folder))
    os._exit(99 if wrong_copy else int(code))


def main() -> int:
    chosen = [m for m in MUTANTS if not sys.argv[1:] or m.row in sys.argv[1:]]
    waiting, running, outcome = list(chosen), {}, {}
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as base:
        while waiting or running:
            while waiting and len(running) < 2:
                mutant = waiting.pop(0)
                folder = Path(tempfile.mkdtemp(dir=base))
                if not (pid := os.fork()):
                    try:
                        child(mutant, folder)
                    except BaseException as error:
                        (folder / "log").write_text(repr(error))
                        os._exit(98)
                running[pid] = (mutant, folder, time.perf_counter())
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                for other, (_, _, start) in running.items():
                    if time.perf_counter() - start > LIMIT:
                        os.kill(other, 9)
                time.sleep(0.02)
                continue
            mutant, folder, start = running.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            outcome[mutant.name] = code
            verdict = "killed" if code in (1, -9) else "SURVIVED" if code == 0 else f"BROKEN ({code})"
            print(f"{verdict:9} {mutant.row:>3}  {mutant.name}  ({time.perf_counter() - start:.1f} s)", flush=True)
            if code not in (0, 1, -9):
                print((folder / "log").read_text()[-600:])
            shutil.rmtree(folder, ignore_errors=True)
    killed = sum(code in (1, -9) for code in outcome.values())
    print(f"{killed} of {len(chosen)} mutants killed in {time.perf_counter() - began:.0f} s")
    return 0 if killed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
