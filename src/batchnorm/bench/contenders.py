"""The contenders of ``bench train``: variants of the network in the paper's appendix, ready to be timed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import BatchNorm
from ..models.bn_inception import pooling
from ..models.bn_inception.blocks import InceptionModule, SeparableConv2d
from ..train import RECIPES
from ..train.distributed import Ranks
from ..train.step import TrainStep, make_optimizer
from .step_profile import profile


@dataclass(frozen=True)
class Contender:
    """A variant of the network in the paper's appendix.

    If ``stock`` is True, the variant is built from ``torch.nn``'s layers. Otherwise, it is the network that
    ``batchnorm train`` runs on a GPU. If ``composed_stem`` is True, the two convolutions of the stem are composed into
    one. If ``norm`` is False, the variant has biases instead of batch normalization.
    """

    name: str
    stock: bool = False
    composed_stem: bool = True
    norm: bool = True

    def network(self, size: int, device: torch.device) -> nn.Module:
        """Build the network; the convolutions and the classifier have the same weights in all variants."""
        net = replace(RECIPES["bn-x30"], size=size, batch_norm=self.norm).network(1000)
        for module in net.modules():
            if isinstance(module, SeparableConv2d):
                module.rearrange, module.by_blocks = self.composed_stem, not self.stock
            elif isinstance(module, InceptionModule):
                module.rearrange = not self.stock
        if self.stock:
            with_stock_parts_(net)
        return net.to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


STOCK = Contender("stock", stock=True, composed_stem=False)
STOCK_COMPOSED = Contender("stock, composed stem", stock=True)
STOCK_WITHOUT_BN = replace(STOCK, name="stock, no BN", norm=False)
OURS = Contender("ours")


def with_stock_parts_(net: nn.Module) -> None:
    """Replace this library's pooling and batch normalization (with ReLU) by layers of ``torch.nn``, in place.

    >>> from batchnorm import BatchNorm2d
    >>> net = nn.Sequential(BatchNorm2d(4, activation="relu")); with_stock_parts_(net)
    >>> [type(part).__name__ for part in net[0]], type(net[0][0]) is nn.BatchNorm2d
    (['BatchNorm2d', 'ReLU'], True)
    """
    for parent in list(net.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, BatchNorm):
                norm = nn.BatchNorm2d(layer.features[0], layer.eps, layer.momentum)
                norm.load_state_dict(layer.state_dict())
                setattr(parent, name, nn.Sequential(norm, nn.ReLU(inplace=True)))
            elif isinstance(layer, pooling.MaxPool2d):
                setattr(parent, name, nn.MaxPool2d(3, layer.stride, 1))
            elif isinstance(layer, pooling.AvgPool2d):
                setattr(parent, name, nn.AvgPool2d(3, 1, 1, count_include_pad=False))
            elif isinstance(layer, pooling.GlobalAvgPool2d):
                setattr(parent, name, nn.AdaptiveAvgPool2d(1))


def noise(batch: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a batch of random images in channels_last, and random labels."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(batch, 3, size, size, generator=generator, device=device)
    labels = torch.randint(0, 1000, (batch,), generator=generator, device=device)
    return x.contiguous(memory_format=torch.channels_last), labels


class Timed:
    """A contender that is ready to take training steps on one batch of random images."""

    def __init__(self, contender: Contender, batch: int, size: int, device: torch.device) -> None:
        self.contender = contender
        net = contender.network(size, device)
        self.images, self.labels = noise(batch, size, device)
        self.draws = torch.zeros(batch, 1, device=device)
        as_they_are: Any = lambda images, draws: images  # noqa: E731
        cuda = device.type == "cuda"
        self.step = TrainStep(
            net,
            make_optimizer(net, RECIPES["bn-x30"], device),
            as_they_are,
            Ranks(device=device),
            bf16=True,
            compile="network" if contender.stock and cuda else "nothing",
            cast_once=not contender.stock,
            graph=cuda,
        )
        self.take(1)
        loss, _, count = self.step.sums.tolist()
        self._first_loss = float(loss / count)

    def first_loss(self) -> float:
        """Return the loss of the first step."""
        return self._first_loss

    def take(self, steps: int) -> None:
        """Take steps at learning rate 0, so that the weights do not change and all steps do the same work."""
        for _ in range(steps):
            self.step(self.images, self.labels, self.draws, 0.0)

    def seconds(self, steps: int) -> float:
        """Return the mean time of one step, over ``steps`` steps, in seconds."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.take(steps)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / steps

    def profile(self) -> dict[str, Any]:
        """Return how the GPU time of a step divides among kinds of kernels; see :func:`step_profile.profile`."""
        return profile(lambda: self.take(1))


def warmed_up(contender: Contender, batch: int, size: int) -> Timed:
    """Build a contender on the GPU and take its first steps, which compile its code."""
    # Let cuDNN try all its algorithms, as `batchnorm train` does.
    torch.backends.cudnn.benchmark, torch.backends.cudnn.benchmark_limit = True, 0
    timed = Timed(contender, batch, size, torch.device("cuda"))
    timed.take(20)
    torch.cuda.synchronize()
    return timed
