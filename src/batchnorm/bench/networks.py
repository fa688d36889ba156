"""How much faster do torchvision's and timm's networks train once they are converted?

    python -m batchnorm bench networks --out runs/bench/networks.json

The command compares whole training steps of a stock network and of ``bn.convert(net, example)``: in eager mode,
captured as one CUDA graph, and under ``torch.compile``. It also times the stock network under
``torch.compile(backend="batchnorm")``. On a GPU, steps run in bf16 autocast and channels_last. On a CPU, they run in
float32, and only eager mode is timed unless ``--modes`` lists others.

Both networks start from the same weights and are timed alternately in one process. If their losses differ by more than
a tolerance, they are not timed. In eager mode on a CPU, the stock network without its batch normalization layers is
timed too, as a lower limit of the step time.

Each row of the result file has the measurements of one network in one mode, such as eager, at one batch size. Rows
that were measured with the current code are not measured again. A result file from another machine, or from other
versions or settings, is refused.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from ..errors import JobsFailedError, above, at_least, differences
from ..pictures import picture_beside
from ..processes import Remote
from ..report.speeds import short_name
from ..results import check_writable, environment, read_json, write_result
from ..train.distributed import find_device
from .bars import Bar, geometric_mean
from .kernel_rows import code_of
from .network_steps import (
    COMPILED_TOGETHER,
    COMPILING,
    TURN,
    Measurement,
    Mode,
    NetworkJob,
    Row,
    Settings,
    failed,
    network_to_convert,
    results_of,
)

QUESTION = "speedup of a converted network's training step over the stock network's"
NETWORKS = (
    "torchvision:resnet50",
    "torchvision:resnet18",
    "torchvision:mobilenet_v3_large",
    "torchvision:efficientnet_b0",
    "timm:resnet50",
    "torchvision:regnet_y_400mf",
    "torchvision:googlenet",
    "torchvision:densenet121",
)
SOURCE = Path(__file__).parents[1]
MEASURED = ("ops", "layers", "graph", "surgery", "network_call.py", "network_copy.py")  # code that affects the times
Key = tuple[str, Mode, int]
Report = dict[Key, Row]
Layout = tuple[Sequence[int], Sequence[tuple[Mode, ...]]]  # batch sizes, and tuples of modes that are measured together


def bars(rows: Iterable[Row], device: str) -> list[Bar]:
    """Check measured rows against the goals for converted networks on an H200, or on a CPU.

    >>> row = {"network": "torchvision:resnet50", "mode": "eager", "batch": 8, "speedup": 1.25}
    >>> for bar in bars([row], "cpu"):
    ...     print(bar.line())
    time relative to stock's, geometric mean: 0.800, goal at most 0.9, 1 rows: reached
    time relative to stock's, worst: 0.800, goal at most 1, 1 rows: reached
    """
    good = [row for row in rows if "failed" not in row]
    if device == "cpu":
        times = [1 / row["speedup"] for row in good]
        return [
            Bar("time relative to stock's, geometric mean", 0.9, geometric_mean(times), False, len(times)),
            Bar("time relative to stock's, worst", 1.0, max(times, default=None), False, len(times)),
        ]

    def of(*modes: Mode, batch: int | None = None, network: str | None = None) -> list[Row]:
        return [
            row
            for row in good
            if row["mode"] in modes and batch in (None, row["batch"]) and network in (None, row["network"])
        ]

    def mean(what: str, wanted: float, rows: list[Row]) -> Bar:
        return Bar(
            f"{what}: speedup, geometric mean", wanted, geometric_mean([r["speedup"] for r in rows]), True, len(rows)
        )

    def worst(what: str, wanted: float, values: list[float]) -> Bar:
        return Bar(what, wanted, max(values, default=None), False, len(values))

    def memory(*modes: Mode) -> list[float]:
        return [row["ours_peak_bytes"] / row["stock_peak_bytes"] for row in of(*modes)]

    first = NETWORKS[0]
    upper = [row["interval"][1] for row in good]
    compiling = [row["ours_first_step_seconds"] / row["stock_first_step_seconds"] for row in of(*COMPILED_TOGETHER)]
    return [
        Bar("smallest upper end of the speedups' 95% intervals", 0.97, min(upper, default=None), True, len(upper)),
        mean("eager, batch 256", 1.3, of("eager", batch=256)),
        mean("eager, batch 32", 1.0, of("eager", batch=32)),
        mean("torch.compile", 1.05, of("compiled")),
        mean("torch.compile(backend='batchnorm')", 1.05, of("backend")),
        mean("CUDA graph", 1.4, of("graph")),
        worst(f"{first}, eager, batch 256: time relative to stock's", 0.67, [
            1 / row["speedup"] for row in of("eager", batch=256, network=first)
        ]),
        mean(f"{first}, torch.compile, batch 256", 1.1, of("compiled", batch=256, network=first)),
        worst("eager: peak memory relative to stock's, worst", 1.02, memory("eager")),
        worst("torch.compile: peak memory relative to stock's, worst", 1.05, memory("compiled")),
        worst("torch.compile: CPU time to compile relative to stock's, worst", 1.2, compiling),
    ]  # fmt: skip


@cache
def digest(mode: Mode) -> str:
    """Return a digest of the code that affects the times in a mode."""
    found = hashlib.sha256()
    for name in (*MEASURED, *(["dynamo.py"] if mode == "backend" else [])):
        path = SOURCE / name
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in (".py", ".cu", ".c", ".cpp"):
                found.update(code_of(file).encode())
    return found.hexdigest()[:12]


def machine(settings: Settings) -> dict[str, Any]:
    """Return the hardware, versions and settings that all rows of a result file must share."""
    env = environment()
    versions = {}
    for package in ("triton", "torchvision", "timm"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "device": env["gpu"] if settings.on_gpu else env["hardware"],
        "threads": None if settings.on_gpu else env["threads"],
        "python": platform.python_version(),
        "torch": torch.__version__,
        **versions,
        **{name: value for name, value in asdict(settings).items() if name not in ("device", "seconds")},
        "steps": "bf16 autocast, channels_last" if settings.on_gpu else "float32",
    }


def earlier_rows(path: Path, here: dict[str, Any], keep: bool = False) -> Report:
    """Return a result file's successful rows: those measured with the current code or, with ``keep``, all of them."""
    if not path.exists():
        return {}
    report = read_json(path)
    if other := differences(report["machine"], {**dict.fromkeys(report["machine"]), **here}):
        raise ValueError(
            f"the results in {path} are from another machine, other versions or other settings ({'; '.join(other)}): "
            "choose another --out"
        )
    good = (row for row in report["rows"] if "failed" not in row)
    return {_key(row): row for row in good if keep or row["code"] == digest(row["mode"])}


