"""Launch kernels/resident.cu: one launch that keeps on chip what it has read."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import nvrtc
from .activation import NAMES
from .geometry import Geometry

KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
SHARED = 232_448  # bytes of shared memory that programs of one multiprocessor have together, with 1 KB for each
L2 = 40_000_000
EXTRA: dict[str, int] = {}


class Residence(NamedTuple):
    """Say how the kernel runs.

    Beyond the paper: the choices behind one launch.
    """

    threads: int
    each: int  # programs of a multiprocessor
    SV: int  # vectors of a slice's row, channels last
    K: int  # vectors a thread keeps of each tensor
    parts: int
    share: int  # vectors of a thread
    slices: int
    groups: int  # slices at a time

    @property
    def rounds(self) -> int:
        return -(-self.slices // self.groups)


def residence(
    g: Geometry, itemsize: int, tensors: int, processors: int, threads: int, each: int, SV: int, parts: int
) -> Residence:
    V = 16 // itemsize
    scratch = 2 * (threads // 32) * SV * V * 4 + 5 * SV * V * 4 if g.nhwc else 2048
    K = min(32, (SHARED // each - 1024 - scratch - 64) // (threads * 16 * tensors))
    slices = -(-g.channels // (SV * V)) if g.nhwc else g.channels
    units = g.rows if g.nhwc else g.rows // V
    blocks = -(-units // (threads // SV if g.nhwc else threads))
    parts = min(parts, blocks)
    share = -(-blocks // parts)
    groups = min(slices, processors * each // parts)
    return Residence(threads, each, SV, K, parts, share, slices, groups)


class _Shape(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int) for name in ("C", "units", "slices", "parts")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "x_plane", "y_stride", "y_plane")),
        ("width", ctypes.c_int),
        ("magic", ctypes.c_uint),
        ("shift", ctypes.c_uint),
        ("passing", ctypes.c_int),
    ]


class _Running(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("mean", "var", "batches", "skipped")),
        ("momentum", ctypes.c_float),
        ("cumulative", ctypes.c_int),
    ]


@cache
def _shape(g: Geometry, itemsize: int, r: Residence) -> _Shape:
    V = 16 // itemsize
    passing = g.rows * g.channels * itemsize > L2
    if g.nhwc:
        strides = g.stride * itemsize, 0, g.channels * itemsize, 0
        return _Shape(g.channels, g.rows, r.slices, r.parts, *strides, 0, 0, 0, passing)
    width = g.width // V
    bits = (width - 1).bit_length()
    magic = (1 << (31 + bits)) // width + 1
    strides = g.stride * itemsize, g.plane * itemsize, g.channels * g.width * itemsize, g.width * itemsize
    return _Shape(g.channels, g.rows // V, r.slices, r.parts, *strides, width, magic, bits - 1, passing)


@cache
def _kernel(name: str, kind: int, nhwc: bool, act: int, residual: bool, r: Residence, device: int, extra=()) -> nvrtc.Kernel:
    tensors = 1 if name == "forward" else 2
    definitions = {
        "KIND": kind, "LAST": int(nhwc), "ACT": act, "RESIDUAL": int(residual), "THREADS": r.threads,
        "SV": r.SV, "K": r.K, "EACH": r.each,
    }  # fmt: skip
    if name == "forward":
        definitions["FORWARD"] = 1
    definitions |= dict(extra)
    shared = tensors * r.K * r.threads * 16
    return nvrtc.load("resident.cu", name, tuple(definitions.items()), r.threads, shared)


def _pointer(t: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if t is None else t.data_ptr())


def _pack(*values: Any) -> Any:
    return (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))


def forward(x, y, residual, bits, gamma, beta, stats, partial, words, running, momentum, eps, slope, activation, g, r):
    kernel = _kernel("forward", KINDS[x.dtype], g.nhwc, NAMES.index(activation), residual is not None, _key(r), x.device.index, tuple(EXTRA.items()))
    pointers = [_pointer(t) for t in (x, y, residual, bits, gamma, beta, stats, partial, words)]
    addresses = [None] * 4 if running is None else [t.data_ptr() for t in running]
    moved = _Running(*addresses, momentum or 0.0, momentum is None)
    values = (*pointers, moved, _shape(g, x.element_size(), r), ctypes.c_float(eps), ctypes.c_float(slope))
    kernel(r.groups * r.parts, _pack(*values), torch._C._cuda_getCurrentRawStream(x.device.index))


def backward(dy, x, bits, stats, dx, dresidual, dgamma, dbeta, partial, words, slope, activation, g, r, residual):
    kernel = _kernel("backward", KINDS[x.dtype], g.nhwc, NAMES.index(activation), residual, _key(r), x.device.index, tuple(EXTRA.items()))
    pointers = [_pointer(t) for t in (dy, x, bits, stats, dx, dresidual, dgamma, dbeta, partial, words)]
    values = (*pointers, _shape(g, x.element_size(), r), ctypes.c_float(slope))
    kernel(r.groups * r.parts, _pack(*values), torch._C._cuda_getCurrentRawStream(x.device.index))


def _key(r: Residence) -> Residence:
    """What the compiled code depends on."""
    return r._replace(parts=0, share=0, slices=0, groups=0)
