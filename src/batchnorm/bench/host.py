"""How long does one eager layer keep the host busy, compared with ``torch.nn``'s modules?

``batchnorm bench host`` calls layers on tensors so small that the GPU waits for the host. It times training calls
(forward pass, backward pass and clearing the gradients) and evaluation calls. These times matter if the host limits the
speed of a network, as is common at small batch sizes. Groups of our calls alternate with groups of torch's calls, and
each reported ratio is a median over rounds.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import at_least
from ..layers import BatchNorm2d
from ..ops.cuda import extension
from ..results import check_writable, write_result
from .bars import Bar
from .gpu_timing import require_gpu

QUESTION = "host time of one call of an eager layer, relative to torch.nn's"
SHAPES = ((32, 64, 14, 14), (32, 512, 7, 7), (32, 256, 28, 28))
CALLS = 200
Step = Callable[[], Any]


def steps(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, tuple[Step, Step]]:
    """Return pairs of equivalent calls, torch's and ours, by name."""

    def draw() -> Tensor:
        return torch.randn(shape, device="cuda").to(dtype, memory_format=torch.channels_last)

    x, residual, dy, relu = draw().requires_grad_(), draw().requires_grad_(), draw(), nn.ReLU(inplace=True)
    stock = nn.BatchNorm2d(shape[1], device="cuda")
    plain = BatchNorm2d(shape[1], device="cuda")
    fused = BatchNorm2d(shape[1], device="cuda", activation="relu")
    leaves = [x, residual, *stock.parameters(), *plain.parameters(), *fused.parameters()]

    def train(forward: Callable[[], Tensor]) -> Step:
        def step() -> None:
            forward().backward(dy)
            for leaf in leaves:
                leaf.grad = None

        return step

    def evaluate(*modules: nn.Module) -> Step:
        copies = [copy.deepcopy(module).eval() for module in modules]

        @torch.no_grad()
        def step() -> None:
            y = x
            for module in copies:
                y = module(y)

        return step

    return {
        "BN": (train(lambda: stock(x)), train(lambda: plain(x))),
        "BN+ReLU": (train(lambda: relu(stock(x))), train(lambda: fused(x))),
        "BN+add+ReLU": (train(lambda: relu(stock(x) + residual)), train(lambda: fused(x, residual))),
        "BN+ReLU, evaluation": (evaluate(stock, relu), evaluate(fused)),
    }


def microseconds(step: Step) -> float:
    """Return the mean host time of one call, in microseconds."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        step()
    return (time.perf_counter() - began) / CALLS * 1e6


def host(rounds: int = 11, out: Path = Path("runs/bench/host.json")) -> list[dict[str, Any]]:
    """Compare how long eager layers of this library and of ``torch.nn`` keep the host busy.

    Args:
        rounds: number of rounds; the reported times and ratios are medians over the rounds.
        out: the result file.

    Raises:
        ValueError: if rounds is less than 1, or if there is no CUDA device.
        OSError: if the result file cannot be written.
    """
    at_least(1, rounds=rounds)
    require_gpu()
    check_writable(out)
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float32):
            for name, (torchs, ours) in steps(shape, dtype).items():
                for step in (torchs, ours):
                    for _ in range(3):
                        step()
                # The first call starts to compile the extension in the background. Wait for it before timing.
                extension.wait()
                for step in (torchs, ours):
                    microseconds(step)
                found = [(microseconds(torchs), microseconds(ours)) for _ in range(rounds)]
                times = [statistics.median(pair[i] for pair in found) for i in (0, 1)]
                ratio = statistics.median(b / a for a, b in found)
                kind = str(dtype).removeprefix("torch.")
                row = {"call": name, "shape": shape, "dtype": kind, "torch_us": times[0], "ours_us": times[1]}
                rows.append({**row, "ratio": ratio, "rounds": rounds})
                print(
                    f"{name:<20} {kind:<9} {shape}:"
                    f" torch {times[0]:6.1f} us, ours {times[1]:6.1f} us, ratio {ratio:.2f}",
                    flush=True,
                )
    bar = Bar("largest ratio of our host time to torch.nn's", 1.0, max(row["ratio"] for row in rows), False, len(rows))
    print(bar.line())
    bars = [{**bar._asdict(), "reached": bar.reached}]
    write_result(out, QUESTION, extension=extension.unavailable or "in use", bars=bars, rows=rows)
    return rows
