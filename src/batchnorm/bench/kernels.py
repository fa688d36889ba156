"""How fast are the fused CUDA kernels, compared with eager torch, torch.compile and memory bandwidth?

    batchnorm bench kernels --out runs/bench/kernels.json

The command times forward and backward passes of BN+ReLU and of BN+add+ReLU, inside CUDA graphs. Except for the smallest
layers, the data is not in the cache when a pass starts. The command covers the layer shapes of two networks, in NCHW
and in NHWC. If our kernels compute wrong results for a layer, they are not timed on that layer.

Each row of the result file has the measurements of one layer in one layout, dtype and operation. Rows that were
measured with the current kernels are not measured again, so the work can span several sessions. A result file from
another GPU model, or from other software versions, is refused.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import ops
from ..errors import at_least
from ..pictures import picture_beside
from ..processes import device_turn, workers
from ..results import check_writable, environment
from .gpu_timing import Stopwatch, buffers, copy_bandwidth, require_gpu
from .kernel_rows import (
    Given,
    LayerShape,
    all_layers,
    digest,
    earlier_rows,
    hardware,
    is_measured,
    key_of,
    names_of,
    short_list,
)
from .kernels_report import bars, draw, line, write

EPS = 1e-5
# The largest relative error ||ours - expected|| / ||expected|| with which our kernels are still timed. For the 16-bit
# dtypes, it is 1.5 to 2 times the dtype's largest rounding error; for float32, about 170 times.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
Normalize = Callable[[Tensor, Tensor | None], Tensor]


class Parameters:
    """One layer's parameters and running statistics."""

    def __init__(self, channels: int) -> None:
        self.gamma = (torch.rand(channels, device="cuda") + 0.5).requires_grad_()
        self.beta = torch.randn(channels, device="cuda").requires_grad_()
        count = torch.zeros((), dtype=torch.long, device="cuda")
        mean, var = torch.zeros(channels, device="cuda"), torch.ones(channels, device="cuda")
        self.running = ops.Running(mean, var, count, count.clone())

    def ours(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Normalize, add the residual if there is one, and apply ReLU, in one call of this library."""
        layer = self.gamma, self.beta, self.running, 0.1, EPS
        return ops.batch_norm_(x, *layer, activation="relu", residual=residual)[0]

    def eager(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Normalize, add the residual if there is one, and apply ReLU, in separate calls of torch."""
        y = F.batch_norm(x, self.running.mean, self.running.var, self.gamma, self.beta, True, 0.1, EPS)
        return F.relu(y if residual is None else y + residual)


def contenders(p: Parameters, autotune: bool) -> dict[str, Normalize]:
    """Return the functions to time, by name."""
    found: dict[str, Normalize] = {"batchnorm": p.ours, "eager": p.eager}
    found["compile"] = torch.compile(p.eager, fullgraph=True, dynamic=False)
    if autotune:
        found["compile-max"] = torch.compile(p.eager, fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
    return found


class Sets:
    """``n`` sets of random inputs, residuals and output gradients; by default, :func:`buffers` chooses ``n``."""

    def __init__(
        self, layer: LayerShape, channels_last: bool, dtype: torch.dtype, residual: bool, n: int | None = None
    ) -> None:
        form = torch.channels_last if channels_last else torch.contiguous_format

        def draw() -> Tensor:
            return torch.randn(layer.shape, device="cuda").to(dtype, memory_format=form)

        self.bytes = math.prod(layer.shape) * dtype.itemsize
        self.n = n or buffers(self.bytes)
        self.x = [draw().requires_grad_() for _ in range(self.n)]
        self.dy = [draw() for _ in range(self.n)]
        self.residual = [draw().requires_grad_() if residual else None for _ in range(self.n)]

    def limit(self, bandwidth: float) -> tuple[float, float]:
        """Return how many seconds a forward and a backward pass need at ``bandwidth`` to move each tensor once."""
        extra = self.residual[0] is not None
        return tuple((n + extra) * self.bytes / bandwidth for n in (2, 3))  # type: ignore[return-value]


def check(sets: Sets, p: Parameters, call: Normalize) -> dict[str, float]:
    """Return the relative errors of the output y and of every gradient, on the first set of inputs.

    The expected gradients use the ReLU mask of our output, because rounding can change the sign of an input of the ReLU
    that is near 0. In float32, one changed sign would cause a larger error in the gradients than all other rounding. A
    mask that is really wrong still causes an error in y.
    """
    x, r, dy = sets.x[0], sets.residual[0], sets.dy[0]
    wide = torch.float64 if x.numel() < 2**25 or x.dtype == torch.float32 else torch.float32
    inputs = [x, p.gamma, p.beta, *([] if r is None else [r])]
    y = call(x, r)
    got = [y, *torch.autograd.grad(y, inputs, dy)]
    x_, g_, b_, *r_ = (t.detach().to(wide).requires_grad_() for t in inputs)
    z = F.batch_norm(x_, None, None, g_, b_, True, 0.0, EPS)
    z = z + r_[0] if r_ else z
    expected = [z.relu(), *torch.autograd.grad(z, [x_, g_, b_, *r_], dy.to(wide) * (y > 0))]
    names = ("y", "dx", "dgamma", "dbeta", "dresidual")
    return {
        name: float((a.detach().to(wide) - e.detach()).norm() / e.detach().norm())
        for name, a, e in zip(names, got, expected, strict=False)
    }


def time_passes(watch: Stopwatch, sets: Sets, p: Parameters, call: Normalize) -> tuple[float, float]:
    """Return the times of a forward and a backward pass, in seconds."""

    def forward(i: int) -> Tensor:
        return call(sets.x[i], sets.residual[i])

    def backward(i: int) -> tuple[Tensor, ...]:
        r = sets.residual[i]
        inputs = [sets.x[i], p.gamma, p.beta, *([] if r is None else [r])]
        return torch.autograd.grad(outputs[i], inputs, sets.dy[i])

    with torch.cuda.stream(watch.stream):
        outputs = [forward(0)]
        backward(0)
    torch.cuda.synchronize()
    seconds = watch.seconds(forward, sets.n)
    with torch.cuda.stream(watch.stream):
        outputs = [forward(i) for i in range(sets.n)]
    torch.cuda.synchronize()
    return seconds, watch.seconds(backward, sets.n)


def measure(
    bandwidth: float, layer: LayerShape, channels_last: bool, dtype: torch.dtype, residual: bool, autotune: bool
) -> dict[str, Any]:
    """Check our kernels on one layer, time every contender, and return a row of the result file."""
    torch._dynamo.reset()
    p = Parameters(layer.channels)
    calls = contenders(p, autotune)
    one = Sets(layer, channels_last, dtype, residual, 1)
    # The first calls compile the kernels. Other processes may use the GPU during these calls, because only the timing
    # below needs exclusive use of the GPU.
    for name, call in calls.items():
        if name != "eager":
            call(one.x[0], one.residual[0]).backward(one.dy[0])
    torch.cuda.synchronize()
    del one
    torch.cuda.empty_cache()
    names = zip(("layout", "dtype", "op"), names_of(channels_last, dtype, residual), strict=True)
    row: dict[str, Any] = {**layer._asdict(), **dict(names)}
    with device_turn():
        row |= time_all(bandwidth, Sets(layer, channels_last, dtype, residual), p, calls)
        if channels_last and dtype == torch.bfloat16 and autotune:
            half = Sets(layer, True, torch.float16, residual)
            row["us"]["cudnn-fp16"] = [t * 1e6 for t in time_passes(stopwatch(), half, p, p.eager)]
            del half
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return row


def time_all(bandwidth: float, sets: Sets, p: Parameters, calls: dict[str, Normalize]) -> dict[str, Any]:
    """Check our kernels, time every contender, and return the results as entries of a row."""
    x = sets.x[0]
    choice = ops.explain(x, p.gamma, p.beta, activation="relu", residual=sets.residual[0])
    row: dict[str, Any] = {
        "megabytes": sets.bytes / 1e6,
        "limit_us": [t * 1e6 for t in sets.limit(bandwidth)],
        "path": choice.reason if choice.path == "cuda" else choice.path,
        "us": {},
        "errors": check(sets, p, calls["batchnorm"]),
    }
    for name, call in calls.items():
        if name == "batchnorm" and not all(e <= ALLOWED[x.dtype] for e in row["errors"].values()):
            row["refused"] = "not timed, because the relative errors are too large:"
            continue
        row["us"][name] = [t * 1e6 for t in time_passes(stopwatch(), sets, p, call)]
    return row


@cache
def stopwatch() -> Stopwatch:
    """Return this process's stopwatch."""
    return Stopwatch()


def kernels(
    out: Path = Path("runs/bench/kernels.json"),
    layers: Literal["short", "all"] = "all",
    dtypes: tuple[Literal["bfloat16", "float32", "float16"], ...] = ("bfloat16", "float32"),
    autotune: bool = True,
    seconds: float = math.inf,
    jobs: int = max(1, (os.cpu_count() or 1) - 2),
) -> None:
    """Time the fused CUDA kernels against eager torch, torch.compile and the limit set by memory bandwidth.

    Args:
        out: the result file; a picture is written next to it. Published result files are in results/.
        layers: "all" for the layer shapes of the paper's Inception and of ResNet-50, "short" for a few of them.
        dtypes: dtypes of the activations.
        autotune: also time torch.compile's max-autotune mode and, for each bfloat16 layer in NHWC, cuDNN in float16.
        seconds: start no new measurements after this many seconds.
        jobs: number of processes, which compile in parallel and measure one at a time; 0 uses only this process.
    """
    at_least(0, jobs=jobs, seconds=None if seconds == math.inf else seconds)
    if not dtypes:
        raise ValueError("dtypes is empty: give at least one dtype")
    require_gpu()
    check_writable(out)
    begin = time.monotonic()
    given: list[Given] = [
        (layer, channels_last, getattr(torch, dtype), residual)
        for dtype in dtypes
        for residual in (False, True)
        for layer in (all_layers() if layers == "all" else short_list())
        for channels_last in (True, False)
    ]
    machine = hardware()
    origin = {"commit": environment()["commit"], "date": time.strftime("%Y-%m-%d")}
    processors = torch.cuda.get_device_properties().multi_processor_count
    rows = earlier_rows(out, machine, processors)
    wanted = "compile-max" if autotune else "compile"

    def not_measured() -> list[Given]:
        return [g for g in given if not is_measured(rows.get(key_of(*g), {"us": {}}), wanted)]

    waiting = not_measured()
    print(f"{len(given) - len(waiting)} rows are already measured, {len(waiting)} are not", flush=True)
    report: dict[str, Any] = {"hardware": machine, "bandwidth": copy_bandwidth(stopwatch()), "rows": rows}
    todo = [(report["bandwidth"], *g, autotune) for g in waiting]
    with workers(jobs, device_turns=True) as run:
        for outcome in run(measure, todo, seconds):
            if outcome.error is not None:
                print(f"{outcome.job}: {outcome.error!r}", flush=True)
                continue
            here = outcome.job[1:5]
            rows[key_of(*here)] = row = {**outcome.result, **origin, "kernels": digest(*here, processors)}
            print(f"{time.monotonic() - begin:4.0f} s {line(row)}", flush=True)
            write(report, out)
    for bar in bars(rows.values()):
        print(bar.line())
    if rows:
        picture_beside(out, draw)
    if left := len(not_measured()):
        print(f"{left} rows are not measured yet: run the same command again to measure them")
