"""For which shapes is our batch normalization on a CPU faster than torch's, and by how much?"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Column, Table
from torch import Tensor, nn

from .. import layers, ops
from ..errors import at_least
from ..processes import torch_threads
from ..progress import progress
from ..results import check_writable, write_result

QUESTION = "time of batch normalization on a CPU, forward and backward, relative to torch's"

CONTIGUOUS, LAST = "contiguous", "channels_last"

Level = Literal["functions", "layers"]

# Upper limits of our time divided by torch's: "relu" for BN + ReLU against torch's two calls, "none" for BN alone, and
# "few channels" instead of these two for channels_last inputs with 2 to FEW - 1 channels. Inputs with one channel keep
# the first two limits, because both layouts are then the same in memory.
BARS = {"relu": 1.0, "none": 1.25, "few channels": 1 / 3}
FEW = 8

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h


@dataclass(frozen=True)
class Case:
    """The name, shape, layout and dtype of an input for the benchmark."""

    name: str
    shape: tuple[int, ...]
    layout: str = CONTIGUOUS
    dtype: str = "float32"

    def bar(self, activation: str) -> float:
        """Return the upper limit for the ratio of our time to torch's.

        >>> Case("", (8, 64)).bar("relu"), Case("", (8, 64, 7, 7), LAST).bar("none")
        (1.0, 1.25)
        """
        few = self.layout == LAST and 1 < self.shape[1] < FEW
        return BARS["few channels"] if few else BARS[activation]

    def input(self) -> Tensor:
        """Return a random input that requires a gradient."""
        x = torch.randn(self.shape).to(getattr(torch, self.dtype))
        if self.layout == LAST:
            x = x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
        return x.requires_grad_()


@dataclass(frozen=True)
class CpuRow:
    """The measurements of one case; times and ratios are medians over rounds.

    ``ratios`` has our time divided by torch's. With ReLU, there are two ratios: one relative to torch with out-of-place
    ReLU, and one relative to torch with in-place ReLU. ``ratio`` is the first of ``ratios``, and must be below ``bar``.
    """

    level: Level
    case: Case
    activation: str
    torch_ms: float
    ours_ms: float
    ratios: dict[str, float]
    ratio: float
    bar: float


IN_BOTH_LAYOUTS = {
    "early images": (32, 64, 56, 56),
    "middle images": (32, 256, 14, 14),
    "late images": (64, 512, 7, 7),
    "colour images": (32, 3, 112, 112),
    "one channel": (32, 1, 64, 64),
    "four channels": (32, 4, 56, 56),
    "seven channels": (32, 7, 56, 56),
    "volumes": (4, 16, 8, 16, 16),
}
CASES = [
    *(Case(name, shape, layout) for name, shape in IN_BOTH_LAYOUTS.items() for layout in (CONTIGUOUS, LAST)),
    Case("small colour images", (32, 3, 32, 32), LAST),
    Case("tiny colour images", (16, 3, 16, 16), LAST),
    Case("small images", (8, 32, 16, 16)),
    Case("small images", (8, 32, 16, 16), LAST),
    Case("fully connected, MNIST", (60, 100)),
    Case("fully connected", (256, 512)),
    Case("sequences", (32, 64, 128)),
    Case("early images", (32, 64, 56, 56), CONTIGUOUS, "bfloat16"),
    Case("early images", (32, 64, 56, 56), LAST, "bfloat16"),
]


def cpu(
    *,
    out: Path | None = Path("runs/bench/cpu.json"),
    threads: int = 2,
    rounds: int = 25,
    seconds: float = 0.01,
    levels: tuple[Level, ...] = ("layers", "functions"),
) -> list[CpuRow]:
    """Time batch normalization in training, forward and backward, with and without ReLU, against torch.

    Our code and torch's alternate within each round, so that other work on the machine affects both. With glibc, the
    process keeps freed blocks of less than 32 MiB for reuse instead of returning them to the system.

    Args:
        out: the result file; in Python, None writes no file. Published result files are in results/.
        threads: number of threads that torch uses.
        rounds: number of rounds; the reported times and ratios are medians over the rounds.
        seconds: approximate time spent on each implementation in each round; at least one forward and backward pass is
            timed.
        levels: "layers" compares this library's layers with torch.nn's; "functions" compares ops.normalize_batch_ with
            F.batch_norm and F.relu. Unlike F.batch_norm, ops.normalize_batch_ also updates a count of batches.
    """
    at_least(1, threads=threads, rounds=rounds)
    at_least(0, seconds=seconds)
    if not levels:
        raise ValueError("levels is empty: give layers, functions or both")
    check_writable(out)
    memory = "kept by the process" if keep_freed_memory() else "kept or returned, as the allocator decides"
    with torch_threads(threads):
        plan = [(case, activation, level) for level in levels for case in CASES for activation in ("none", "relu")]
        rows = [measure(*which, rounds, seconds) for which in progress(plan, "cases timed")]
        judged = bars(asdict(row) for row in rows)
        if out is not None:
            settings = {"levels": levels, "rounds": rounds, "seconds": seconds, "freed memory": memory}
            told = [{**bar._asdict(), "reached": bar.reached} for bar in judged]
            write_result(out, QUESTION, settings=settings, bars=told, rows=[asdict(row) for row in rows])
    # Without a terminal, rich assumes a width that is too narrow for the table, and would truncate numbers.
    console = Console(width=None if sys.stdout.isatty() else 120)
    for level in levels:
        console.print(_table(level, [row for row in rows if row.level == level]))
    for bar in judged:
        console.print(bar.line(), soft_wrap=True, highlight=False)
    return rows


def keep_freed_memory() -> bool:
    """Make glibc keep freed blocks of less than 32 MiB; return False on failure, for example with another C library.

    By default, glibc returns free memory at the end of the heap to the system. The next pass must then fault the pages
    in again, which can take longer than the arithmetic. How much memory is returned depends on where small objects
    happen to be in the heap, so times would not be comparable.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # CDLL(None) raises TypeError on Windows
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(M_MMAP_THRESHOLD, 1 << 25))


