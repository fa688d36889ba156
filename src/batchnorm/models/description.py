"""What a network consists of, layer by layer, and what the appendix says about its own."""

from __future__ import annotations

import copy
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import at_least
from .bn_inception.blocks import InceptionModule


class Layer(NamedTuple):
    """One layer that has parameters or changes the map: its place, output and cost for one image.

    Beyond the paper: accounting.
    """

    name: str
    kind: str
    output: tuple[int, ...]
    parameters: int
    multiply_adds: int


class Description(NamedTuple):
    """A network's layers in the order they run, for one image; ``print`` it for the table.

    Beyond the paper: accounting.
    """

    layers: tuple[Layer, ...]
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
    """Run a copy of the network on the meta device and account for each layer; nothing is computed.

    Multiply-adds count convolutions and linear layers, as the literature does.

    Args:
        net: a network of images.
        size: height and width of the image.
        channels: its channels.

    >>> describe(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), size=4).multiply_adds
    3456

    Beyond the paper: accounting.
    """
    at_least(1, size=size, channels=channels)
    shadow = copy.deepcopy(net).to("meta").eval()
    found: list[Layer] = []
    for name, module in shadow.named_modules():
        if not list(module.children()):
            module.register_forward_hook(partial(_note, found, name))
    with torch.no_grad():
        shadow(torch.empty(1, channels, size, size, device="meta"))
    work = sum(layer.multiply_adds for layer in found)
    return Description(tuple(found), sum(p.numel() for p in net.parameters()), work, _depth(net))


def _note(found: list[Layer], name: str, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    own, kind = sum(p.numel() for p in module.parameters()), type(module).__name__
    work = 0
    if isinstance(module, nn.Conv2d | nn.Linear):
        work = output[0].numel() * module.weight[0].numel()
    if own or "Pool" in kind or "Response" in kind:
        found.append(Layer(name, kind, tuple(output.shape[1:]), own, work))


def _depth(net: nn.Module) -> int:
    """Count weight layers on the longest path: children follow each other, but for an Inception module's branches."""
    if isinstance(net, nn.Conv2d | nn.Linear):
        return 1
    depths = [_depth(child) for child in net.children()]
    return max(depths, default=0) if isinstance(net, InceptionModule) else sum(depths)