def _key(row: Row) -> Key:
    return row["network"], row["mode"], row["batch"]


def plan(networks: Sequence[str], modes: Sequence[Mode], batches: Sequence[int], rows: Report) -> list[NetworkJob]:
    """Return the jobs for the missing rows.

    The first jobs, one per network, measure all modes that do not compile. The jobs that compile follow. For each
    network and batch size, there is one job for the modes in ``COMPILED_TOGETHER``, and one job for each other
    mode that compiles.
    """
    quick: Layout = batches, [(mode,) for mode in modes if mode not in COMPILING]
    alone = [mode for mode in modes if mode in COMPILING and mode not in COMPILED_TOGETHER]
    compiling = [tuple(mode for mode in modes if mode in COMPILED_TOGETHER), *((mode,) for mode in alone)]
    slow: list[Layout] = [((batch,), [group]) for batch in batches for group in compiling]
    jobs = []
    for some, groups in (quick, *slow):
        for network in networks:
            units = [
                Measurement(batch, left)
                for batch in some
                for group in groups
                if (left := tuple(mode for mode in group if (network, mode, batch) not in rows))
            ]
            jobs += [NetworkJob(network, tuple(units))] if units else []
    return jobs


def one_per_mode(job: NetworkJob) -> list[NetworkJob]:
    """If a job compiles, split it into one job per batch size and mode; otherwise, return a list of this job alone.

    The new jobs can compile in parallel, but each of them compiles the stock network again.

    >>> one_per_mode(NetworkJob("timm:resnet50", (Measurement(32, ("compiled", "backend")),)))[1]
    NetworkJob(network='timm:resnet50', units=(Measurement(batch=32, modes=('backend',)),))
    """
    units = [unit for unit in job.units if unit.modes[0] in COMPILING]
    split = [NetworkJob(job.network, (Measurement(unit.batch, (mode,)),)) for unit in units for mode in unit.modes]
    return split or [job]


