"""Blocks that combine batch normalization, sums and activations as popular networks do."""

import torch
import torch.nn.functional as F
from networks import Coded
from torch import nn


class Block(Coded):
    """A block with two convolutions, two norms, a shared activation and a shortcut. Its forward calls ``code``."""

    def __init__(self, code, activation=None):
        super().__init__(code)
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.relu = activation or nn.ReLU(inplace=True)
        self.same, self.drop = nn.Identity(), nn.Dropout(0.5)
        self.f, self.g = ConvNorm(), ConvNorm()
        self.flag, self.scale, self.extra = False, 2, torch.ones(1, 4, 1, 1, dtype=torch.double)
        self.drop.counts = {"calls": 0}


class Bottleneck(nn.Module):
    """A block like torchvision's: one ReLU is called three times, the sum is in place, the shortcut is optional."""

    def __init__(self, downsample=None):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 2, 1, bias=False), nn.BatchNorm2d(2)
        self.conv2, self.bn2 = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)
        self.conv3, self.bn3 = nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = downsample

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ConvNorm(nn.Module):
    """A child for other modules: its own forward applies a convolution, a BN and an optional activation."""

    def __init__(self, activation=None):
        super().__init__()
        self.conv, self.bn, self.same = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Identity()
        self.activation = activation

    def forward(self, x):
        x = self.same(self.bn(self.conv(x)))
        return x if self.activation is None else self.activation(x)


class RegNetLike(nn.Module):
    """The last BN is in a child of a child; the sum and the activation are in this module's forward."""

    def __init__(self, project=True):
        super().__init__()
        self.proj = ConvNorm() if project else None
        self.f = nn.Sequential(
            nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
            ConvNorm(F.relu),
            nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)),
        )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x):
        x = self.proj(x) + self.f(x) if self.proj is not None else x + self.f(x)
        return self.activation(x)


class MobileOneLike(nn.Module):
    """A block like timm's MobileOneBlock: it adds its branches one by one; an absent branch counts as 0."""

    def __init__(self, identity=True, scale=True):
        super().__init__()
        self.identity = nn.BatchNorm2d(4) if identity else None
        self.scale = ConvNorm() if scale else None
        self.branches = nn.ModuleList([ConvNorm(), ConvNorm()])
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x):
        identity = 0 if self.identity is None else self.identity(x)
        out = 0 if self.scale is None else self.scale(x)
        for branch in self.branches:
            out += branch(x)
        out = self.drop(out)
        out += identity
        return self.act(out)


class DenseLayer(nn.Module):
    """A layer like torchvision's: its input is a list of tensors, or one tensor."""

    def __init__(self, inputs):
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(inputs), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, 4, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(4), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 2, 3, padding=1, bias=False)

    def bottleneck(self, inputs):
        return self.conv1(self.relu1(self.norm1(torch.cat(inputs, 1))))

    def forward(self, input):
        features = [input] if isinstance(input, torch.Tensor) else input
        return self.conv2(self.relu2(self.norm2(self.bottleneck(features))))


class DenseBlock(nn.ModuleDict):
    def __init__(self):
        super().__init__()
        for i in range(2):
            self.add_module(f"layer{i}", DenseLayer(4 + 2 * i))

    def forward(self, init):
        features = [init]
        for _, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class UNet(nn.Module):
    """A U-Net with two levels, double convolutions and one concatenation."""

    def __init__(self):
        super().__init__()

        def double(inputs, outputs):
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
                nn.Conv2d(outputs, outputs, 3, padding=1),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
            )

        self.down, self.middle, self.up = double(4, 6), double(6, 8), nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.last, self.out = double(12, 6), nn.Conv2d(6, 2, 1)

    def forward(self, x):
        skip = self.down(x)
        x = self.up(self.middle(F.max_pool2d(skip, 2)))
        return self.out(self.last(torch.cat([skip, x], 1)))


def fusions_in(net):
    """Return the fusions in a network's rewritten modules: a dict from the path of each fused BN to its fusions."""
    found = {}
    for path, module in net.named_modules():
        for variant in vars(type(module)).get("_variants", ()):
            for fusion in variant.fusions:
                found.setdefault(f"{path}.{fusion.path}".lstrip("."), []).append(fusion)
    return found
