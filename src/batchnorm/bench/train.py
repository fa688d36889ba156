"""How many images per second does the appendix network train on a GPU, against the same network of stock parts?

``batchnorm bench train`` times whole steps (forward, loss, backward, SGD with momentum; bf16 autocast, channels_last,
replayed as one CUDA graph) of

- stock: ``torch.nn``'s layers as the appendix draws them, torch.compile, fused SGD;
- stock, composed stem: the same with the stem's two convolutions as one;
- ours: this library's network as ``batchnorm train`` runs it.

Each contender has a process of its own, so that all compile side by side; then they are timed in turns. A ratio is the
median over the rounds of ratios within a round. Before that, their losses on the same weights and images must agree.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..errors import at_least
from ..processes import Remote
from ..results import check_writable, write_result
from .bars import Bar
from .contenders import OURS, STOCK, STOCK_COMPOSED, warmed_up
from .gpu_timing import require_gpu

QUESTION = "images per second of the appendix network's training step, ours over stock parts"
IMAGES = {32: 10_500, 256: 18_500}  # a second, that ours must train on one H200 at 224 px, at least
OVER_COMPOSED = 2.0  # what it must be over the faster of the stock rows
LOSS_TOLERANCE = 0.02  # relative, at bfloat16


@dataclass(frozen=True)
class StepTime:
    """What was measured for one contender at one batch size; ``over_stock`` is a median of ratios within rounds."""

    name: str
    batch: int
    milliseconds: float
    images_per_second: float
    over_stock: float
    over_composed: float


def measure(ready: Mapping[str, Remote], batch: int, rounds: int) -> list[StepTime]:
    """Time contenders in turns; the first is stock, the second stock with a composed stem."""
    steps = max(5, 2000 // batch)
    table = [[contender.call("seconds", steps) for contender in ready.values()] for _ in range(rounds)]
    found = []
    for k, name in enumerate(ready):
        seconds = statistics.median(row[k] for row in table)
        ratios = [statistics.median(row[j] / row[k] for row in table) for j in (0, 1)]
        found.append(StepTime(name, batch, 1e3 * seconds, batch / seconds, *ratios))
    return found


def check_same_function(losses: dict[str, float]) -> None:
    """Refuse to time networks whose losses differ from that of the first."""
    expected = next(iter(losses.values()))
    if any(not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected) for loss in losses.values()):
        raise RuntimeError(f"the contenders do not compute the same loss, so nothing is timed: {losses}")


def train(
    batches: Sequence[int] = (32, 256),
    size: int = 224,
    rounds: int = 15,
    out: Path | None = None,
) -> None:
    """Time the appendix network's training step on this GPU, against stock parts.

    Args:
        batches: batch sizes.
        size: height and width of the images.
        rounds: how often each contender is timed, in turns.
        out: write the numbers to this file.
    """
    at_least(1, batches=tuple(batches), rounds=rounds)
    at_least(32, size=size)
    require_gpu()
    check_writable(out)
    contenders = (STOCK, STOCK_COMPOSED, OURS)
    # Their processes share the cores: the compiler's own pool in every one of them would be too many.
    compiling = sum(contender.stock for contender in contenders) * len(batches)
    threads = max(1, (os.cpu_count() or 1) // compiling)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
    by_batch = {b: {c.name: Remote(warmed_up, c, b, size) for c in contenders} for b in batches}
    rows: list[StepTime] = []
    try:
        for batch, ready in by_batch.items():
            print(f"compiling for batch {batch}", flush=True)
            check_same_function({name: _first_loss(name, batch, contender) for name, contender in ready.items()})
        for batch, ready in by_batch.items():
            rows += measure(ready, batch, rounds)
            print(report(rows, batch), flush=True)
            if out is not None:  # after each size, so that an interrupted run leaves what it has
                write_result(out, QUESTION, size=size, rounds=rounds, rows=[asdict(row) for row in rows])
    finally:
        for contender in (contender for ready in by_batch.values() for contender in ready.values()):
            contender.close()


def _first_loss(name: str, batch: int, contender: Remote) -> float:
    try:
        contender.result()
        return float(contender.call("first_loss"))
    except Exception as error:
        raise RuntimeError(f"{name}, batch {batch}: {error!r}") from error


def report(rows: Sequence[StepTime], batch: int) -> str:
    """Return the table of one batch size and whether ours is fast enough."""
    here = [row for row in rows if row.batch == batch]
    width = max(len(row.name) for row in here)
    lines = [f"batch {batch:<{width - 6}} {'ms/step':>9} {'images/s':>9} {'x stock':>8} {'x composed':>10}"]
    for row in here:
        speed = f"{row.milliseconds:9.2f} {row.images_per_second:9,.0f}"
        lines.append(f"{row.name:<{width}} {speed} {row.over_stock:8.2f} {row.over_composed:10.2f}")
    if batch in IMAGES:
        ours = here[-1]
        lines.append(Bar("images/s", IMAGES[batch], ours.images_per_second, True, 1).line())
        lines.append(Bar("over stock, composed stem", OVER_COMPOSED, ours.over_composed, True, 1).line())
    return "\n".join(lines)
