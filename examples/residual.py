"""Add batch normalization to a residual network of your own, train it, and ship it without batch normalization."""

import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import batchnorm as bn


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x):
        return torch.relu(x + self.conv2(torch.relu(self.conv1(x))))


def size(net):
    return sum(t.numel() * t.element_size() for t in net.state_dict().values())


def seconds(nets, x, rounds=15):
    """Time the networks' forward passes alternately, and return the median time of each network."""
    times = [[] for _ in nets]
    with torch.no_grad():
        for _ in range(rounds):
            for net, seen in zip(nets, times, strict=True):
                start = time.perf_counter()
                net(x)
                seen.append(time.perf_counter() - start)
    return [statistics.median(seen) for seen in times]


torch.manual_seed(0)
digits = bn.data.mnist()
images = digits.train.images.reshape(-1, 1, 28, 28)
batches = list(images[:1280].split(64))
stem = [nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU()]
net = nn.Sequential(*stem, Block(16), Block(16), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, 10))

net = bn.insert(net, batches[0])  # 1: insert BN before each nonlinearity
print(net.report)
optimizer = torch.optim.SGD(bn.param_groups(net, weight_decay=1e-4), lr=0.1, momentum=0.9)
for x, labels in zip(batches, digits.train.labels.split(64), strict=False):
    loss = nn.functional.cross_entropy(net(x), labels)
    optimizer.zero_grad(), loss.backward(), optimizer.step()
print(bn.estimate_(net, batches))  # 2: estimate the population statistics
plain = bn.fold(net, batches[0])  # 3: fold BN into the convolutions
print(plain.report)
with tempfile.TemporaryDirectory() as folder:
    print(bn.export(net.eval(), batches[0], Path(folder) / "net.pt2").path.name)  # 4: write a file and check it

before, after = seconds([net, plain], batches[0])
print(f"before: {1e3 * before:.2f} ms, {size(net):,} bytes; after: {1e3 * after:.2f} ms, {size(plain):,} bytes")
