"""Compile kernel.c for this machine when it is first needed, and cache the library; compiling takes a few seconds.

Without a compiler, torch's kernels run instead. The compiled code runs on torch's threads, through the OpenMP
library that torch has loaded.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

from .. import compile_cache
from ..activation import NAMES

SOURCE = Path(__file__).parent / "kernel.c"
# Do not add -ffast-math, because the compiler must not change the order of sums. With -fno-trapping-math, the compiler
# can vectorize comparisons.
FLAGS = (
    *("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"),
    *(f"-D{name.upper()}={code}" for code, name in enumerate(NAMES)),
)


class Kernels(NamedTuple):
    """Hold the compiled functions, and the addresses of the OpenMP functions that they call."""

    forward: Callable[..., int]
    backward: Callable[..., int]
    openmp: tuple[int | None, int | None, int | None]  # all None if the library or a function was not found
    uncached: str | None = None  # why the library could not be cached; None if it was cached


def kernels() -> Kernels | None:
    """Return the compiled kernels, or None if they are not available; :func:`unavailable` returns the reason."""
    found = _load()
    return found if isinstance(found, Kernels) else None


def unavailable() -> str | None:
    """Return why the compiled kernels are not available, or None if they are available."""
    found = _load()
    return found if isinstance(found, str) else None


@cache
def _load() -> Kernels | str:
    source = compile_cache.Source(SOURCE, "C", "CC", "cc", FLAGS, ("-lm",), _processor(), _loaded)
    try:
        kernels, uncached = compile_cache.built(source)
    except compile_cache.Unavailable as error:
        return str(error)
    found: Kernels = kernels._replace(uncached=uncached)
    return found


def _loaded(path: Path) -> Kernels:
    library = ctypes.CDLL(str(path))
    pointer, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    library.forward.argtypes = [pointer, whole, real, real, *[pointer] * 10]
    library.backward.argtypes = [pointer, whole, *[pointer] * 9]
    return Kernels(library.forward, library.backward, _openmp())


def _processor() -> str:
    """Return a description of the processor for the cache key, because -march=native compiles for this processor."""
    try:
        with open("/proc/cpuinfo") as file:
            told = [
                line for line in file.read(8192).splitlines() if line.startswith(("model name", "flags", "Features"))
            ]
    except OSError:
        told = []
    return " ".join([platform.machine(), platform.processor(), *told[:2]])


def _openmp() -> tuple[int | None, int | None, int | None]:
    """Return the addresses of GOMP_parallel, omp_get_thread_num and omp_get_num_threads in torch's OpenMP library."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = library.GOMP_parallel, library.omp_get_thread_num, library.omp_get_num_threads
    except (OSError, AttributeError):
        return None, None, None
    parallel, thread, team = (ctypes.cast(function, ctypes.c_void_p).value for function in found)
    return parallel, thread, team
