"""Networks in many coding styles, with statistics and parameters that reveal a wrong fold."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import batchnorm as bn


def scramble_(net):
    """Give every batch normalization statistics and parameters far from 0 and 1."""
    for m in net.modules():
        if isinstance(m, _BatchNorm):
            if m.running_mean is not None:
                m.running_mean.normal_()
                m.running_var.uniform_(0.3, 3.0)
            for p, low, high in ((m.weight, 0.5, 2.0), (m.bias, -1.0, 1.0)):
                if p is not None:
                    nn.init.uniform_(p, low, high)
    return net


class Coded(nn.Module):
    """A network with the given attributes; ``code``, a function of the network and its input, is its forward."""

    def __init__(self, code, **attributes):
        super().__init__()
        self.code = code
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.code(self, x)


class BasicBlock(nn.Module):
    """A residual block with one in-place ReLU module that is called twice; its shortcut may have a projection."""

    def __init__(self, inputs, outputs, stride=1, norm=nn.BatchNorm2d):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = None
        if inputs != outputs or stride != 1:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x):
        identity = x if self.shortcut is None else self.shortcut(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class Residual(nn.Module):
    def __init__(self, norm=nn.BatchNorm2d):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), norm(8), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList([BasicBlock(8, 8, 1, norm), BasicBlock(8, 16, 2, norm)])
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Dense(nn.Module):
    """BN, ReLU, convolution and concatenation, as in DenseNet, so no BN can be folded into a convolution before it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norms = nn.ModuleList([nn.BatchNorm2d(6 + 4 * i) for i in range(3)])
        self.relus = nn.ModuleList([nn.ReLU(inplace=True) for _ in range(3)])
        self.convs = nn.ModuleList([nn.Conv2d(6 + 4 * i, 4, 3, padding=1) for i in range(3)])
        self.last = nn.BatchNorm2d(18)

    def forward(self, x):
        x = self.stem(x)
        for norm, relu, conv in zip(self.norms, self.relus, self.convs, strict=True):
            x = torch.cat([x, conv(relu(norm(x)))], 1)
        return F.relu(self.last(x)).mean((2, 3))