def measure(case: Case, activation: str, level: Level, rounds: int, seconds: float) -> CpuRow:
    """Time our code and torch's alternately on one case.

    >>> row = measure(Case("small", (4, 3)), "relu", "functions", rounds=2, seconds=0.0)
    >>> row.torch_ms > 0 and row.ours_ms > 0
    True
    """
    forms = _torch(case, activation, level)
    sides = [_step(case, forward) for forward in (*forms.values(), _ours(case, activation, level))]
    loops = []
    for step in sides:
        step()
        loops.append(max(1, round(seconds / max(_time(step, 1), 1e-9))))
    turns = [[_time(step, n) for step, n in zip(sides, loops, strict=True)] for _ in range(rounds)]
    *theirs, ours = (median(times) * 1e3 for times in zip(*turns, strict=True))
    ratios = {form: round(median(turn[-1] / turn[i] for turn in turns), 3) for i, form in enumerate(forms)}
    plain = next(iter(ratios.values()))
    return CpuRow(
        level, case, activation, round(theirs[0], 4), round(ours, 4), ratios, plain, round(case.bar(activation), 3)
    )


def _time(step: Callable[[], None], loops: int) -> float:
    step()
    start = perf_counter()
    for _ in range(loops):
        step()
    return (perf_counter() - start) / loops


def _step(case: Case, forward: Callable[[Tensor], Tensor]) -> Callable[[], None]:
    x = case.input()
    dy = torch.empty_like(x).normal_().detach()

    def step() -> None:
        forward(x).backward(dy)
        x.grad = None

    return step


