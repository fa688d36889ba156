"""How many images per second does the appendix network train on a GPU, against the same network of stock parts?

``python -m batchnorm.bench.train`` (or ``batchnorm bench train``) times whole steps (forward, loss, backward, SGD with
momentum; bf16 autocast, channels_last, replayed as one CUDA graph) of

- stock: ``torch.nn``'s layers as the appendix draws them, torch.compile, fused SGD;
- stock, composed stem: the same with the stem's two convolutions as one;
- ours: this library's network in the forms that ``batchnorm train`` can run it in.

All contenders are built first and timed in turns; a ratio is the median over the rounds of ratios within a round.
Before that, their losses on the same weights and images must agree.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import BatchNorm
from ..models.blocks import InceptionModule, SeparableConv2d
from ..models.pooling import MaxPool2d
from ..results import write_result
from ..train import RECIPES
from ..train.distributed import Ranks
from ..train.step import Compile, TrainStep, make_optimizer

QUESTION = "images per second of the appendix network's training step, ours over stock parts"
BARS = {32: 1.5, 256: 1.4}  # what ours must be over stock, at least
LOSS_TOLERANCE = 0.02  # relative, at bfloat16


@dataclass(frozen=True)
class Contender:
    """One way to run the network.

    Beyond the paper: speed.
    """

    name: str
    stock: bool = False
    composed_stem: bool = True
    by_blocks: bool = False
    joined: bool = True
    compile: Compile = "network"
    cast_once: bool = True

    def network(self, size: int, device: torch.device) -> nn.Module:
        """Build it, with the same weights as every other."""
        net: nn.Module = replace(RECIPES["bn-x30"], size=size).network(1000)
        for module in net.modules():
            if isinstance(module, SeparableConv2d):
                module.rearrange, module.by_blocks = self.composed_stem, self.by_blocks
            elif isinstance(module, InceptionModule):
                module.rearrange = self.joined
        if self.stock:
            with_stock_parts_(net)
        return net.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


STOCK = Contender("stock", stock=True, composed_stem=False, joined=False, cast_once=False)
STOCK_COMPOSED = replace(STOCK, name="stock, composed stem", composed_stem=True)
OURS = (
    Contender("ours: compiled"),
    Contender("ours: compiled, stem by blocks", by_blocks=True),
    Contender("ours: compiled, modules as drawn", joined=False),
    Contender("ours: compiled, autocast", cast_once=False),
    Contender("ours: own kernels, compiled pools", compile="pools"),
    Contender("ours: own kernels, compiled pools, stem by blocks", compile="pools", by_blocks=True),
    Contender("ours: own kernels", compile="nothing"),
)


def with_stock_parts_(net: nn.Module) -> None:
    """Replace each batch normalization of ours, with its fused nonlinearity, and each pool by ``torch.nn``'s, in place.

    >>> from batchnorm import BatchNorm2d
    >>> net = nn.Sequential(BatchNorm2d(4, activation="relu")); with_stock_parts_(net)
    >>> [type(part).__name__ for part in net[0]], type(net[0][0]) is nn.BatchNorm2d
    (['BatchNorm2d', 'ReLU'], True)

    Beyond the paper: what is compared with.
    """
    for parent in list(net.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, BatchNorm):
                norm = nn.BatchNorm2d(layer.features[0], layer.eps, layer.momentum)
                norm.load_state_dict(layer.state_dict())
                setattr(parent, name, nn.Sequential(norm, nn.ReLU(inplace=True)))
            elif isinstance(layer, MaxPool2d):
                setattr(parent, name, nn.MaxPool2d(layer.kernel_size, layer.stride, layer.padding))


class Timed:
    """A contender ready to take steps on one batch of noise.

    Beyond the paper: speed.
    """

    def __init__(self, contender: Contender, batch: int, size: int, device: torch.device) -> None:
        self.contender, self.batch = contender, batch
        recipe = RECIPES["bn-x30"]
        net = contender.network(size, device)
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(batch, 3, size, size, generator=generator, device=device)
        self.images = x.contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 1000, (batch,), generator=generator, device=device)
        self.draws = torch.zeros(batch, 1, device=device)
        augment: Any = _as_is
        cuda = device.type == "cuda"
        compile: Compile = contender.compile if cuda else "nothing"
        self.step = TrainStep(
            net,
            make_optimizer(net, recipe, device),
            augment,
            Ranks(device=device),
            bf16=True,
            compile=compile,
            cast_once=contender.cast_once,
            graph=cuda,
        )
        self.device = device
        self.first_loss = self._first_step()

    def _first_step(self) -> float:
        self.take(1)
        loss, _, count = self.step.sums.tolist()
        return float(loss / count)

    def take(self, steps: int) -> None:
        """Take steps at rate 0, so that weights stay where they are and no run differs from another."""
        for _ in range(steps):
            self.step(self.images, self.labels, self.draws, 0.0)

    def seconds(self, steps: int) -> float:
        """Return the seconds that one step takes."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.take(steps)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / steps


