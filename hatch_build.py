"""Builds clipwise/native/*.c when the package is installed, where there is a compiler.

    python hatch_build.py      builds them in place

Without one nothing but speed is lost. Each file is built for several kinds of CPU; clipwise.native takes what fits.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

NATIVE = Path(__file__).parent / "clipwise" / "native"
COMPILERS = ("cc", "gcc", "clang")  # unless CC names one
SHARED = ["-O3", "-fno-fast-math", "-std=gnu11", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math"]
OWN = {"noise": ["-ffp-contract=off"]}  # the same numbers on every CPU
LEVELS = {
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mprefer-vector-width=512"],
    "avx2": ["-mavx2", "-mfma"],
    "base": [],
}


def build(folder: Path = NATIVE) -> list[Path]:
    """The libraries that could be built; those of an earlier time are gone."""
    for old in folder.glob("*.so"):
        old.unlink()
    compiler = shlex.split(os.environ.get("CC", next(filter(shutil.which, COMPILERS), "")))
    if not compiler or shutil.which(compiler[0]) is None or sys.platform == "win32":
        print("clipwise: there is no C compiler, so steps on a CPU will take longer.", file=sys.stderr)
        return []
    intel = platform.machine().lower() in ("x86_64", "amd64")
    built = []
    for source in sorted(folder.glob("*.c")):
        for level, flags in LEVELS.items():
            target = source.with_name(f"{source.stem}_{level}.so")
            if (level == "base" or intel) and _compiled(compiler, source, target, flags):
                built.append(target)
    return built


def _compiled(compiler: list[str], source: Path, target: Path, flags: list[str]) -> bool:
    """With OpenMP, whose threads are then usually torch's own, or else without."""
    made, said = target.with_suffix(".new"), ""
    text = f'-DSOURCE="{hashlib.sha256(source.read_bytes()).hexdigest()}"'
    for more in (["-fopenmp"], []):
        command = [
            *compiler,
            *SHARED,
            *flags,
            *OWN.get(source.stem, []),
            *more,
            text,
            str(source),
            "-o",
            str(made),
            "-lm",
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            made.replace(target)
            return True
        made.unlink(missing_ok=True)
        said = (done.stderr.strip().splitlines() or ["no message"])[0]
    print(f"clipwise: {target.name} could not be built: {said}", file=sys.stderr)
    return False


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand
    pass
else:

    class NativeBuild(BuildHookInterface):  # type: ignore[type-arg]
        """Called by hatchling."""

        PLUGIN_NAME = "custom"

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Build first; a wheel with libraries in it is for this system alone."""
            if built := build():
                system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
                build_data["pure_python"], build_data["tag"] = False, f"py3-none-{system}"
                build_data["artifacts"] += [str(path.relative_to(Path(self.root))) for path in built]


if __name__ == "__main__":
    print(*build(), sep="\n")
