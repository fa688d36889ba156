"""What limits the fused CUDA kernels? Nsight Compute reads the hardware counters of each launch.

    batchnorm bench counters --out runs/bench/counters.json

Nsight Compute's command ``ncu`` runs this module, profiles it with cold caches, and repeats each launch until all
counters are read.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import JobsFailedError, at_least
from ..ops import Activation
from ..ops.call import Call
from ..ops.cuda import launch
from ..results import check_writable, write_result
from .gpu_timing import require_gpu
from .kernel_rows import LayerShape, names_of, short_list
from .kernels import Parameters, Sets

QUESTION = "hardware counters of single launches of the fused kernels: bytes moved, cache hits, occupancy and stalls"
METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "lts__t_sector_hit_rate.pct": "l2_hit_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps_percent",
    "launch__registers_per_thread": "registers",
    "launch__shared_mem_per_block_dynamic": "shared_bytes",
    "launch__waves_per_multiprocessor": "waves",
    "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio": "stalled_on_memory",
    "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio": "stalled_at_barriers",
    "smsp__average_warps_issue_stalled_membar_per_issue_active.ratio": "stalled_on_fences",
}
READY = "watched: "  # prefix of the lines in which the profiled program describes its passes


class CountedPass(NamedTuple):
    """A forward or backward pass of one layer."""

    layer: tuple[str, int, int, int]
    layout: str
    op: str
    direction: str
    path: str
    bytes: int  # size of the layer's input

    @property
    def launches(self) -> int:
        """The number of kernel launches: two on the streaming path, one on any other path."""
        return 2 if self.path == "stream" else 1


def counters(out: Path | None = None, least: float = 5.0) -> None:
    """Print hardware counters of forward and backward passes, on the layers of ``bench kernels --layers short``.

    Nsight Compute's command ``ncu`` must be on PATH and must have permission to read hardware counters.

    Args:
        out: the result file; by default, none is written.
        least: skip layers whose input takes fewer megabytes than this.
    """
    at_least(0, least=least)
    if shutil.which("ncu") is None:
        raise ValueError("ncu was not found on PATH: install NVIDIA Nsight Compute, or add its folder to PATH")
    require_gpu()
    check_writable(out)
    command = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    command += ["--profile-from-start", "off", "--metrics", ",".join(METRICS)]
    watched = [sys.executable, "-m", __spec__.name, str(least)]
    done = subprocess.run([*command, *watched], capture_output=True, text=True)
    if done.returncode:
        raise JobsFailedError(f"ncu failed: {(done.stdout + done.stderr)[-2000:]}")
    rows = list(matched(done.stdout))
    for row in rows:
        print(line(row))
    if out is not None:
        write_result(out, QUESTION, rows=rows)


def matched(output: str) -> Iterator[dict[str, Any]]:
    """Yield one row for each launch of our kernels in ncu's output, with the pass that the launch belongs to."""
    lines = output.splitlines()
    told = [text.removeprefix(READY) for text in lines if text.startswith(READY)]
    passes = [CountedPass(**{**json.loads(text), "layer": tuple(json.loads(text)["layer"])}) for text in told]
    start = next((i for i, text in enumerate(lines) if text.startswith('"ID"')), len(lines))
    # Drop the first row, which holds units, and the launches of torch's own kernels.
    table = list(csv.DictReader(text for text in lines[start:] if text.startswith('"')))[1:]
    table = [row for row in table if row["Kernel Name"].split("(")[0] in ("forward", "backward")]
    if len(table) != sum(one.launches for one in passes):
        raise RuntimeError(
            f"ncu listed {len(table)} launches of our kernels, but {sum(one.launches for one in passes)} were expected"
        )
    launches = iter(table)
    for one in passes:
        for _ in range(one.launches):
            found = next(launches)
            numbers = {name: _number(found.get(metric)) for metric, name in METRICS.items()}
            yield {**one._asdict(), "kernel": found["Kernel Name"], **numbers}


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def line(row: dict[str, Any]) -> str:
    """Return a row as text, with the bytes read and written as multiples of the input's size."""
    network, batch, channels, size = row["layer"]
    moved = ["?" if row[name] is None else f"{row[name] / row['bytes']:.2f}" for name in ("read", "written")]
    rest = " ".join(f"{name} {row[name]:g}" for name in list(METRICS.values())[3:] if row[name] is not None)
    micro = "?" if row["nanoseconds"] is None else f"{row['nanoseconds'] / 1e3:.1f}"
    shape = f"{network} {batch}x{channels}x{size}x{size} {row['layout']} {row['op']} {row['direction']} ({row['path']})"
    return f"{shape}: {micro} us, read {moved[0]} and wrote {moved[1]} times the input's size, {rest}"


def watched(least: float) -> None:
    """Run the passes that ncu profiles, on layers with inputs of at least ``least`` megabytes."""
    for residual in (False, True):
        for layer in short_list():
            for channels_last in (True, False):
                if layer.batch * layer.channels * layer.size**2 * 2 >= least * 1e6:
                    _watch(layer, channels_last, residual)


def _watch(layer: LayerShape, channels_last: bool, residual: bool) -> None:
    sets, p = Sets(layer, channels_last, torch.bfloat16, residual, 2), Parameters(layer.channels)
    found = launch.paths(Call(sets.x[0], p.gamma, p.beta, activation=Activation("relu"), residual=sets.residual[0]))
    paths = dict(zip(("forward", "backward"), found, strict=True))

    layout, _, op = names_of(channels_last, torch.bfloat16, residual)

    @contextmanager
    def counted(direction: str) -> Iterator[None]:
        one = CountedPass((*layer,), layout, op, direction, paths[direction], sets.bytes)
        print(f"{READY}{json.dumps(one._asdict())}", flush=True)
        torch.cuda.profiler.start()
        yield
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()

    # The first call compiles the kernels and allocates memory, so it is not profiled.
    p.ours(sets.x[1], sets.residual[1]).backward(sets.dy[1])
    torch.cuda.synchronize()
    inputs = [sets.x[0], p.gamma, p.beta, *([] if sets.residual[0] is None else [sets.residual[0]])]
    with counted("forward"):
        y = p.ours(sets.x[0], sets.residual[0])
    with counted("backward"):
        torch.autograd.grad(y, inputs, sets.dy[0])


if __name__ == "__main__":
    watched(float(sys.argv[1]))
