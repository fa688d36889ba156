"""How many images per second does a training step process with this library's layers, compared with torch.nn's?

``batchnorm bench train`` times whole steps (forward, loss, backward, SGD with momentum; bf16 autocast, channels_last,
replayed as one CUDA graph) of

- stock: the network of the paper's appendix, built from ``torch.nn``'s layers, with torch.compile and fused SGD;
- stock, composed stem: the stock network, with the stem's two convolutions composed into one;
- ours: this library's network as ``batchnorm train`` runs it.

Each of these three contenders has one process per batch size, and all processes compile in parallel. The contenders'
losses on the same weights and images must agree. Then the contenders are timed alternately. In each round, every
contender's time is compared with those of the two stock networks; the reported speedups are medians over the rounds.
Finally, a profile of "ours" shows where the time of a step goes.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import at_least
from ..processes import Remote
from ..results import check_writable, write_result
from .bars import Bar
from .contenders import OURS, STOCK, STOCK_COMPOSED, warmed_up
from .gpu_timing import require_gpu

QUESTION = "images per second of the appendix network's training step, and speedup over torch.nn's layers"
# images per second that "ours" must reach on an H200 at SIZE px, by batch size
IMAGES = {32: 10_500, 256: 18_500}
SIZE = 224
OVER_COMPOSED = 2.0  # speedup that "ours" must reach over "stock, composed stem"
LOSS_TOLERANCE = 0.02  # the largest relative difference to allow between losses that are computed in bfloat16


@dataclass(frozen=True)
class StepTime:
    """The measurements of one contender at one batch size.

    A speedup is the median, over the rounds, of the ratio of two contenders' times in the same round.
    """

    name: str
    batch: int
    milliseconds: float
    images_per_second: float
    over_stock: float
    over_composed: float


def measure(ready: Mapping[str, Remote], batch: int, rounds: int) -> list[StepTime]:
    """Time contenders alternately; the first must be stock, and the second must be stock with a composed stem."""
    steps = max(5, 2000 // batch)
    table = [[contender.call("seconds", steps) for contender in ready.values()] for _ in range(rounds)]
    found = []
    for k, name in enumerate(ready):
        seconds = statistics.median(row[k] for row in table)
        ratios = [statistics.median(row[j] / row[k] for row in table) for j in (0, 1)]
        found.append(StepTime(name, batch, 1e3 * seconds, batch / seconds, *ratios))
    return found


def check_same_function(losses: dict[str, float]) -> None:
    """Raise RuntimeError if a contender's loss differs too much from the first contender's loss."""
    expected = next(iter(losses.values()))
    if any(not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected) for loss in losses.values()):
        raise RuntimeError(f"the networks do not compute the same loss ({losses}), so nothing is timed")


def train(
    batches: Sequence[int] = (32, 256),
    size: int = SIZE,
    rounds: int = 15,
    out: Path | None = None,
) -> None:
    """Time BN-Inception's training step on this GPU, with this library's layers and with torch.nn's layers.

    Args:
        batches: batch sizes.
        size: height and width of the images.
        rounds: number of rounds; the reported times and speedups are medians over the rounds.
        out: the result file; by default, none is written.
    """
    at_least(1, batches=tuple(batches), rounds=rounds)
    at_least(32, size=size)
    require_gpu()
    check_writable(out)
    contenders = (STOCK, STOCK_COMPOSED, OURS)
    # Divide the cores among the processes that compile at the same time.
    compiling = sum(contender.stock for contender in contenders) * len(batches)
    threads = max(1, (os.cpu_count() or 1) // compiling)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    by_batch = {b: {c.name: Remote(warmed_up, c, b, size) for c in contenders} for b in batches}
    rows: list[StepTime] = []
    profiles: dict[int, dict[str, Any]] = {}
    try:
        for batch, ready in by_batch.items():
            print(f"compiling for batch {batch}", flush=True)
            check_same_function({name: _first_loss(name, batch, contender) for name, contender in ready.items()})
        for batch, ready in by_batch.items():
            rows += measure(ready, batch, rounds)
            print(report(rows, batch, size), flush=True)
            profiles[batch] = ready[OURS.name].call("profile")
            print(profile_report(profiles[batch]), flush=True)
            if out is not None:  # write after each batch size, so that an interruption loses no results
                times = [asdict(row) for row in rows]
                write_result(out, QUESTION, size=size, rounds=rounds, rows=times, profiles=profiles)
    finally:
        for contender in (contender for ready in by_batch.values() for contender in ready.values()):
            contender.close()


def _first_loss(name: str, batch: int, contender: Remote) -> float:
    try:
        contender.result()
        return float(contender.call("first_loss"))
    except Exception as error:
        raise RuntimeError(f"{name} failed at batch size {batch}: {error!r}") from error


def profile_report(profile: Mapping[str, Any]) -> str:
    """Return the profile of a step as a table."""
    lines = [f"{kind:<58} {milliseconds:6.2f} ms" for kind, milliseconds in profile["milliseconds"].items()]
    busy = f"{profile['launches']:.0f} launches per step; GPU busy {100 * profile['busy']:.0f}% of the profiled time"
    return "\n".join(["where the time of a step goes, summed over streams:", *lines, busy])


def report(rows: Sequence[StepTime], batch: int, size: int) -> str:
    """Return the table of one batch size and, if ``IMAGES`` has goals for it, whether "ours" reaches them."""
    here = [row for row in rows if row.batch == batch]
    width = max(len(row.name) for row in here)
    lines = [f"batch {batch:<{width - 6}} {'ms/step':>9} {'images/s':>9} {'x stock':>8} {'x composed':>10}"]
    for row in here:
        speed = f"{row.milliseconds:9.2f} {row.images_per_second:9,.0f}"
        lines.append(f"{row.name:<{width}} {speed} {row.over_stock:8.2f} {row.over_composed:10.2f}")
    if batch in IMAGES and size == SIZE:
        ours = here[-1]
        lines.append(Bar("images/s", IMAGES[batch], ours.images_per_second, True, 1).line())
        lines.append(Bar("speedup over stock, composed stem", OVER_COMPOSED, ours.over_composed, True, 1).line())
    return "\n".join(lines)
