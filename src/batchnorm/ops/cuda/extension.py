"""Build autograd.cpp, a C++ extension that runs the layers' usual training calls without Python.

Compiling takes about half a minute, so a background thread compiles the file, and the result is cached. Until the
extension is loaded, and on machines without a compiler, autograd.py and launch.py do the same work.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import sysconfig
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from threading import Lock, Thread
from typing import Any

import torch

from .. import compile_cache
from . import driver

NAME = "batchnorm_autograd"
TORCH = Path(torch.__file__).parent

module: Any = None  # the extension, or None if it is not loaded
_registered = False
# Why the extension is not loaded; None if it is loaded.
unavailable: str | None = "autograd.cpp is not loaded before the first training call"
_started = Lock()
_thread: Thread | None = None
_stopped = False


def source() -> compile_cache.Source:
    """Return the source file and how to compile it."""
    includes = (TORCH / "include", TORCH / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"]))
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    flags = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w", abi, *(f"-I{path}" for path in includes))
    libraries = (f"-L{TORCH / 'lib'}", "-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10")
    depends = f"{torch.__version__} {sys.version}"
    return compile_cache.Source(
        Path(__file__).with_name("autograd.cpp"), "C++", "CXX", "c++", flags, libraries, depends, _load
    )


def _load(path: Path) -> Any:
    loader = ExtensionFileLoader(NAME, str(path))
    spec = spec_from_loader(NAME, loader)
    assert spec is not None
    found = module_from_spec(spec)
    loader.exec_module(found)
    return found


def start(configure: Callable[[Any], None]) -> None:
    """Load the extension if it is in the cache; if not, build it in the background.

    Only the first call has an effect. The extension is passed to ``configure`` before it is used.
    """
    global _thread, unavailable
    if not _started.acquire(blocking=False):
        return
    try:
        found = compile_cache.cached(source())
    except compile_cache.Unavailable as error:
        unavailable = str(error)
        return
    if found is not None:
        _use(found, configure)
        return
    unavailable = "autograd.cpp is being compiled"
    _thread = Thread(target=_build, args=(configure,), name="batchnorm-compile", daemon=True)
    _thread.start()
    atexit.register(_give_up)


def register() -> None:
    """Make the operators in compiled graphs call the extension, if it is loaded.

    Call this on the thread that runs the layers, not on the thread that builds the extension, because it is not safe to
    register operators while another thread looks them up.
    """
    global _registered, module, unavailable
    if module is not None and not _registered:
        _registered = True
        try:
            module.register_operators()
        except RuntimeError as error:
            module, unavailable = None, str(error)


def wait() -> str | None:
    """Wait for a build in progress; return why the extension is not available, or None if it is available."""
    if _thread is not None:
        _thread.join()
    return unavailable


def addresses() -> tuple[int | None, ...]:
    """Return the addresses of the C functions that launch kernels and query the stream."""
    cuda, torch_cuda = driver.library(), ctypes.CDLL(str(TORCH / "lib/libtorch_cuda.so"))
    functions = (
        cuda.cuLaunchKernel,
        cuda.cuLaunchCooperativeKernel,
        cuda.cuStreamIsCapturing,
        torch_cuda.aoti_torch_get_current_cuda_stream,
    )
    return tuple(ctypes.cast(function, ctypes.c_void_p).value for function in functions)


def _build(configure: Callable[[Any], None]) -> None:
    global unavailable
    try:
        found, _ = compile_cache.built(source())
    except compile_cache.Unavailable as error:
        unavailable = str(error)
        if not _stopped:
            compile_cache.remember_failure(source(), error)
        return
    _use(found, configure)


def _use(found: Any, configure: Callable[[Any], None]) -> None:
    global module, unavailable
    try:
        configure(found)
    except Exception as error:  # no error is fatal, because Python code can do the work of the extension
        unavailable = f"{type(error).__name__}: {error}"
        return
    module, unavailable = found, None


def _give_up() -> None:
    global _stopped
    if _thread is not None and _thread.is_alive():
        _stopped = True
        compile_cache.stop()
        _thread.join(5)