class InvertedResidual(nn.Module):
    """A block with expansion, depthwise convolution, squeeze-and-excitation and SiLU."""

    def __init__(self, channels=8, expand=4):
        super().__init__()
        hidden = channels * expand
        self.expand = nn.Sequential(nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.SiLU())
        self.depthwise = nn.Sequential(
            nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.SiLU()
        )
        self.squeeze = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(hidden, 4, 1), nn.SiLU(), nn.Conv2d(4, hidden, 1), nn.Sigmoid()
        )
        self.project = nn.Sequential(nn.Conv2d(hidden, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        y = self.depthwise(self.expand(x))
        return x + self.project(y * self.squeeze(y))


def shared_conv():
    """Return a network that calls one convolution twice, with a BN after the first call only."""
    conv, norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
    return Coded(lambda n, x: n.conv(F.relu(n.bn(n.conv(x)))), conv=conv, bn=norm)


def shared_pair():
    """Return a network that calls a convolution and its BN twice, always together."""

    def code(n, x):
        for _ in range(2):
            x = torch.tanh(n.bn(n.conv(x)))
        return x

    return Coded(code, conv=nn.Conv2d(3, 3, 3, padding=1), bn=nn.BatchNorm2d(3))


def shared_norm():
    """Return a network with one BN for two convolutions."""
    a, b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 3, padding=1)
    return Coded(lambda n, x: n.bn(n.a(x)).relu_() - n.bn(n.b(x)).sigmoid(), a=a, b=b, bn=nn.BatchNorm2d(4))


class Sequence(nn.Module):
    """Linear layers on (N, L, C): one BN normalizes positions (dimension 1), the other features, after a transpose."""

    def __init__(self, length=6):
        super().__init__()
        self.a, self.over_positions = nn.Linear(5, 7), nn.BatchNorm1d(length)
        self.b, self.over_features = nn.Linear(7, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        x = torch.relu(self.over_positions(self.a(x)))
        return self.over_features(self.b(x).transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    """A cell with BN on its input and state, unrolled by a Python loop whose length depends on the data's shape."""

    def __init__(self, inputs=5, state=6):
        super().__init__()
        self.state = state
        self.w, self.u = nn.Linear(inputs, state), nn.Linear(state, state, bias=False)
        self.norm_w, self.norm_u = nn.BatchNorm1d(state), nn.BatchNorm1d(state)

    def forward(self, x):
        h = x.new_zeros(x.shape[0], self.state)
        for step in x.unbind(1):
            h = torch.tanh(self.norm_w(self.w(step)) + self.norm_u(self.u(h)))
        return h


class Functional(nn.Module):
    """A module that calls F.batch_norm with its own buffers, and F.conv2d with its own parameters."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.kernel = nn.Parameter(torch.randn(5, 4, 3, 3))
        self.gamma, self.beta = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.randn(4))
        self.register_buffer("mean", torch.randn(4))
        self.register_buffer("var", torch.rand(4) + 0.5)
        self.bn = nn.BatchNorm2d(5)

    def forward(self, x):
        x = F.batch_norm(self.conv(x), self.mean, self.var, self.gamma, self.beta, False, 0.1, 1e-3)
        return self.bn(F.conv2d(x.relu(), self.kernel)).relu()


class NormWithActivation(nn.BatchNorm2d):
    """A subclass with its own forward, like timm's norm layers."""

    def forward(self, x):
        return F.leaky_relu(super().forward(x), 0.1)


def transposed(groups):
    up = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=groups)
    return Coded(lambda n, x: n.bn(n.up(x)).relu(), up=up, bn=nn.BatchNorm2d(6))


class Branching(nn.Module):
    """A module whose forward branches on the data."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.left, self.right = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        x = self.bn(self.conv(x)).relu()
        return self.left(x) if x.mean() > 0 else self.right(x)


class FusedResidual(nn.Module):
    """A block of this library's layers, which fuse the sum and the nonlinearity."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.bn1, self.bn2 = bn.BatchNorm2d(3, activation="silu"), bn.BatchNorm2d(3, activation="relu")

    def forward(self, x):
        return self.bn2(self.conv2(self.bn1(self.conv1(x))), residual=x)


def image(*size):
    return torch.randn(*(size or (4, 3, 8, 8)))


# name -> (network, example, what fold() does at each batch normalization, in order of the modules)
FOLD, MAP, KEEP = "folded", "fixed", "kept"
ZOO = {
    "residual": (Residual, image, [FOLD] * 6),
    "dense": (Dense, image, [MAP] * 4),
    "inverted_residual": (InvertedResidual, lambda: image(2, 8, 7, 7), [FOLD] * 3),
    "shared_conv": (shared_conv, image, [MAP]),
    "shared_pair": (shared_pair, image, [FOLD]),
    "shared_norm": (shared_norm, image, [FOLD]),
    "linear_on_3d": (Sequence, lambda: torch.randn(4, 6, 5), [MAP, FOLD]),
    "recurrent": (Recurrent, lambda: torch.randn(4, 3, 5), [FOLD, FOLD]),
    "functional": (Functional, image, [FOLD, FOLD]),
    "transposed": (lambda: transposed(1), lambda: image(2, 4, 5, 5), [FOLD]),
    "transposed_grouped": (lambda: transposed(2), lambda: image(2, 4, 5, 5), [FOLD]),
    "branching": (Branching, image, [FOLD]),
    "fused_residual": (FusedResidual, image, [FOLD, FOLD]),
    "own_forward": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), NormWithActivation(4), nn.Conv2d(4, 2, 1)),
        image,
        [FOLD],
    ),
    "without_affine": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False)),
        lambda: torch.randn(5, 3),
        [FOLD],
    ),
    "before_unpadded_conv": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), image, [FOLD]),
    "before_padded_conv": (lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=1)), image, [MAP]),
    "before_reflected_conv": (
        lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")),
        image,
        [FOLD],
    ),
    "before_grouped_conv": (
        lambda: nn.Sequential(nn.BatchNorm2d(6), nn.Conv2d(6, 4, 3, groups=2)),
        lambda: image(2, 6, 5, 5),
        [FOLD],
    ),
    "before_linear_through_flatten": (
        lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 64, 4)),
        image,
        [FOLD],
    ),
    "chain": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4)), image, [FOLD, FOLD]),
    "chain_at_the_input": (
        lambda: nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)),
        image,
        [FOLD, FOLD],
    ),
    "three_dimensional": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, 3), nn.BatchNorm3d(4), nn.ReLU()),
        lambda: image(2, 2, 5, 5, 5),
        [FOLD],
    ),
    "one_dimensional": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU()),
        lambda: image(2, 2, 9),
        [FOLD],
    ),
    "per_activation": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), bn.BatchNorm2d((4, 6, 6), activation="tanh")),
        image,
        [MAP],
    ),
}
