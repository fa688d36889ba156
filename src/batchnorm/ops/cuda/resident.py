"""Choose when and how to run resident.cu, the kernel that keeps tensors in shared memory.

The rules come from measurements on one H200 (results/kernels-h200.json). These words have the same meaning here as in
resident.cu:

- A *program* is a thread block.
- A *slice* is one channel or a group of neighboring channels. The values of a slice are divided into *parts*, and a
  program processes one part at a time.
- A *row* of a channels-last tensor holds the values of all channels at one location of one example.
- A *vector* is 16 bytes of adjacent values, which a thread loads in one access.
- *On chip* means in shared memory.
- A channels-first tensor is processed in *woven* form if the values of a channel in one example do not fill whole
  vectors. In this form, a vector may hold values of two channels.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..activation import NAMES
from . import driver
from .layout import Geometry, magic_of
from .schedule import AT_ONCE, megabytes_of, up

SOURCE = Path(__file__).with_name("resident.cu")
KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
WIDTH = 16  # bytes per vector
SHARED = 232_448  # maximum bytes of shared memory per program; two programs on one multiprocessor get half each
CACHE = 40_000_000  # a tensor of up to this many bytes is assumed to stay in the L2 cache during a pass
BATCHES = 8  # maximum number of batches of 4 vectors that a thread keeps on chip; resident.cu has code for 8 batches


class Residence(NamedTuple):
    """Hold the launch parameters of resident.cu."""

    threads: int
    each: int  # programs per multiprocessor
    # SV in resident.cu: how many vectors a slice has per location (channels last) or per example (woven form); in all
    # other cases, 1
    lanes: int
    plane: int  # in woven form, the number of locations per example; else 0
    kept: int  # maximum number of vectors of each tensor that a thread keeps on chip
    parts: int  # parts per slice
    slices: int
    groups: int  # number of slices that are processed at the same time
    added: bool = False  # whether the whole residual is kept on chip

    @property
    def path(self) -> str:
        """The kernel's name in ``ops.explain``."""
        return "resident"

    def fits(self, g: Geometry, itemsize: int) -> bool:
        """Return whether each thread can keep all its vectors of a tensor with geometry ``g`` on chip."""
        v = WIDTH // itemsize
        units = g.rows if g.nhwc else g.rows // g.width if self.plane else g.rows // v
        block = self.threads // self.lanes if g.nhwc or self.plane else self.threads
        return up(units, block * self.parts) <= self.kept

    @property
    def kept_parts(self) -> int:
        """The number of parts per slice whose sums are stored in global memory; 0 if a slice has only one part."""
        return 0 if self.parts == 1 else self.parts

    @property
    def words(self) -> int:
        """The number of int32 counters that a launch for a single layer needs.

        The first counter is reserved for the Triton kernels, which use the same workspace. The second counts the warps
        that have updated the running averages. In addition, each slice has a counter for its barrier.
        """
        return 2 + self.slices

    @property
    def code(self) -> tuple[int, ...]:
        """The launch parameters that are compiled into the kernel."""
        return self.threads, self.each, self.lanes, self.plane, self.kept, int(self.added)