class _Measuring:
    """The results of one job, which a worker process computes and returns one at a time."""

    def __init__(self, job: NetworkJob, settings: Settings) -> None:
        # Other processes compile at the same time, so one thread per process keeps the cores busy.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        self.results, self.settings = results_of(job, settings), settings
        self.has_turn = self.failed = False

    def next(self) -> tuple[Measurement, list[Row]] | str:
        """Return the next measurement and its rows.

        Before the first timing, return ``TURN``; after the last measurement, return "".

        Raises:
            BrokenDeviceError: if a row failed and this process can no longer use the GPU.
        """
        if self.failed and self.settings.on_gpu:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:  # for example after an illegal memory access
                raise BrokenDeviceError(str(error)) from error
        for found in self.results:
            if isinstance(found, tuple):
                self.failed = any("failed" in row for row in found[1])
                return found
            if not self.has_turn:
                self.has_turn = True
                return TURN
        return ""


class BrokenDeviceError(RuntimeError):
    """Raised if a process can no longer use the GPU."""


@dataclass
class _Worker:
    """A worker process, the measurements that it has not made yet, and whether it waits for its turn to time them."""

    job: NetworkJob
    remote: Remote
    left: list[Measurement]
    waits: bool = False


def in_turns(
    jobs: Sequence[NetworkJob], settings: Settings, processes: int, end: float
) -> Iterator[tuple[str, list[Row]]]:
    """Run each job in its own process, and yield the network and rows of each measurement.

    While one process is timed, the other processes are paused. If a job's process dies, a new process continues with
    the measurement after the failed one. All processes are stopped when ``time.monotonic()`` reaches ``end``.
    """
    waiting, workers = list(jobs), list[_Worker]()
    timing: _Worker | None = None
    try:
        while waiting or workers:
            if timing is None:
                while waiting and len(workers) < processes:
                    job = waiting.pop(0)
                    workers.append(_Worker(job, Remote(_Measuring, job, settings), list(job.units)))
                timing = next((worker for worker in workers if worker.waits), None)
                if timing is not None:
                    for worker in workers:
                        worker.remote.signal("SIGSTOP" if worker is not timing else "SIGCONT")
                    timing.remote.start("next")
            found = wait([worker.remote.pipe for worker in workers], max(0.0, min(end - time.monotonic(), 1e6)))
            if not found:
                return
            for worker in [worker for worker in workers if worker.remote.pipe in found]:
                result: Any = ""
                try:
                    # The first result of a worker is None, and only means that the worker is ready.
                    result = worker.remote.result()
                except BrokenDeviceError:
                    pass
                except Exception as error:
                    if worker.left:
                        yield worker.job.network, failed(worker.left.pop(0), str(error).partition("\n")[0])
                if isinstance(result, tuple):
                    worker.left.remove(result[0])
                    yield worker.job.network, result[1]
                if result == TURN:
                    worker.waits = True
                elif result != "":
                    worker.remote.start("next")
                else:
                    workers.remove(worker)
                    worker.remote.close()
                    if worker is timing:
                        timing = None
                        for other in workers:
                            other.remote.signal("SIGCONT")
                    if worker.left:
                        waiting.insert(0, NetworkJob(worker.job.network, tuple(worker.left)))
    finally:
        for worker in workers:
            worker.remote.close(0)


def here(jobs: Sequence[NetworkJob], settings: Settings, end: float) -> Iterator[tuple[str, list[Row]]]:
    """Run the jobs in this process until time ``end``; yield the network and rows of each measurement."""
    for job in jobs:
        for found in results_of(job, settings):
            if isinstance(found, tuple):
                yield job.network, found[1]
                if time.monotonic() > end:
                    return


