"""Compile CUDA C++ with NVRTC, which torch's CUDA builds include, and launch kernels through the CUDA driver.

As in Triton, a *program* is a thread block.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch

from .. import compile_cache

_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

# The driver returns one of these errors if the device cannot run a launch: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
# CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE or CUDA_ERROR_NOT_SUPPORTED
_REFUSALS = (701, 720, 801)

# The driver returns this error if the current thread has no CUDA context: CUDA_ERROR_INVALID_CONTEXT. Autograd runs
# backward passes on threads of its own, which have no context until torch calls the CUDA runtime there.
_NO_CONTEXT = 201


class Refused(RuntimeError):
    """Raised if a device cannot run a launch, for example because the programs cannot all run at the same time."""


# A function that launches a kernel, given the number of programs, pointers to the kernel's arguments, and the stream.
Launcher = Callable[[int, Any, int], None]


class Arguments:
    """Keep a kernel's arguments in memory, so that each launch writes only the arguments that change.

    Args:
        fields: one field per argument of the kernel. If the argument changes from launch to launch, its field is a
            string of :mod:`struct` format characters. Otherwise, its field is a :mod:`ctypes` object with the value.

    >>> arguments = Arguments("P", ctypes.c_int(7), "f")
    >>> arguments.launch(lambda programs, pointers, stream: print(programs, len(pointers)), 4, (0, 0.5), 0)
    4 3
    """

    def __init__(self, *fields: Any) -> None:
        form, offsets = "", []
        for field in fields:
            if isinstance(field, str):
                offsets.append(_offset(form, field[0]))
                form += field
        self._form, self._fields = form, fields
        self._pack = struct.Struct(form).pack_into
        self._memory = ctypes.create_string_buffer(struct.calcsize(form) + 16)
        start, changing = ctypes.addressof(self._memory), iter(offsets)
        addresses = [start + next(changing) if isinstance(f, str) else ctypes.addressof(f) for f in fields]
        self._pointers = (ctypes.c_void_p * len(fields))(*addresses)
        self._lock = Lock()  # without a lock, two threads could overwrite each other's values in `_memory`

    def layout(self, values: tuple[Any, ...]) -> tuple[bytes, list[int], list[tuple[int, str]]]:
        """Return all arguments as bytes, each argument's offset, and each changing value's offset and struct format."""
        image = bytearray(struct.pack(self._form, *values))
        starts, begun = [], ""
        for field in self._fields:
            if isinstance(field, str):
                starts.append(_offset(begun, field[0]))
                begun += field
            else:
                image += bytes(-len(image) % 16)
                starts.append(len(image))
                image += bytes(field)
        changing = [(_offset(self._form[:k], kind), kind) for k, kind in enumerate(self._form)]
        return bytes(image), starts, changing

    def launch(self, kernel: Launcher, programs: int, values: tuple[Any, ...], stream: int) -> None:
        """Launch a kernel with ``values`` for the arguments that change."""
        with self._lock:
            self._pack(self._memory, 0, *values)
            kernel(programs, self._pointers, stream)


def _offset(form: str, kind: str) -> int:
    return struct.calcsize(f"{form}0{kind}")


class Kernel:
    """Launch one compiled kernel on one device.

    Args:
        function: the kernel's handle.
        threads: threads per program.
        shared: bytes of dynamic shared memory per program.
        device: the device index.
        cooperative: whether all programs must run at the same time; if they cannot, the launch fails.
    """

    def __init__(self, function: int, threads: int, shared: int, device: int, *, cooperative: bool) -> None:
        self.function, self.threads, self.shared, self.device = function, threads, shared, device
        driver = library()
        self.cooperative = cooperative
        self.run = driver.cuLaunchCooperativeKernel if cooperative else driver.cuLaunchKernel

    def __call__(self, programs: int, arguments: Any, stream: int) -> None:
        """Launch the kernel; ``arguments`` is an array of pointers to the kernel's arguments.

        Raises:
            Refused: if the device cannot run the launch.
            RuntimeError: if the driver returns any other error.
        """
        if self.device != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                self(programs, arguments, stream)
            return
        rest = () if self.cooperative else (None,)
        given = (self.function, programs, 1, 1, self.threads, 1, 1, self.shared, stream, arguments, *rest)
        result = self.run(*given)
        if result == _NO_CONTEXT:
            _use_context_of(self.device)
            result = self.run(*given)
        if result:
            check(result)


class Launch(NamedTuple):
    """The parameters of one launch through the CUDA driver; autograd.cpp uses them to launch the kernel again."""

    kernel: Kernel
    programs: int
    arguments: Arguments
    values: tuple[Any, ...]  # the values of the arguments that change from launch to launch
    # For a Triton kernel, the indices of the tensor arguments that are not None; `values` starts with the addresses of
    # these tensors. For other kernels, `present` is empty.
    present: tuple[int, ...]

    def described(self, slots: Iterable[int | None]) -> tuple[Any, ...]:
        """Describe the launch for autograd.cpp.

        ``slots`` has one item for each value that changes from launch to launch: the value's index in the array
        ``values`` of autograd.cpp, or None if autograd.cpp should reuse the value in ``self.values``.
        """
        k = self.kernel
        image, starts, changing = self.arguments.layout(self.values)
        writes = [(*at, slot) for at, slot in zip(changing, slots, strict=True) if slot is not None]
        return k.function, self.programs, k.threads, k.shared, k.cooperative, image, starts, writes


def load(
    file: Path,
    name: str,
    definitions: tuple[tuple[str, int], ...],
    threads: int,
    shared: int,
    device: torch.device,
    cooperative: bool = False,
) -> Kernel:
    """Compile the kernel ``name`` of ``file`` for a device, unless it is cached, and load it.

    ``definitions`` are the names and values of the macros to define.

    Raises:
        RuntimeError: if the file does not compile (the message contains the compiler's log), or if the driver cannot
            load the kernel.
        OSError: if the driver or NVRTC cannot be loaded; see :func:`unavailable`.
    """
    driver = library()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(device):
        _use_context_of(device.index)
        check(driver.cuModuleLoadData(ctypes.byref(module), _compile(file, definitions)))
        check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        check(driver.cuFuncSetAttribute(function, _DYNAMIC_SHARED_MEMORY, shared))
    return Kernel(function.value or 0, threads, shared, device.index, cooperative=cooperative)


def _use_context_of(device: int) -> None:
    """Set the current thread's CUDA context to the device's primary context, which torch uses."""
    driver, handle, context = library(), ctypes.c_int(), ctypes.c_void_p()
    check(driver.cuDeviceGet(ctypes.byref(handle), device))
    check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
    check(driver.cuCtxSetCurrent(context))


@cache
def unavailable() -> str | None:
    """Return why the driver or the compiler cannot be loaded, or None if both can be loaded."""
    try:
        library(), _compiler()
    except OSError as error:
        return str(error)
    return None


def _compile(file: Path, definitions: tuple[tuple[str, int], ...]) -> bytes:
    source = file.read_bytes()
    major, minor = torch.cuda.get_device_capability()
    options = [f"--gpu-architecture=sm_{major}{minor}", *(f"-D{name}={value}" for name, value in definitions)]
    version = ctypes.c_int(), ctypes.c_int()
    _compiler().nvrtcVersion(*map(ctypes.byref, version))
    depends = (source, options, *(number.value for number in version))
    return compile_cache.kept(file.stem, depends, lambda: _compiled(file.name, source, options))


def _compiled(file: str, source: bytes, options: list[str]) -> bytes:
    compiler, program = _compiler(), ctypes.c_void_p()
    compiler.nvrtcCreateProgram(ctypes.byref(program), source, file.encode(), 0, None, None)
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if compiler.nvrtcCompileProgram(program, len(options), given):
            log = _fetch(compiler.nvrtcGetProgramLogSize, compiler.nvrtcGetProgramLog, program)
            raise RuntimeError(f"{file} does not compile with {' '.join(options)}: {log.rstrip(bytes(1)).decode()}")
        return _fetch(compiler.nvrtcGetCUBINSize, compiler.nvrtcGetCUBIN, program)
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(size_of: Any, contents_of: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    size_of(program, ctypes.byref(size))
    contents = ctypes.create_string_buffer(size.value)
    contents_of(program, contents)
    return contents.raw


@cache
def library() -> ctypes.CDLL:
    """Return the CUDA driver library."""
    driver = ctypes.CDLL("libcuda.so.1")
    shape: list[Any] = [ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.c_void_p]
    driver.cuLaunchCooperativeKernel.argtypes = shape
    driver.cuLaunchKernel.argtypes = [*shape, ctypes.c_void_p]
    return driver


@cache
def _compiler() -> ctypes.CDLL:
    major = (torch.version.cuda or "").split(".")[0]
    return ctypes.CDLL(f"libnvrtc.so.{major}")


def check(result: int) -> None:
    """Raise an exception if ``result``, the return value of a driver function, is an error code."""
    if result:
        text = ctypes.c_char_p()
        library().cuGetErrorString(result, ctypes.byref(text))
        kind = Refused if result in _REFUSALS else RuntimeError
        raise kind(f"the CUDA driver returned an error: {(text.value or b'unknown error').decode()}")
