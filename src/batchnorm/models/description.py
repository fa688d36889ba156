"""A network's layers, parameters and multiply-adds, and the paper's statements about the size of its network."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import at_least
from ..network_call import tensors_in
from .bn_inception.blocks import InceptionModule

# GoogLeNet's Inception modules, from Table 1 of Szegedy et al. (2014). The first six numbers of a module are its filter
# counts: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5 and pool projection. The last number is the height of its feature map.
GOOGLENET = (
    (64, 96, 128, 16, 32, 32, 28),
    (128, 128, 192, 32, 96, 64, 28),
    (192, 96, 208, 16, 48, 64, 14),
    (160, 112, 224, 24, 64, 64, 14),
    (128, 128, 256, 24, 64, 64, 14),
    (112, 144, 288, 32, 64, 64, 14),
    (256, 160, 320, 32, 128, 128, 14),
    (256, 160, 320, 32, 128, 128, 7),
    (384, 192, 384, 48, 128, 128, 7),
)


class LayerCost(NamedTuple):
    """A layer's name, type, output shape, number of parameters, and number of multiply-adds for one image."""

    name: str
    kind: str
    output: tuple[int, ...]
    parameters: int
    multiply_adds: int


class Description(NamedTuple):
    """A network's layers in execution order, its number of parameters, its multiply-adds for one image, and its depth.

    The depth is the number of convolutions and linear layers on the longest path. Only the branches of this library's
    Inception modules are recognized; all other modules are counted as if they ran one after the other.

    ``print(description)`` shows a table of the layers.

    >>> description = describe(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), size=4)
    >>> print(description)
    layer                              kind                    output   parameters   multiply-adds
    0                                  Conv2d                   4x4x8          224           3,456
    total                                                                      224           3,456
    >>> description.depth
    1

    Beyond the paper: counting parameters and multiply-adds.
    """

    layers: tuple[LayerCost, ...]
    parameters: int
    multiply_adds: int
    depth: int

    def __str__(self) -> str:
        lines = [f"{'layer':34} {'kind':16} {'output':>13} {'parameters':>12} {'multiply-adds':>15}"]
        for layer in self.layers:
            shape = "x".join(str(n) for n in (*layer.output[1:], layer.output[0]))
            cost = f"{layer.parameters:12,} {layer.multiply_adds:15,}"
            lines.append(f"{layer.name:34} {layer.kind:16} {shape:>13} {cost}")
        lines.append(f"{'total':34} {'':16} {'':>13} {self.parameters:12,} {self.multiply_adds:15,}")
        return "\n".join(lines)


def describe(net: nn.Module, size: int = 224, channels: int = 3) -> Description:
    """Count each layer's parameters and multiply-adds, with a forward pass of a copy on the meta device.

    The result lists only pooling layers, local response normalizations and layers that have parameters. Multiply-adds
    are counted only for ``nn.Conv2d`` and ``nn.Linear`` layers, as is usual in the literature.

    Args:
        net: a network that takes images.
        size: height and width of the image.
        channels: number of channels of the image.

    >>> describe(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), size=4).multiply_adds
    3456

    Beyond the paper: counting parameters and multiply-adds.
    """
    at_least(1, size=size, channels=channels)
    shadow = copy.deepcopy(net).to("meta").eval()
    found: list[LayerCost] = []
    for name, module in shadow.named_modules():
        if not list(module.children()):
            module.register_forward_hook(partial(_note, found, name))
    with torch.no_grad():
        shadow(torch.empty(1, channels, size, size, device="meta"))
    work = sum(layer.multiply_adds for layer in found)
    return Description(tuple(found), sum(p.numel() for p in net.parameters()), work, _depth(net))


def _note(found: list[LayerCost], name: str, module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
    own, kind = sum(p.numel() for p in module.parameters()), type(module).__name__
    work = 0
    if isinstance(module, nn.Conv2d | nn.Linear):
        work = output[0].numel() * module.weight[0].numel()
    if own or "Pool" in kind or "Response" in kind:
        found.append(LayerCost(name, kind, tuple(tensors_in(output)[0].shape[1:]), own, work))


def _depth(net: nn.Module) -> int:
    """Count convolutions and linear layers on the longest path, assuming that only Inception modules have branches."""
    if isinstance(net, nn.Conv2d | nn.Linear):
        return 1
    depths = [_depth(child) for child in net.children()]
    return max(depths, default=0) if isinstance(net, InceptionModule) else sum(depths)


class Claim(NamedTuple):
    """A statement from the paper about the size of its network, and the value computed for this library's network."""

    statement: str
    computed: str


def claims(description: Description) -> tuple[Claim, ...]:
    """Return the paper's statements about the size of its network, each with the number computed from ``description``.

    Section 4.2 says that the network has 13.6 million parameters. The network of the appendix table has fewer,
    whichever ``stem`` and ``projection`` are passed to :func:`~batchnorm.models.inception`.

    >>> from .bn_inception.network import inception
    >>> for claim in claims(describe(inception(stem="plain"))): print(claim.computed)
    11.19 million
    12: 1 in each of nine modules, 3 in the tenth
    60% more
    28% more

    Paper: Appendix; Sec. 4.2
    """
    depth, parameters, work = googlenet()
    more = description.depth - depth
    where = "1 in each of nine modules, 3 in the tenth" + (", 1 in the separable stem" if more > 12 else "")
    return (
        Claim("13.6 million parameters (Sec. 4.2)", f"{description.parameters / 1e6:.2f} million"),
        Claim("9 more weight layers than GoogLeNet", f"{more}: {where}"),
        Claim("25% more parameters than GoogLeNet", f"{description.parameters / parameters - 1:.0%} more"),
        Claim("about 30% more computation than GoogLeNet", f"{description.multiply_adds / work - 1:.0%} more"),
    )


def googlenet() -> tuple[int, int, int]:
    """Return GoogLeNet's depth, parameters and multiply-adds, without its auxiliary classifiers.

    >>> googlenet()
    (22, 6998552, 1582671872)
    """
    # The convolutions as (input channels, output channels, kernel size, output height).
    convs = [(3, 64, 7, 112), (64, 64, 1, 56), (64, 192, 3, 56)]
    channels = 192
    for one, reduce3, three, reduce5, five, projection, size in GOOGLENET:
        convs += [(channels, n, 1, size) for n in (one, reduce3, reduce5, projection)]
        convs += [(reduce3, three, 3, size), (reduce5, five, 5, size)]
        channels = one + three + five + projection
    convs.append((channels, 1000, 1, 1))
    parameters = sum(i * o * k * k + o for i, o, k, _ in convs)
    return 3 + 2 * len(GOOGLENET) + 1, parameters, sum(i * o * k * k * s * s for i, o, k, s in convs)
