"""How long does ``estimate_`` take, and is a network folded by this library as fast as one folded by torch.fx?"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import truediv
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

from ..errors import at_least
from ..inference import fold
from ..layers import BatchNorm2d
from ..population import estimate_
from ..results import check_writable, write_result
from ..train.distributed import find_device

QUESTION = "seconds per pass of an 18-layer residual network over the data, and their ratios (medians over rounds)"


class Block(nn.Module):
    """A block of ResNet-18: two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: type[nn.Module]) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), norm(outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), norm(outputs)
        self.relu1, self.relu2 = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Compute the block's output."""
        y = self.relu1(self.norm1(self.conv1(x)))
        return self.relu2(self.norm2(self.conv2(y)) + self.shortcut(x))  # type: ignore[no-any-return]


def residual18(norm: type[nn.Module]) -> nn.Module:
    """Return ResNet-18 with ``norm`` as its batch normalization."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), norm(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    shapes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    blocks = [Block(*shape, norm) for shape in [*shapes, (512, 512, 1)]]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000))


def algorithm2(
    rounds: int = 15,
    batch: int = 8,
    size: int = 96,
    batches: int = 3,
    threads: int = 1,
    device: Literal["cpu", "cuda"] = "cpu",
    out: Path = Path("runs/bench/algorithm2.json"),
) -> None:
    """Time estimate_ against plain forward passes, and a network folded by this library against one folded by torch.fx.

    Args:
        rounds: number of rounds; the reported times and ratios are medians over the rounds.
        batch: images per batch.
        size: height and width of the images.
        batches: number of batches; each timed pass runs over all of them.
        threads: number of CPU threads.
        device: cpu or cuda.
        out: the result file; published result files are in results/.
    """
    at_least(1, rounds=rounds, batch=batch, size=size, batches=batches, threads=threads)
    find_device(device)
    check_writable(out)
    torch.set_num_threads(threads)
    data = [torch.randn(batch, 3, size, size, device=device) for _ in range(batches)]
    rows = {
        f"estimate_, layers of {name}": _estimate(residual18(norm).to(device), data, rounds)
        for name, norm in (("torch.nn", nn.BatchNorm2d), ("batchnorm", BatchNorm2d))
    }
    rows["fold"] = _fold(residual18(nn.BatchNorm2d).to(device), data, rounds)
    options = {"rounds": rounds, "batch": batch, "size": size, "batches": batches, "device": device}
    write_result(out, QUESTION, options=options, rows=rows)
    for name, row in rows.items():
        print(name, *(f"  {what}: {value:.4g}" for what, value in row.items()), sep="\n")


def _estimate(net: nn.Module, data: list[Tensor], rounds: int) -> dict[str, float]:
    def plain(training: bool) -> None:
        net.train(training)
        with torch.no_grad():
            for x in data:
                net(x)

    contenders = {"evaluation": partial(plain, False), "training": partial(plain, True)}
    return _in_turns({**contenders, "estimate_": lambda: estimate_(net.train(), data)}, rounds)


def _fold(net: nn.Module, data: list[Tensor], rounds: int) -> dict[str, float]:
    net.eval()
    nets = {"not folded": net, "torch.fx": fuse(net), "fold": fold(net, data[0])}

    def run(net: nn.Module) -> None:
        for x in data:
            net(x)

    with torch.no_grad():
        return _in_turns({name: partial(run, n) for name, n in nets.items()}, rounds)


def _in_turns(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return each contender's median seconds, and the last contender's median time ratio to each of the others."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, run in contenders.items():
            start = perf_counter()
            run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                seconds[name].append(perf_counter() - start)
    *others, ours = contenders
    over = {f"{ours} / {k}": round(median(map(truediv, seconds[ours], seconds[k])), 4) for k in reversed(others)}
    return {**{k: median(v) for k, v in seconds.items()}, **over}
