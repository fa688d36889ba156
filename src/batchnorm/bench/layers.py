"""The distinct batch-normalized layers of two networks, as (channels, size of the square feature map)."""

from __future__ import annotations

from typing import NamedTuple


class Layer(NamedTuple):
    """Name a network, a batch size and the shape of one layer's input.

    Beyond the paper: what the benchmarks run over.
    """

    network: str
    batch: int
    channels: int
    size: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, C, H, W)."""
        return self.batch, self.channels, self.size, self.size


# Paper: Appendix, Figure 5, with projections of 96 in 4c and 4d.
_INCEPTION = {
    112: (64,),
    56: (64, 192),
    28: (32, 64, 96, 128, 160),
    14: (64, 96, 128, 160, 192, 224, 256),
    7: (128, 160, 192, 224, 320, 352),
}
_RESNET50 = {112: (64,), 56: (64, 128, 256), 28: (128, 256, 512), 14: (256, 512, 1024), 7: (512, 2048)}


def inception(batch: int) -> list[Layer]:
    """Return the appendix network's layers."""
    return [Layer("inception", batch, c, size) for size, channels in _INCEPTION.items() for c in channels]


def resnet50(batch: int) -> list[Layer]:
    """Return ResNet-50's layers."""
    return [Layer("resnet50", batch, c, size) for size, channels in _RESNET50.items() for c in channels]


def all_layers() -> list[Layer]:
    """Return both networks' layers at a small and a large batch."""
    return [*inception(32), *inception(256), *resnet50(64), *resnet50(256)]


def short_list() -> list[Layer]:
    """Return one layer of each size class, for a first look."""
    wanted = {
        "inception": {32: ((64, 112), (192, 56), (96, 28), (160, 14), (352, 7)), 256: ((64, 28), (128, 14), (320, 7))},
        "resnet50": {64: ((256, 56), (512, 28), (1024, 14), (2048, 7)), 256: ((256, 56), (512, 28), (64, 112))},
    }
    return [Layer(net, b, c, s) for net, batches in wanted.items() for b, rows in batches.items() for c, s in rows]