def networks(
    networks: tuple[str, ...] = NETWORKS,
    modes: tuple[Mode, ...] = (),
    batches: tuple[int, ...] = (),
    size: int = 224,
    device: str = "auto",
    seconds_per_row: float = 10.0,
    minutes: float = math.inf,
    jobs: int = os.cpu_count() or 1,
    cudnn_benchmark: bool = False,
    keep: bool = False,
    out: Path = Path("runs/bench/networks.json"),
) -> list[Row]:
    """Compare the time and memory of training steps of stock networks and of their copies made by ``bn.convert``.

    Args:
        networks: torchvision:NAME, timm:NAME, or MODULE:FUNCTION; the function returns a classifier, or a classifier
            and an example batch.
        modes: eager, graph (the whole step as one CUDA graph), compiled (both networks under torch.compile) and backend
            (the stock network under torch.compile with this library's backend). These four are the default on a GPU;
            eager is the default on a CPU. The modes dynamic, reduce-overhead and max-autotune compile both networks
            with the torch.compile option of the same name. The other modes are eager: evaluation, nchw, float32,
            fp16 (with a GradScaler), bf16-weights, checkpoint (activation checkpointing of each stage's blocks),
            accumulate (add the gradients of two half batches), ddp and fsdp2 (in one process).
        batches: batch sizes, by default 256 and 32 on a GPU and 8 on a CPU; a batch size is halved if memory runs out.
        size: height and width of the images; not used if the function returns an example batch.
        device: cpu, cuda, or auto.
        seconds_per_row: how long to time each network in each mode at each batch size; the modes compiled and backend
            share this time. Timing ends sooner once the speedup is known to within 1%, but takes at least six rounds.
        minutes: stop after this many minutes and keep the rows measured so far; run the same command again to continue.
        jobs: on a GPU, number of processes; they build and compile networks in parallel, and are timed one at a time.
        cudnn_benchmark: let cuDNN try its algorithms and choose the fastest, which takes a long time.
        keep: keep rows of the result file that were measured with other code, instead of measuring them again; each row
            records its commit.
        out: the result file; a picture is written next to it. Published result files are in results/.

    Raises:
        ValueError: if an option is wrong, if a network cannot be built or has no batch normalization, or if the result
            file is from another machine or from other versions or settings.
        OSError: if the result file cannot be written.
        JobsFailedError: if a row failed; the other rows are written.
    """
    end = time.monotonic() + 60 * minutes
    device = find_device(device).type
    modes = modes or (("eager", "graph", *COMPILED_TOGETHER) if device == "cuda" else ("eager",))
    batches = batches or ((256, 32) if device == "cuda" else (8,))
    _check(networks, modes, device, batches=batches, size=size, jobs=jobs)
    above(0, seconds_per_row=seconds_per_row, minutes=None if minutes == math.inf else minutes)
    check_writable(out)
    settings = Settings(device, size, seconds_per_row, cudnn_benchmark=cudnn_benchmark)
    machine_here = machine(settings)
    rows = earlier_rows(out, machine_here, keep)
    missing = plan(networks, modes, batches, rows)
    if device == "cuda" and 2 * len(missing) <= jobs:
        missing = [part for job in missing for part in one_per_mode(job)]
    # Raise an error now, not after hours of work, if a network cannot be built or has no batch normalization.
    for name in dict.fromkeys(job.network for job in missing):
        network_to_convert(name)
    print(f"{len(rows)} rows are already measured, {_count(missing)} are not", flush=True)
    origin = {"commit": environment()["commit"], "date": time.strftime("%Y-%m-%d")}
    found = in_turns(missing, settings, jobs, end) if device == "cuda" else here(missing, settings, end)
    for network, measured in found:
        for row in measured:
            row = {"network": network, **row, **origin, "code": digest(row["mode"])}
            rows[_key(row)] = row
            print(line(row), flush=True)
        judged = [{**bar._asdict(), "reached": bar.reached} for bar in bars(rows.values(), device)]
        content = {"machine": machine_here, "settings": asdict(settings), "bars": judged, "rows": [*rows.values()]}
        write_result(out, QUESTION, **content)
    if {*NETWORKS} <= {row["network"] for row in rows.values()}:  # the bars are goals for all of NETWORKS together
        for bar in bars(rows.values(), device):
            print(bar.line())
    if any("failed" not in row and row["mode"] in MODE_NAMES for row in rows.values()):
        picture_beside(out, draw)
    if left := _count(plan(networks, modes, batches, rows)):
        print(f"{left} rows are not measured yet: run the same command again to measure them")
    if problems := sum("failed" in row for row in rows.values()):
        raise JobsFailedError(f"{problems} of {len(rows)} rows failed; run the same command again to retry them")
    return list(rows.values())


