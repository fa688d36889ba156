"""Compile kernel.c by the C compiler of the machine that it runs on, and load it.

That happens once for a machine, in about a second, when a layer first needs it; the library is kept in the user's cache
folder. Where there is no compiler, or the environment says BATCHNORM_COMPILE=0, nothing is lost but time.

The threads are torch's: what starts them is a function of the OpenMP library that torch itself has loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

SOURCE = Path(__file__).parent / "kernel.c"
# Sums must keep their order, so no -ffast-math; comparisons may be done on vectors, though, and NaN sets no flags.
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")


class Kernels(NamedTuple):
    """Hold the compiled functions, and those that start and number torch's threads: None where they are not known.

    Beyond the paper: what a compiler made of kernel.c.
    """

    forward: Callable[..., int]
    backward: Callable[..., int]
    openmp: tuple[int | None, int | None, int | None]


def kernels() -> Kernels | None:
    """Return the compiled kernels, or None: see :func:`unavailable`."""
    found = _load()
    return found if isinstance(found, Kernels) else None


def unavailable() -> str | None:
    """Say why there are no compiled kernels; None where there are."""
    found = _load()
    return found if isinstance(found, str) else None


@cache
def _load() -> Kernels | str:
    if os.environ.get("BATCHNORM_COMPILE") == "0":
        return "the environment says BATCHNORM_COMPILE=0"
    named = os.environ.get("CC") or "cc"
    try:
        command = shlex.split(named)
    except ValueError as error:
        return f"CC is no command: {named} ({error})"
    compiler = shutil.which(command[0]) if command else None
    if compiler is None:
        return f"there is no C compiler: {named} is not found"
    try:
        return _library([compiler, *command[1:]])
    except (OSError, AttributeError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"{compiler} makes no library of {SOURCE.name} that can be loaded: {said.strip()}"


def _library(compiler: list[str]) -> Kernels:
    """Load the library of this source, these flags and this processor; compile it where it is not there."""
    key = hashlib.sha256(repr((SOURCE.read_bytes(), compiler, FLAGS, _processor())).encode()).hexdigest()[:16]
    name = f"kernel-{key}.so"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchnorm"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o022:
            raise PermissionError(f"others can write to {folder}")
        if not (folder / name).exists():
            _compile(compiler, folder, name)
        return _loaded(folder / name)
    except (OSError, AttributeError, RuntimeError):
        # There is no home, nothing can be written or loaded there, or not by us alone.
        with tempfile.TemporaryDirectory() as temporary:
            _compile(compiler, Path(temporary), name)
            return _loaded(Path(temporary) / name)


def _compile(compiler: list[str], folder: Path, name: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        out = Path(temporary) / name
        command = [*compiler, *FLAGS, "-o", str(out), str(SOURCE), "-lm"]
        subprocess.run(
            command, check=True, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=120
        )
        _loaded(out)  # else it is not kept
        out.replace(folder / name)  # all of it or nothing: others may compile it as well


def _loaded(path: Path) -> Kernels:
    library = ctypes.CDLL(str(path))
    pointer, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    library.forward.argtypes = [pointer, whole, real, real, *[pointer] * 8]
    library.backward.argtypes = [pointer, whole, *[pointer] * 6]
    return Kernels(library.forward, library.backward, _openmp())


def _processor() -> str:
    """Return what the compiler's -march=native depends on."""
    try:
        with open("/proc/cpuinfo") as file:
            told = [
                line for line in file.read(8192).splitlines() if line.startswith(("model name", "flags", "Features"))
            ]
    except OSError:
        told = []
    return " ".join([platform.machine(), platform.processor(), *told[:2]])


def _openmp() -> tuple[int | None, int | None, int | None]:
    """Return the addresses of what starts, numbers and counts threads in the OpenMP library that torch has loaded."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads
    except (OSError, AttributeError):
        return None, None, None
    parallel, thread, team = (ctypes.cast(function, ctypes.c_void_p).value for function in found)
    return parallel, thread, team
