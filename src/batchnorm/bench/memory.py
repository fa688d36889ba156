"""How much memory does a training step take with this library's layers, compared with torch.nn's layers?

``batchnorm bench memory`` measures whole eager steps (forward, loss, backward, SGD with momentum; bf16 autocast,
channels_last) of

- stock: the network of the paper's appendix, built from ``torch.nn``'s layers, with and without normalization;
- ours: this library's network, without and with ``recompute()``.

On a GPU, the peak counts all memory that torch has allocated, including parameters and images. The peak of the tensors
alone leaves out workspaces, such as cuDNN's. On a CPU, the peak counts only the memory that the step itself allocates.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import at_least
from ..ops import recompute
from ..results import check_writable, write_result
from ..train import RECIPES
from ..train.step import make_optimizer
from .contenders import OURS, STOCK, STOCK_WITHOUT_BN, Contender, noise
from .train import LOSS_TOLERANCE

QUESTION = "peak memory of a training step of the network in the paper's appendix, relative to the stock network"
# Upper limits of the peak memory without workspaces, as fractions of the stock network's, on a GPU at batch 256 and
# 224 px.
BARS = {"ours": 0.6, "ours, recompute": 0.45}


class StepForm(NamedTuple):
    """A network whose training step is measured, with or without ``recompute()``."""

    name: str
    contender: Contender
    recompute: bool = False


FORMS = (
    *(StepForm(contender.name, contender) for contender in (STOCK, STOCK_WITHOUT_BN, OURS)),
    StepForm("ours, recompute", OURS, recompute=True),
)


@dataclass(frozen=True)
class PeakMemory:
    """One variant's loss, and the memory of its training step in bytes; ``tensors`` is the peak without workspaces."""

    name: str
    peak: int
    tensors: int
    after_forward: int
    loss: float
    over_stock: float = 1.0
    tensors_over_stock: float = 1.0


def peak(call: Callable[[], Any], device: torch.device) -> tuple[int, int]:
    """Return the bytes allocated at the peak of a call, and after the call while its result is still in memory.

    On a GPU, both numbers include what torch had allocated before the call; on a CPU, they do not.

    >>> peak(lambda: torch.ones(1000).neg().neg(), torch.device("cpu"))  # three vectors, never more than two at once
    (8000, 4000)
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        result = call()
        torch.cuda.synchronize()
        found = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        del result
        return found
    gc.collect()  # otherwise, garbage that is freed during the call would be subtracted from the count
    activities = [torch.profiler.ProfilerActivity.CPU]
    # Without acc_events, a second profile in the same process makes torch 2.11 warn.
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profile:
        result = call()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    del result
    now = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top, now


def measure(form: StepForm, batch: int, size: int, device: torch.device) -> PeakMemory:
    """Build a variant, warm it up and measure the memory of one forward pass and one step."""
    net = form.contender.network(size, device)
    optimizer = make_optimizer(net, RECIPES["bn-x30"], device)
    images, labels = noise(batch, size, device)

    def forward() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        less = recompute() if form.recompute else nullcontext()
        with less, torch.autocast(device.type, torch.bfloat16):
            return F.cross_entropy(net(images).float(), labels)

    def step() -> Tensor:
        loss = forward()
        loss.backward()
        optimizer.step()
        return loss.detach()

    loss = float(step())  # not measured: this step also allocates momentum buffers and workspaces
    step()  # reuse freed memory in the same way as the measured steps
    _, after = peak(forward, device)
    highest, _ = peak(step, device)
    return PeakMemory(form.name, highest, peak_of_tensors(step, device) or highest, after, loss)


def peak_of_tensors(call: Callable[[], Any], device: torch.device) -> int | None:
    """Return the bytes allocated at the peak of a call, not counting workspaces, or None on a CPU.

    A block of memory counts as a workspace if it is released before the next allocation or release of another block,
    because then only one operation can have used it.
    """
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    now = top = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(context=None, max_entries=1_000_000)
    try:
        call()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    events = [e for e in events if e["action"] in ("alloc", "free_requested", "free_completed")]
    workspaces = set[int]()
    for event, following in zip(events, [*events[1:], {"action": "", "addr": 0}], strict=True):
        address, action = event["addr"], event["action"]
        if action == "alloc" and (following["action"], following["addr"]) == ("free_requested", address):
            workspaces.add(address)
        elif action == "alloc":
            now += event["size"]
            top = max(top, now)
        elif action == "free_completed" and address in workspaces:
            workspaces.remove(address)
        elif action == "free_completed":
            now -= event["size"]
    return top


def memory(
    batch: int | None = None, size: int = 224, out: Path | None = None, only: Sequence[str] = ()
) -> list[PeakMemory]:
    """Measure the peak memory of BN-Inception's training step, with this library's layers and with torch.nn's layers.

    Args:
        batch: number of images; by default 256 on a GPU and 8 on a CPU.
        size: height and width of the images.
        out: the result file; by default, none is written.
        only: the variants to measure in addition to "stock": "stock, no BN", "ours", or "ours, recompute" (with
            bn.recompute()); by default, all.
    """
    at_least(1, batch=batch)
    at_least(32, size=size)
    names = [form.name for form in FORMS[1:]]
    if unknown := [name for name in only if name not in names]:
        raise ValueError(f"unknown variant {unknown[0]!r}: choose from {', '.join(map(repr, names))}")
    check_writable(out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    batch = batch or (256 if device.type == "cuda" else 8)
    rows: list[PeakMemory] = []
    for form in (FORMS[0], *(form for form in FORMS[1:] if not only or form.name in only)):
        row = measure(form, batch, size, device)
        stock = (rows or [row])[0]
        over, tensors_over = row.peak / stock.peak, row.tensors / stock.tensors
        rows.append(replace(row, over_stock=over, tensors_over_stock=tensors_over))
        if form.contender.norm and not abs(row.loss - rows[0].loss) <= LOSS_TOLERANCE * abs(rows[0].loss):
            raise RuntimeError(
                f"{row.name} computes a loss of {row.loss}, but stock computes a loss of {rows[0].loss}:"
                " their memory is not comparable"
            )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    judged = [row for row in rows if row.name in BARS and (device.type, batch, size) == ("cuda", 256, 224)]
    print(report(rows, judged), flush=True)
    if out is not None:
        bars = [{"name": row.name, "at most": BARS[row.name], "measured": row.tensors_over_stock} for row in judged]
        write_result(out, QUESTION, batch=batch, size=size, bars=bars, rows=[asdict(row) for row in rows])
    return rows


def report(rows: Sequence[PeakMemory], judged: Sequence[PeakMemory] = ()) -> str:
    """Return a table of the rows and, below it, whether each row in ``judged`` reaches its goal."""
    width = max(len(row.name) for row in rows)
    lines = [f"{'':<{width}} {'peak MB':>9} {'x stock':>8} {'tensors':>9} {'x stock':>8} {'after forward':>14}"]
    for row in rows:
        tensors = f"{row.tensors / 1e6:9,.1f} {row.tensors_over_stock:8.3f}"
        after = f"{row.after_forward / 1e6:14,.1f}"
        lines.append(f"{row.name:<{width}} {row.peak / 1e6:9,.1f} {row.over_stock:8.3f} {tensors} {after}")
    for row in judged:
        verdict = "reached" if row.tensors_over_stock <= BARS[row.name] else "NOT reached"
        lines.append(f"{row.name}: the goal of at most {BARS[row.name]} times stock's tensor memory is {verdict}")
    return "\n".join(lines)
