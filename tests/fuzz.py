"""Random programs over a few shared modules: unlikely networks that test the library's rewriting."""

import random

import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn

CHANNELS = 4


class Program(nn.Module):
    """Run a list of steps, each of which reads and replaces entries of a pool of tensors (N, 4, H, W)."""

    def __init__(self, seed, steps=9):
        super().__init__()
        choose = random.Random(seed)
        self.convs = nn.ModuleList(
            module
            for _ in range(3)
            for module in [
                nn.Conv2d(CHANNELS, CHANNELS, 1),
                nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
                nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, padding_mode="circular", groups=2),
                nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1, groups=2),
                nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=4),
            ]
        )
        self.norms = nn.ModuleList(
            module
            for _ in range(3)
            for module in [
                nn.BatchNorm2d(CHANNELS),
                nn.BatchNorm2d(CHANNELS, affine=False),
                bn.BatchNorm2d(CHANNELS),
                bn.BatchNorm2d(CHANNELS, activation="relu"),
                nn.BatchNorm2d(CHANNELS),
            ]
        )
        self.activations = nn.ModuleList([nn.ReLU(), nn.ReLU(inplace=True), nn.Tanh(), nn.SiLU(inplace=True)])
        self.linear = nn.Linear(CHANNELS, CHANNELS)
        self.drop, self.same = nn.Dropout(0.0), nn.Identity()
        kinds = ["conv", "conv", "norm", "norm", "norm", "activation", "function", "in place", "add", "add in place"]
        kinds += ["linear", "move", "pass", "scale", "residual", "conv norm", "conv norm", "norm conv"]
        self.steps = [
            (choose.choice(kinds), choose.randrange(15), choose.randrange(15), choose.randrange(3), choose.randrange(3))
            for _ in range(steps)
        ]

    def forward(self, x):
        pool = [x * 1, x * 0.5, x - 1]
        for kind, which, norm, source, target in self.steps:
            pool[target] = self.step(kind, which, norm, pool[source], pool[target])
        return sum(pool[1:], pool[0])

    def step(self, kind, which, norm, a, b):
        match kind:
            case "conv":
                return self.convs[which](a)
            case "linear":
                return self.linear(a.movedim(1, -1)).movedim(-1, 1)
            case "norm":
                return self.norms[norm](a)
            case "conv norm":
                return self.norms[norm](self.convs[which](a))
            case "norm conv":
                return self.convs[which](self.norms[norm](a))
            case "activation":
                return self.activations[which % 4](a)
            case "function":
                return [F.relu, torch.sigmoid, torch.tanh, F.silu][which % 4](a)
            case "in place":
                return a.relu_() if which % 2 else a.mul_(0.5)
            case "add":
                return a + b
            case "add in place":
                a += 1.0 if a is b else b
                return a
            case "move":
                return a.flatten(2).unflatten(2, a.shape[2:]) if which % 2 else a.transpose(2, 3).contiguous()
            case "pass":
                return self.drop(a) if which % 2 else self.same(a)
            case "scale":
                return a * 0.5
        return self.norms[3](a, residual=b)


def example(seed):
    return torch.randn(3, CHANNELS, 5, 5, generator=torch.Generator().manual_seed(seed)).double()