def _check(networks: Sequence[str], modes: Sequence[Mode], device: str, **numbers: Any) -> None:
    if device == "cpu" and "graph" in modes:
        raise ValueError("the mode 'graph' needs a CUDA device: remove it from --modes")
    if not networks:
        raise ValueError("networks is empty: give at least one network")
    for name in networks:
        if not name.partition(":")[2]:
            raise ValueError(f"'{name}' is not a network: give torchvision:NAME, timm:NAME or MODULE:FUNCTION")
        library = name.partition(":")[0]
        if library in ("torchvision", "timm") and find_spec(library) is None:
            raise ValueError(f"{name} needs {library}, which is not installed; run: pip install {library}")
    at_least(1, **numbers)


def _count(jobs: Sequence[NetworkJob]) -> int:
    return sum(len(unit.modes) for job in jobs for unit in job.units)


def line(row: Row) -> str:
    """Return a row as one line of text."""
    start = f"{row['network']:<30} {row['mode']:<15} batch {row['batch']:>3}"
    if "failed" in row:
        return f"{start}: failed: {row['failed']}"
    halved = "" if row["examples"] == row["batch"] else f", only {row['examples']} examples fit into memory"
    low, high = row["interval"]
    stock, ours = row["stock_peak_bytes"], row["ours_peak_bytes"]
    memory = f", {ours / stock:.3f} times stock's memory" if stock else ""
    limit = f", stock without BN is {1 / row['without_bn']:.3f} times as fast as stock" if "without_bn" in row else ""
    return (
        f"{start}: stock {row['stock_ms']:8.2f} ms, ours {row['ours_ms']:8.2f} ms, {row['speedup']:.3f} times as fast"
        f" ({low:.3f} to {high:.3f}, {row['pairs']} pairs){limit}{memory}, first step: stock"
        f" {row['stock_first_step_seconds']:.1f} s, ours {row['ours_first_step_seconds']:.1f} s{halved}"
    )


def draw(report: dict[str, Any], plt: Any) -> Any:
    """Draw one panel per mode in ``MODE_NAMES``, with one bar per network and batch size.

    All panels list the networks in the same order: by the speedup in the first mode, at the largest batch size.
    """
    rows = [row for row in report["rows"] if "failed" not in row and row["mode"] in MODE_NAMES]
    modes, names, batches = (list(dict.fromkeys(row[key] for row in rows)) for key in ("mode", "network", "batch"))
    batches.sort(reverse=True)
    speedups = {(row["network"], row["mode"], row["batch"]): row["speedup"] for row in rows}
    names.sort(key=lambda name: -speedups.get((name, modes[0], batches[0]), 0))
    labels = [short_name(name, names) for name in names]
    height, columns = 0.8 / len(batches), min(2, len(modes))
    lines = -(-len(modes) // columns)
    size = (3.6 * columns + 1.4, (0.25 * len(names) + 0.8) * lines + 0.6)
    figure, grid = plt.subplots(lines, columns, sharex=True, sharey=True, squeeze=False, figsize=size)
    for axes, mode in zip(grid.flat, modes, strict=False):
        for k, batch in enumerate(batches):
            shown = [row for row in rows if (row["mode"], row["batch"]) == (mode, batch)]
            places = [names.index(row["network"]) + (k - (len(batches) - 1) / 2) * height for row in shown]
            wide = [row["speedup"] for row in shown]
            around = [[abs(row["interval"][i] - row["speedup"]) for row in shown] for i in (0, 1)]
            axes.barh(places, wide, 0.9 * height, xerr=around, color=f"C{k}", label=f"batch {batch}", ecolor="0.2")
            for row, place in zip(shown, places, strict=True):
                axes.text(0.03, place, f"{row['speedup']:.2f}", va="center", fontsize=7, color="white")
        axes.axvline(1, color="k", lw=1)
        axes.grid(visible=False)
        axes.set(title=MODE_NAMES[mode], yticks=range(len(names)), yticklabels=labels)
    for axes in grid.flat[len(modes) :]:
        axes.remove()
    grid[0, 0].invert_yaxis()
    figure.supxlabel("speedup of a training step over the stock network", fontsize=8)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=len(batches), fontsize=8)
    told = report["machine"]
    figure.suptitle(f"{told['device']}, torch {told['torch']}, {told['steps']}", fontsize=9, x=0.02, ha="left")
    return figure


MODE_NAMES = {
    "eager": "eager",
    "graph": "one CUDA graph",
    "compiled": "torch.compile",
    "backend": "stock, backend='batchnorm'",
}