def _parameters(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    channels = case.shape[1]
    gamma, beta = torch.ones(channels, requires_grad=True), torch.zeros(channels, requires_grad=True)
    return gamma, beta, torch.zeros(channels), torch.ones(channels)


def _torch(case: Case, activation: str, level: Level) -> dict[str, Callable[[Tensor], Tensor]]:
    gamma, beta, mean, var = _parameters(case)
    layer = _kind(nn, case)(case.shape[1])

    def normalize(x: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, gamma, beta, training=True)

    norm: Callable[[Tensor], Tensor] = layer if level == "layers" else normalize
    if activation == "none":
        return {"alone": norm}
    relu, relu_ = nn.ReLU(), nn.ReLU(inplace=True)
    if level == "layers":
        return {"relu": lambda x: relu(norm(x)), "relu in place": lambda x: relu_(norm(x))}
    return {"relu": lambda x: F.relu(norm(x)), "relu in place": lambda x: F.relu(norm(x), inplace=True)}


def _ours(case: Case, activation: str, level: Level) -> Callable[[Tensor], Tensor]:
    name = None if activation == "none" else activation
    if level == "layers":
        return _kind(layers, case)(case.shape[1], activation=name)
    gamma, beta, mean, var = _parameters(case)
    running = ops.Running(mean, var, torch.tensor(0), torch.tensor(0))
    return lambda x: ops.normalize_batch_(x, gamma, beta, running, activation=name)


def _kind(home: object, case: Case) -> type[nn.Module]:
    return getattr(home, f"BatchNorm{max(1, len(case.shape) - 2)}d")  # type: ignore[no-any-return]


class CpuBar(NamedTuple):
    """A goal for a group of cases."""

    level: str
    what: str
    below: float | None
    worst: float
    worst_case: str
    met: int
    cases: int

    @property
    def reached(self) -> bool | None:
        """Whether every case is below the limit, or None if there is no limit."""
        return None if self.below is None else self.met == self.cases

    def line(self) -> str:
        """Return the goal, the worst case and the verdict as one line of text."""
        start = f"{self.level}: {self.what}: worst {self.worst:.3f} ({self.worst_case})"
        if self.below is None:
            return f"{start}, {self.met} of {self.cases} below 1"
        told = "reached" if self.reached else "MISSED"
        return f"{start}; goal {told}: {self.met} of {self.cases} below {self.below:.3g}"


def bars(rows: Iterable[dict[str, Any]]) -> list[CpuBar]:
    """Check measured rows against the limits. Ratios to torch with in-place ReLU are reported, but have no limit.

    >>> case = {"name": "images", "shape": (64, 512, 7, 7), "layout": "contiguous", "dtype": "float32"}
    >>> row = {"level": "layers", "activation": "relu", "case": case, "ratios": {"relu": 0.9, "relu in place": 1.1}}
    >>> for bar in bars([row]):
    ...     print(bar.line())
    layers: BN+ReLU relative to torch, contiguous: worst 0.900 (images float32); goal reached: 1 of 1 below 1
    layers: BN+ReLU relative to torch with in-place ReLU: worst 1.100 (images float32), 0 of 1 below 1
    """
    rows = list(rows)
    found = []
    for level in dict.fromkeys(row["level"] for row in rows):
        here = [row for row in rows if row["level"] == level]
        relu, alone = ([row for row in here if row["activation"] == a] for a in ("relu", "none"))
        for layout in (CONTIGUOUS, LAST):
            wanted = [row for row in relu if row["case"]["layout"] == layout]
            found.append(_judged(level, f"BN+ReLU relative to torch, {layout}", BARS["relu"], wanted))
        found.append(_judged(level, "BN alone relative to torch", BARS["none"], alone))
        few = [row for row in here if Case(**row["case"]).bar(row["activation"]) == BARS["few channels"]]
        found.append(_judged(level, f"channels_last with 2 to {FEW - 1} channels", BARS["few channels"], few))
        found.append(_judged(level, "BN+ReLU relative to torch with in-place ReLU", None, relu, "relu in place"))
    return [bar for bar in found if bar is not None]


def _judged(level: str, what: str, below: float | None, rows: list[dict[str, Any]], form: str = "") -> CpuBar | None:
    if not rows:
        return None
    # Without `form`, use the first ratio, which is relative to torch's out-of-place calls.
    ratios = [row["ratios"][form] if form else next(iter(row["ratios"].values())) for row in rows]
    worst = max(range(len(rows)), key=ratios.__getitem__)
    case = rows[worst]["case"]
    met = sum(ratio < (1 if below is None else below) for ratio in ratios)
    return CpuBar(level, what, below, ratios[worst], f"{case['name']} {case['dtype']}", met, len(rows))


def _table(level: Level, rows: list[CpuRow]) -> Table:
    names = [Column(name, no_wrap=True) for name in ("case", "shape", "layout", "type", "with")]
    numbers = ("torch ms", "ours ms", "ratio", "bar", "in place")
    names += [Column(name, no_wrap=True, justify="right") for name in numbers]
    table = Table(*names, title=f"{QUESTION}: {level}", box=box.SIMPLE_HEAD)
    for row in rows:
        case, shape = row.case, "x".join(map(str, row.case.shape))
        ratio = f"{row.ratio:.2f}" + ("" if row.ratio < row.bar else " !")
        in_place = f"{row.ratios['relu in place']:.2f}" if row.activation == "relu" else ""
        cells = (f"{row.torch_ms:.3f}", f"{row.ours_ms:.3f}", ratio, f"{row.bar:.2f}", in_place)
        table.add_row(case.name, shape, case.layout, case.dtype, row.activation, *cells)
    met = sum(row.ratio < row.bar for row in rows)
    table.caption = f"{met} of {len(rows)} ratios are below their limits (in column 'bar'); '!' marks the others"
    return table