def _as_is(images: Tensor, draws: Tensor) -> Tensor:
    return images


@dataclass(frozen=True)
class Measured:
    """What was measured for one contender at one batch size; ``over_stock`` is a median of ratios within rounds.

    Beyond the paper: a line of results/train.json.
    """

    name: str
    batch: int
    milliseconds: float
    images_per_second: float
    over_stock: float
    over_composed: float


def measure(
    contenders: Sequence[Contender], batch: int, size: int, rounds: int, device: torch.device
) -> list[Measured]:
    """Build, check and time the contenders in turns; the first is stock, the second stock with a composed stem.

    Beyond the paper: speed.
    """
    ready = [_announced(contender, batch, size, device) for contender in contenders]
    check_same_function(ready)
    steps = max(5, 2000 // batch)
    for timed in ready:
        timed.take(20)
    table = [[timed.seconds(steps) for timed in ready] for _ in range(rounds)]
    found = []
    for k, timed in enumerate(ready):
        seconds = statistics.median(row[k] for row in table)
        ratios = [statistics.median(row[j] / row[k] for row in table) for j in (0, 1)]
        found.append(Measured(timed.contender.name, batch, 1e3 * seconds, batch / seconds, *ratios))
    return found


def check_same_function(ready: Sequence[Timed]) -> None:
    """Refuse to time networks whose losses differ.

    Raises:
        RuntimeError: with the losses.

    Beyond the paper: a fast wrong answer is not fast.
    """
    losses = {timed.contender.name: timed.first_loss for timed in ready}
    expected = ready[0].first_loss
    if any(not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected) for loss in losses.values()):
        raise RuntimeError(f"the contenders do not compute the same loss, so nothing is timed: {losses}")


def train(
    batches: Sequence[int] = (32, 256),
    size: int = 224,
    rounds: int = 15,
    out: Path | None = None,
    only: Sequence[str] = (),
) -> None:
    """Time the appendix network's training step on this GPU, against stock parts.

    Args:
        batches: batch sizes.
        size: height and width of the images.
        rounds: how often each contender is timed, in turns.
        out: write the numbers to this file.
        only: of our forms, only those with these names ("ours: " left out).

    Raises:
        ValueError: where there is no GPU.

    Beyond the paper: speed.
    """
    if not torch.cuda.is_available():
        raise ValueError("the training benchmark needs a CUDA device, and torch finds none")
    device = torch.device("cuda")
    contenders = (STOCK, STOCK_COMPOSED, *(c for c in OURS if not only or c.name.removeprefix("ours: ") in only))
    rows: list[Measured] = []
    for batch in batches:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True):
            rows += measure(contenders, batch, size, rounds, device)
        torch.cuda.empty_cache()
        print(report(rows, batch), flush=True)
        if out is not None:  # after each size, so that an interrupted run leaves what it has
            write_result(out, QUESTION, size=size, rounds=rounds, rows=[asdict(row) for row in rows])


def report(rows: Sequence[Measured], batch: int) -> str:
    """Return the table of one batch size and whether the best of ours is fast enough."""
    here = [row for row in rows if row.batch == batch]
    width = max(len(row.name) for row in here)
    lines = [f"batch {batch:<{width - 6}} {'ms/step':>9} {'images/s':>9} {'x stock':>8} {'x composed':>10}"]
    for row in here:
        numbers = (
            f"{row.milliseconds:9.2f} {row.images_per_second:9,.0f} {row.over_stock:8.2f} {row.over_composed:10.2f}"
        )
        lines.append(f"{row.name:<{width}} {numbers}")
    best = max(here[2:], key=lambda row: row.over_stock, default=None)
    if best is not None and batch in BARS:
        passed = best.over_stock >= BARS[batch] and best.over_composed > 1
        verdict = "reached" if passed else "NOT reached"
        lines.append(f"best: {best.name}; at least {BARS[batch]} times stock and faster than composed: {verdict}")
    return "\n".join(lines)


def _announced(contender: Contender, batch: int, size: int, device: torch.device) -> Timed:
    print(f"building {contender.name}, batch {batch}", flush=True)
    return Timed(contender, batch, size, device)


def _arguments(function: Callable[..., None]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    function(**vars(parser.parse_args()))


if __name__ == "__main__":
    _arguments(train)
