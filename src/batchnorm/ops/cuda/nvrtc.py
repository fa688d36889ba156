"""Compile CUDA C++ when it is first needed, with the compiler library that torch's CUDA builds bring, and launch it."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


# CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, _COOPERATIVE_LAUNCH_TOO_LARGE, _NOT_SUPPORTED
_REFUSALS = (701, 720, 801)


class Refused(RuntimeError):
    """Say that a device does not take a launch, as where it is shared and only a part of it is lent.

    Beyond the paper: other kernels run then.
    """


class Kernel:
    """Stand for one compiled kernel on one device; a launch runs all its programs at the same time, or fails.

    Beyond the paper: how the kernels of ``*.cu`` get to the device.
    """

    def __init__(self, function: ctypes.c_void_p, threads: int, shared: int, device: torch.device) -> None:
        self.function, self.threads, self.shared, self.device = function, threads, shared, device

    def __call__(self, programs: int, arguments: Any, stream: int) -> None:
        """Launch; ``arguments`` is an array of pointers to them.

        Raises:
            Refused: where the device does not run so many programs at once.
        """
        if self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                self(programs, arguments, stream)
            return
        _check(
            _driver().cuLaunchCooperativeKernel(
                self.function, programs, 1, 1, self.threads, 1, 1, self.shared, ctypes.c_void_p(stream), arguments
            )
        )


def load(
    file: str, name: str, definitions: tuple[tuple[str, int], ...], threads: int, shared: int, device: torch.device
) -> Kernel:
    """Compile the kernel ``name`` of ``file`` for a device, and load it there.

    Raises:
        RuntimeError: with the compiler's words.
    """
    driver = _driver()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        _check(driver.cuModuleLoadData(ctypes.byref(module), _compile(file, definitions)))
        _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        _check(driver.cuFuncSetAttribute(function, _DYNAMIC_SHARED_MEMORY, shared))
    return Kernel(function, threads, shared, device)


@cache
def unavailable() -> str | None:
    """Say what is missing for compiling and launching; None where nothing is."""
    try:
        _driver(), _compiler()
    except OSError as error:
        return str(error)
    return None


def _compile(file: str, definitions: tuple[tuple[str, int], ...]) -> Any:
    source = (Path(__file__).parent / file).read_bytes()
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}", *(f"-D{name}={value}" for name, value in definitions)]
    compiler, program = _compiler(), ctypes.c_void_p()
    compiler.nvrtcCreateProgram(ctypes.byref(program), source, file.encode(), 0, None, None)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if compiler.nvrtcCompileProgram(program, len(options), given):
            log = _fetch(compiler.nvrtcGetProgramLogSize, compiler.nvrtcGetProgramLog, program)
            raise RuntimeError(f"{file} does not compile with {' '.join(options)}: {log.value.decode()}")
        return _fetch(compiler.nvrtcGetCUBINSize, compiler.nvrtcGetCUBIN, program)
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(size_of: Any, contents_of: Any, program: ctypes.c_void_p) -> Any:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    contents = ctypes.create_string_buffer(size.value)
    contents_of(program, contents)
    return contents


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> ctypes.CDLL:
    major = (torch.version.cuda or "").split(".")[0]
    return ctypes.CDLL(f"libnvrtc.so.{major}")


def _check(result: int) -> None:
    if result:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(text))
        kind = Refused if result in _REFUSALS else RuntimeError
        raise kind(f"CUDA: {(text.value or b'unknown error').decode()}")
