"""Layers in training on the CPU by one compiled kernel: kernel.c, by the compiler of the machine that it runs on.

Torch's own kernels take a pass for each step, and around them stands Python. One kernel has the statistics, the guard,
the running averages, the transform and ReLU in a call; another the whole gradient, for which x and five numbers a
channel are kept. It is compiled once for a machine, in about a second, when a layer first needs it, and kept in the
user's cache folder. Where there is no compiler, or the environment says BATCHNORM_COMPILE=0, nothing is lost but time:
quick.py and function.py do the same by torch's kernels.

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
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..context import is_unseen
from .function import stored_like

SOURCE = Path(__file__).parent / "kernel.c"
# Sums must keep their order, so no -ffast-math; comparisons may be done on vectors, though, and NaN sets no flags.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
# Fewer values than this are worked on sooner than a second thread has begun.
PARALLEL = 1 << 14
ROWS_KEPT = 5  # of a channel, for the backward pass: see kernel.c


class Form(ctypes.Structure):
    """Describe a tensor to the kernel: planes (n, channels, length), or rows (n, channels) where the length is 0.

    Beyond the paper: how memory is laid out.
    """

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "channels", "length", "relu")),
        *((name, ctypes.c_void_p) for name in ("parallel", "thread")),
    )
    n: int
    channels: int
    length: int

    @property
    def threads(self) -> int:
        """How many threads a pass is worth."""
        values = self.n * self.channels * max(self.length, 1)
        return torch.get_num_threads() if values >= PARALLEL and self.parallel else 1


class Kernels(NamedTuple):
    """Hold the compiled functions, and those that start and number torch's threads: None where they are not known.

    Beyond the paper: what a compiler made of kernel.c.
    """

    forward: Callable[..., int]
    backward: Callable[..., int]
    openmp: tuple[int | None, int | None]


def form_of(x: Tensor, relu: bool) -> Form | None:
    """Return the form of ``x`` (N, C, ...), or None where the kernel does not take it."""
    if x.dtype is not torch.float32 or x.dim() < 2:
        return None
    channels = x.shape[1]
    if x.numel() <= channels:  # no batch, or one value per channel
        return None
    locations = prod(x.shape[2:])
    if x.is_contiguous() and locations > 1 and channels > 1:
        n, length = x.shape[0], locations
    elif x.is_contiguous() or x.movedim(1, -1).is_contiguous():
        n, length = x.numel() // channels, 0
    else:
        return None
    found = kernels()
    return None if found is None else Form(n, channels, length, relu, *found.openmp)


def normalize_batch_(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    running: tuple[int | None, int | None, int | None],
    momentum: float | None,
    eps: float,
    form: Form,
) -> Tensor | None:
    """Return y, and move the averages at the addresses ``running``; None, and nothing moved, if not finite."""
    try:
        return _apply(x, gamma, beta, running, momentum, eps, form)
    except _NotFinite:
        return None


class _NotFinite(Exception):
    pass


class Normalize(torch.autograd.Function):
    """(x, gamma, beta) -> y by the kernel.

    Beyond the paper: how autograd sees it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        running: tuple[int | None, int | None, int | None],
        momentum: float | None,
        eps: float,
        form: Form,
    ) -> Tensor:
        """Keep x and a few numbers a channel."""
        y, kept = torch.empty_like(x), x.new_empty((ROWS_KEPT, form.channels))
        failed = _run().forward(
            ctypes.addressof(form), form.threads, eps, -1.0 if momentum is None else momentum, x.data_ptr(),
            None if gamma is None else gamma.data_ptr(), None if beta is None else beta.data_ptr(), *running,
            y.data_ptr(), kept.data_ptr(),
        )  # fmt: skip
        if failed:
            raise MemoryError if failed < 0 else _NotFinite
        ctx.form, ctx.eps = form, eps
        ctx.save_for_backward(x, gamma, kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Go back through ReLU and Algorithm 1; by plain operations where a graph or a batch of gradients is wanted."""
        x, gamma, kept = ctx.saved_tensors
        if torch.is_grad_enabled() or not is_unseen(x, dy) or _is_batched(dy):
            return _plain_backward(ctx, x, gamma, kept, dy)
        needs, form = ctx.needs_input_grad, ctx.form
        dy = stored_like(dy, x)
        dx = torch.empty_like(x) if needs[0] else None
        dgamma, dbeta = kept.new_empty(form.channels), kept.new_empty(form.channels)
        if _run().backward(
            ctypes.addressof(form), form.threads, x.data_ptr(), dy.data_ptr(), kept.data_ptr(),
            None if dx is None else dx.data_ptr(), dgamma.data_ptr(), dbeta.data_ptr(),
        ):  # fmt: skip
            raise MemoryError
        return dx, dgamma if needs[1] else None, dbeta if needs[2] else None, None, None, None, None


# What Function.apply calls when no torch.func transform is at work, which callers have made sure of.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, Normalize).apply
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # by is_grads_batched of torch.autograd.grad


def _plain_backward(ctx: Any, x: Tensor, gamma: Tensor | None, kept: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return Section 3's gradients by operations that can be differentiated again, and vectorized."""
    dims, shape = [0, *range(2, x.dim())], (-1, *[1] * (x.dim() - 2))
    center, scale, offset = (v.view(shape) for v in kept[:3])
    d = x - center
    dz = torch.where(d * scale + offset > 0, dy, 0) if ctx.form.relu else dy
    d = d - d.mean(dims, keepdim=True)
    invstd = torch.rsqrt(d.square().mean(dims, keepdim=True) + ctx.eps)
    x_hat = d * invstd
    dx = dz - dz.mean(dims, keepdim=True) - x_hat * (dz * x_hat).mean(dims, keepdim=True)
    dx = dx * (invstd if gamma is None else invstd * gamma.view(shape))
    grads = zip((dx, (dz * x_hat).sum(dims), dz.sum(dims)), ctx.needs_input_grad, strict=False)
    return *(g if needed else None for g, needed in grads), *(None,) * 4


@cache
def kernels() -> Kernels | None:
    """Return the compiled kernels, or None: see :func:`unavailable`."""
    found = _load()
    return None if isinstance(found, str) else found


def unavailable() -> str | None:
    """Say why there are no compiled kernels; None where there are."""
    found = _load()
    return found if isinstance(found, str) else None


def _run() -> Kernels:
    found = kernels()
    assert found is not None  # else there is no form
    return found


@cache
def _load() -> Kernels | str:
    if os.environ.get("BATCHNORM_COMPILE") == "0":
        return "the environment says BATCHNORM_COMPILE=0"
    command = shlex.split(os.environ.get("CC", "cc"))
    compiler = shutil.which(command[0]) if command else None
    if compiler is None:
        return "there is no C compiler: neither CC nor cc names one"
    try:
        library = _library([compiler, *command[1:]])
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"{compiler} does not compile {SOURCE.name}: {said.strip()}"
    pointer, whole, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
    library.forward.argtypes = [pointer, whole, real, real, *[pointer] * 8]
    library.backward.argtypes = [pointer, whole, *[pointer] * 6]
    return Kernels(library.forward, library.backward, _openmp())


def _library(compiler: list[str]) -> ctypes.CDLL:
    """Load the library of this source, these flags and this processor; compile it where it is not there."""
    key = hashlib.sha256(repr((SOURCE.read_bytes(), compiler, FLAGS, _processor())).encode()).hexdigest()[:16]
    name = f"kernel-{key}.so"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchnorm"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (folder / name).exists():
            _compile(compiler, folder, name)
        return ctypes.CDLL(str(folder / name))
    except (OSError, RuntimeError):  # no home, or nothing can be written or executed there
        with tempfile.TemporaryDirectory() as temporary:
            _compile(compiler, Path(temporary), name)
            return ctypes.CDLL(str(Path(temporary) / name))


def _compile(compiler: list[str], folder: Path, name: str) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        out = Path(temporary) / name
        command = [*compiler, *FLAGS, "-o", str(out), str(SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=120)
        out.replace(folder / name)  # all of it or nothing: others may compile it as well


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


def _openmp() -> tuple[int | None, int | None]:
    """Return the addresses of two functions of the OpenMP library that torch has loaded."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        parallel, thread = library.GOMP_parallel, library.omp_get_thread_num
    except (OSError, AttributeError):
        return None, None
    return ctypes.cast(parallel, ctypes.c_void_p).value, ctypes.cast(thread, ctypes.c_void_p).value