def make(
    g: Geometry, itemsize: int, tensors: int, processors: int, threads: int, each: int, lanes: int, parts: int
) -> Residence:
    """Plan a launch that keeps as much of each tensor on chip as possible.

    ``tensors`` is the number of tensors to keep on chip, and ``parts`` is the maximum number of parts per slice.
    """
    v = WIDTH // itemsize
    plane = 0
    if g.nhwc:
        slices, blocks = up(g.channels, lanes * v), up(g.rows, threads // lanes)
        floats = 2 * max(threads // 32 * lanes * v, threads) + 3 * lanes * v
    elif g.width % v == 0:
        slices, blocks = g.channels, up(g.rows // v, threads)
        floats = 256
    else:
        plane = g.width
        slices, blocks = g.channels * g.width // (lanes * v), up(g.rows // g.width, threads // lanes)
        floats = 4 * threads + 64
    parts = min(parts, blocks)
    kept = min(4 * BATCHES, (SHARED // each - 1024 - 4 * floats) // (threads * WIDTH * tensors))
    return Residence(threads, each, lanes, plane, kept, parts, slices, min(slices, processors * each // parts))


@cache
def choose(g: Geometry, itemsize: int, backward: bool, residual: bool, processors: int) -> Residence | None:
    """Choose the launch parameters; return None if other kernels are faster or resident.cu does not support ``g``."""
    v = WIDTH // itemsize
    if weaves(g, itemsize, backward, residual):
        find = _of_woven
    elif residual and (g.channels if g.nhwc else g.rows) % 8:
        # The sign bits (see sign_bits.py) of a row (channels last) or a channel (channels first) must fill whole bytes.
        return None
    elif g.nhwc:
        if g.channels % v or g.stride % v:
            return None
        find = _of_rows
    else:
        if g.width % v or g.width < 2 * v or g.stride % v or g.plane % v:
            return None
        find = _of_planes
    found = find(g, itemsize, backward, residual, processors, 2 if backward else 1)
    if found is None or backward or not residual:
        return found
    both = find(g, itemsize, backward, residual, processors, 2)
    return both._replace(added=True) if both is not None and both.fits(g, itemsize) else found


def _of_planes(
    g: Geometry, itemsize: int, backward: bool, residual: bool, processors: int, tensors: int
) -> Residence | None:
    """Choose the launch for a channels-first tensor if a channel's values in one example fill whole vectors."""
    megabytes, channel = megabytes_of(g, itemsize), g.rows * itemsize
    # Whether all channels can be processed at the same time, but only with two programs per multiprocessor.
    at_once = processors < g.channels <= 2 * processors

    def plan(threads: int, each: int, parts: int = 0) -> Residence:
        """Plan a launch with at most ``parts`` parts per channel; 0 means as many parts as fill the device."""
        parts = parts or max(1, processors * each // g.channels)
        return make(g, itemsize, tensors, processors, threads, each, 1, min(parts, processors * each))

    if backward and residual:
        if megabytes < 4 or (megabytes > 300 and 2 * g.channels <= processors):
            return None
        if at_once and (two := plan(256, 2)).fits(g, itemsize):
            return two
        room = plan(512, 1).kept * 512 * WIDTH
        return plan(512, 1, max(up(channel, room), processors // g.channels))
    if backward:
        if megabytes < 6 or megabytes > 350:
            return None
        if megabytes > 250:
            return plan(512, 2, up(channel, 100 * 1024)) if processors < g.channels < 2 * processors else None
        if megabytes >= 20:
            # If there are about as many channels as multiprocessors, four parts per channel balance the load better
            # than the one or two parts that `plan` would choose.
            return plan(512, 2, 4 if 0.95 * processors <= g.channels <= 1.5 * processors else 0)
        return plan(512, 1) if g.channels <= processors else plan(256, 2)
    if megabytes < (6 if residual else 16) or megabytes > (200 if residual else 250):
        return None
    if residual and at_once and channel > 128 * 1024:
        return None
    if not residual and (2 * g.channels <= processors or channel <= 128 * 1024):
        return plan(384, 2) if megabytes <= 30 or channel <= 128 * 1024 else plan(512, 2)
    if residual and channel <= 128 * 1024 and (megabytes >= 20 or g.channels > processors):
        return plan(256, 2)
    if at_once and channel <= 256 * 1024:
        return plan(512, 2)
    if at_once and g.channels < 1.5 * processors:
        return None  # the channels would need two rounds, and most programs would be idle in the second round
    return plan(512, 1, up(channel, 200 * 1024) if g.channels > processors and channel > 2**20 else 0)


def _of_woven(
    g: Geometry, itemsize: int, backward: bool, residual: bool, processors: int, tensors: int
) -> Residence | None:
    """Choose the launch for a channels-first tensor in woven form."""
    lanes = woven_lanes(g, itemsize, residual)
    assert lanes is not None
    slices = g.channels * g.width * itemsize // (lanes * WIDTH)

    def plan(threads: int, each: int) -> Residence:
        parts = max(1, processors * each // slices)
        return make(g, itemsize, tensors, processors, threads, each, lanes, parts)

    if not backward and not residual and megabytes_of(g, itemsize) >= 30:
        return plan(384, 2)
    one, two = plan(512, 1), plan(256, 2)
    if one.parts == 1 and slices <= processors and one.fits(g, itemsize):
        return one  # each slice has only one program, so no program waits for another
    return one if backward and not two.fits(g, itemsize) else two


def _of_rows(
    g: Geometry, itemsize: int, backward: bool, residual: bool, processors: int, tensors: int
) -> Residence | None:
    """Choose the launch for a channels-last tensor."""
    return _of_layers(g, (g.channels,), itemsize, backward, residual, processors, tensors)


def choose_layers(
    g: Geometry, channels: tuple[int, ...], strides: tuple[int, ...], itemsize: int, backward: bool, processors: int
) -> Residence | None:
    """Choose one launch for one or more channels-last layers, or return None.

    The result is None if other kernels are faster or resident.cu does not support these channels and strides. ``g`` is
    the geometry of a tensor with the channels of all layers.
    """
    v = WIDTH // itemsize
    if any(n % v for n in (*channels, *strides)):
        return None
    if len(channels) > 1:
        if backward and (found := _in_rounds(g, channels, itemsize, processors)) is not None:
            return found
        if not backward and megabytes_of(g, itemsize) < 7:
            return None
    return _of_layers(g, channels, itemsize, backward, False, processors, 2 if backward else 1)


def _in_rounds(g: Geometry, channels: tuple[int, ...], itemsize: int, processors: int) -> Residence | None:
    """Plan a backward pass in rounds, each of which processes as many slices as fit on chip.

    Returns None in four cases: all slices fit at once, fewer than two slices fit, more than a tenth of the capacity
    would be wasted because the last round is not full, or wider slices are faster.
    """
    lanes, threads = 4, 512
    slices = sum(up(c * itemsize, lanes * WIDTH) for c in channels)
    kept = make(g, itemsize, 2, processors, threads, 1, lanes, 1).kept
    parts = up(g.rows, threads // lanes * kept)
    groups = processors // parts
    if not 2 <= groups < slices or slices / (up(slices, groups) * groups) < 0.9:
        return None
    if all(c * itemsize % (8 * WIDTH) == 0 for c in channels):
        return None  # slices of 8 vectors per row are faster, although not all values fit on chip
    r = make(g, itemsize, 2, processors, threads, 1, lanes, processors // groups)
    return r._replace(slices=slices, groups=groups)


def _of_layers(
    g: Geometry,
    channels: tuple[int, ...],
    itemsize: int,
    backward: bool,
    residual: bool,
    processors: int,
    tensors: int,
) -> Residence | None:
    """Choose the launch for channels-last layers; ``g`` is the geometry of a tensor with the channels of all layers."""
    megabytes, plain = megabytes_of(g, itemsize), not backward and not residual
    least = (1 if residual else 3) if backward else (3 if residual else 6)
    if megabytes < least or megabytes > (250 if plain else 200):
        return None
    # Wide slices access longer contiguous pieces of memory. But if slices are narrow, there are more of them, so fewer
    # programs share a slice and wait for each other at its barrier. `widths` are possible numbers of vectors per row of
    # a slice. Choose the first width that leaves few threads idle. If no width does, choose `wide`.
    narrow = megabytes < (30 if plain else 10 if backward and residual else 16)
    vectors = [c * itemsize // WIDTH for c in channels]
    if megabytes > 50 and any(n % 8 for n in vectors) and not plain:
        return None
    widths = (4, 2) if narrow else (8, 4, 2)
    slices_of = {n: sum(up(own, n) for own in vectors) for n in (8, 4, 2)}
    wide = 8 if sum(vectors) > 4 and not narrow else 4
    full = 0.85 if len(channels) == 1 else 0.9
    lanes = next((n for n in widths if sum(vectors) / (slices_of[n] * n) > full), wide)
    threads, each = (512, 1) if not (plain and narrow) else (384, 2) if megabytes < 10 else (256, 2)
    slices = slices_of[lanes]
    if slices > processors:
        return None
    r = make(g, itemsize, tensors, processors, threads, each, lanes, processors * each // slices)
    return r._replace(slices=slices, groups=min(slices, processors * each // r.parts))


def weaves(g: Geometry, itemsize: int, backward: bool, residual: bool) -> bool:
    """Return whether to process a tensor in woven form (see WOVEN in resident.cu).

    With a residual, the result does not depend on ``backward``, because both passes must use the same order of sign
    bits.
    """
    v = WIDTH // itemsize
    # Check the size first. If a tensor with symbolic sizes is small, the other conditions are not evaluated, so
    # torch.compile adds no guards for them.
    if megabytes_of(g, itemsize) < 4 or g.nhwc or g.width < 2 * v or g.stride % v:
        return False
    if woven_lanes(g, itemsize, residual) is None:
        return False
    alone = g.width % 2 == 1  # whether the Triton kernels could load only one value per access
    least = (4 if alone else 6) if residual else (4 if alone else 10) if backward else (10 if alone else 30)
    return megabytes_of(g, itemsize) >= least


def woven_lanes(g: Geometry, itemsize: int, residual: bool) -> int | None:
    """Return how many vectors a slice has per example in woven form, or None if the woven form does not apply.

    A slice has the smallest number of vectors that hold a whole number of channels. With a residual, the sign bits of
    these vectors must also fill whole bytes.

    >>> from .layout import geometry_of
    >>> woven_lanes(geometry_of(torch.empty(2, 64, 7, 7)), 2, False)  # 8 channels of 49 values fill 49 vectors of 8
    49
    """
    v = WIDTH // itemsize
    if g.nhwc or g.width % v == 0 or g.width < v or g.plane != g.width:
        return None
    values = 8 if residual else v
    channels = next(n for n in (1, 2, 4, 8) if n * g.width % values == 0)
    lanes = channels * g.width // v
    return lanes if g.channels % channels == 0 and lanes <= 128 else None


@cache
def runs_on(device: torch.device) -> bool:
    """Return whether the kernel can run on a device: it needs a Hopper GPU, NVRTC and ``AT_ONCE`` = 1 or 2."""
    # `alone` says whether AT_ONCE (see schedule.py) allows this kernel. Two launches at the same time cannot deadlock,
    # because launches are cooperative: if two launches do not fit on the GPU together, one waits for the other.
    alone = 0 < AT_ONCE <= 2
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    fits = properties.major == 9 and getattr(properties, "shared_memory_per_block_optin", SHARED) >= SHARED
    return alone and fits and driver.unavailable() is None


def takes(*tensors: Tensor | None) -> bool:
    """Return whether all tensors are aligned to 16 bytes, ignoring those that are None."""
    return all(t is None or t.data_ptr() % WIDTH == 0 for t in tensors)


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("C", "units", "slices", "parts")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "x_plane", "y_stride", "y_plane", "dy_stride")),
        *((name, ctypes.c_uint) for name in ("width", "magic", "shift", "passing")),
    )


@cache
def _shape(g: Geometry, itemsize: int, r: Residence, dy_stride: int) -> _Shape:
    v, b = WIDTH // itemsize, itemsize
    passing = g.rows * g.channels * itemsize > CACHE
    if g.nhwc:
        strides = g.stride * b, 0, g.channels * b, 0, dy_stride * b
        return _Shape(g.channels, g.rows, r.slices, r.parts, *strides, 0, 0, 0, passing)
    strides = g.stride * b, g.plane * b, g.channels * g.width * b, g.width * b, g.channels * g.width * b
    if r.plane:
        return _Shape(g.channels, g.rows // g.width, r.slices, r.parts, *strides, 0, 0, 0, passing)
    division = magic_of(g.width // v)
    return _Shape(g.channels, g.rows // v, r.slices, r.parts, *strides, g.width // v, *division, passing)


@cache
def _kernel(
    name: str,
    kind: int,
    nhwc: bool,
    activation: int,
    residual: bool,
    code: tuple[int, ...],
    device: torch.device,
    layers: int = 0,
) -> driver.Kernel:
    threads, each, lanes, plane, kept, added = code
    backward = name.startswith("backward")
    definitions = {
        "KIND": kind, "LAST": int(nhwc), "ACT": activation, "RESIDUAL": int(residual), "ADDED": added,
        "THREADS": threads, "EACH": each, "SV": lanes, "PLANE": plane, "K": kept, "LAYERS": layers,
        "BACKWARD" if backward else "FORWARD": 1, **{known.upper(): i for i, known in enumerate(NAMES)},
    }  # fmt: skip
    shared = kept * threads * WIDTH * (2 if backward or added else 1)
    return driver.load(SOURCE, name, tuple(definitions.items()), threads, shared, device, cooperative=True)


def layers_kernel(
    name: str, dtype: torch.dtype, activation: int, r: Residence, layers: int, device: torch.device
) -> driver.Kernel:
    """Return the kernel ``name``, "forward_layers" or "backward_layers", compiled for ``layers`` layers."""
    return _kernel(name, KINDS[dtype], True, activation, False, r.code, device, layers)


@cache
def prepared(
    name: str,
    dtype: torch.dtype,
    activation: int,
    residual: bool,
    g: Geometry,
    r: Residence,
    dy_stride: int,
    index: int,
) -> tuple[driver.Kernel, driver.Arguments]:
    """Return the kernel ``name``, "forward" or "backward", and its arguments.

    The following arguments change from launch to launch:

    - forward: the addresses of x, y, residual, bits, gamma, beta, stats, partial, words, the running mean, the running
      variance, the counter of batches and the counter of skipped batches, then momentum, whether the averages are
      cumulative, eps and slope.
    - backward: the addresses of dy, x, bits, stats, dx, dresidual, dgamma, dbeta, partial and words, then slope.
    """
    device = torch.device("cuda", index) if index >= 0 else torch.device("cpu")
    kernel = _kernel(name, KINDS[dtype], g.nhwc, activation, residual, r.code, device)
    shape = _shape(g, dtype.itemsize, r, dy_stride)
    if name == "forward":
        return kernel, driver.Arguments(*["P"] * 9, "PPPPfi", shape, "f", "f")
    return kernel, driver.Arguments(*["P"] * 10, shape, "f")
