"""Compile kernel.c by the C compiler of the machine that it runs on, and load it.

That happens once per machine, in a few seconds, when a layer first needs it; the library is kept in the user's cache
folder. A cached library is loaded only if it belongs to the user, nobody else can write to it, and its contents have
the digest in its name. On other systems than Linux, without a compiler, or with BATCHNORM_COMPILE=0 in the environment,
torch's kernels do the work.

The threads are torch's: what starts them is a function of the OpenMP library that torch itself has loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from ..activation import NAMES

SOURCE = Path(__file__).parent / "kernel.c"
# Sums must keep their order, so no -ffast-math; comparisons may be done on vectors, though, and NaN sets no flags.
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"),
    *(f"-D{name.upper()}={code}" for code, name in enumerate(NAMES)),
)


class Kernels(NamedTuple):
    """Hold the compiled functions, and those that start and number torch's threads, or None if there are none.

    Beyond the paper: what a compiler made of kernel.c.
    """

    forward: Callable[..., int]
    backward: Callable[..., int]
    openmp: tuple[int | None, int | None, int | None]
    uncached: str | None = None  # why they were compiled for this process alone


def kernels() -> Kernels | None:
    """Return the compiled kernels, or None, for which :func:`unavailable` has the reason."""
    found = _load()
    return found if isinstance(found, Kernels) else None


def unavailable() -> str | None:
    """Say why there are no compiled kernels; None if there are."""
    found = _load()
    return found if isinstance(found, str) else None


@cache
def _load() -> Kernels | str:
    if os.environ.get("BATCHNORM_COMPILE") == "0":
        return "the environment says BATCHNORM_COMPILE=0"
    if sys.platform != "linux":
        return f"the kernel is compiled on Linux only, not on {sys.platform}"
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
    """Load the library of this source, these flags and this processor; compile it unless a sound one is cached."""
    key = hashlib.sha256(repr((SOURCE.read_bytes(), compiler, FLAGS, _processor())).encode()).hexdigest()[:16]
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchnorm"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = folder.resolve()
        _check_private(folder)
        return _cached(folder, key) or _compile(compiler, folder, key)
    except (OSError, AttributeError, RuntimeError) as error:
        # There is no home, nothing can be written or loaded there, or not by us alone.
        with tempfile.TemporaryDirectory() as temporary:
            return _compile(compiler, Path(temporary), key)._replace(uncached=str(error))


def _check_private(path: Path) -> None:
    """Refuse what others own or can write to, and links."""
    found = path.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or stat.S_ISLNK(found.st_mode):
        raise PermissionError(f"{path} is a link, belongs to another user, or others can write to it")


def _cached(folder: Path, key: str) -> Kernels | None:
    """Load the library if it is there; remove what is damaged or not ours, so that it is compiled again."""
    for path in sorted(folder.glob(f"kernel-{key}-*.so")):
        try:
            _check_private(path)
            # To load a library that was cut short ends the process.
            if path.name == _name(key, path):
                return _loaded(path)
        except (OSError, AttributeError):
            pass
        path.unlink(missing_ok=True)
    return None


def _name(key: str, library: Path) -> str:
    return f"kernel-{key}-{hashlib.sha256(library.read_bytes()).hexdigest()[:32]}.so"


def _compile(compiler: list[str], folder: Path, key: str) -> Kernels:
    """Compile, and keep the result in the folder if it can be loaded."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        out = Path(temporary) / "kernel.so"
        command = [*compiler, *FLAGS, "-o", str(out), str(SOURCE), "-lm"]
        subprocess.run(
            command, check=True, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=120
        )
        out.chmod(0o700)  # whatever the umask is
        kernels = _loaded(out)
        with out.open("rb") as file:
            os.fsync(file.fileno())
        out.replace(folder / _name(key, out))  # all of it or nothing: others may compile it as well
        return kernels


def _loaded(path: Path) -> Kernels:
    library = ctypes.CDLL(str(path))
    pointer, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    library.forward.argtypes = [pointer, whole, real, real, *[pointer] * 10]
    library.backward.argtypes = [pointer, whole, *[pointer] * 9]
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
