"""Section 4.1's experiment as one writes it plainly in eager PyTorch: what ``bench fig1`` measures against.

Run as a script: ``python -m batchnorm.bench.eager_fig1 STEPS RATE STD SEED`` prints the two accuracies as JSON.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.nn.functional as F
from torch import nn

from ..data import MNIST, mnist


def build(batch_norm: bool, std: float) -> nn.Sequential:
    """Build the network from ``torch.nn`` alone."""
    layers: list[nn.Module] = []
    inputs = 784
    for _ in range(3):
        layers.append(nn.Linear(inputs, 100))
        if batch_norm:
            layers.append(nn.BatchNorm1d(100))
        layers.append(nn.Sigmoid())
        inputs = 100
    layers.append(nn.Linear(100, 10))
    for layer in layers:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=std)
            nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


def train(net: nn.Sequential, data: MNIST, steps: int, rate: float) -> float:
    """Train for so many steps, evaluate every thousandth, and return the last test accuracy."""
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    order = torch.randperm(60_000)
    accuracy = 0.0
    for step in range(1, steps + 1):
        start = (step - 1) * 60 % 60_000
        if start == 0:
            order = torch.randperm(60_000)
        rows = order[start : start + 60]
        loss = F.cross_entropy(net(data.train.images[rows]), data.train.labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 1000 == 0 or step == steps:
            net.eval()
            with torch.no_grad():
                correct = net(data.test.images).argmax(1) == data.test.labels
            accuracy = correct.double().mean().item()
            net.train()
    return accuracy


def main(arguments: list[str]) -> None:
    """Train without and with batch normalization, one after the other, on torch's default threads."""
    steps, rate, std, seed = int(arguments[0]), float(arguments[1]), float(arguments[2]), int(arguments[3])
    torch.manual_seed(seed)
    data = mnist()
    print(json.dumps([train(build(batch_norm, std), data, steps, rate) for batch_norm in (False, True)]))


if __name__ == "__main__":
    main(sys.argv[1:])
