"""Watch what batch normalization does to your own network's activations, and compare two runs on one page."""

import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import batchnorm as bn
from batchnorm.monitor import JSONLines, typical_unit
from batchnorm.report.page import Report, report

digits = bn.data.mnist()
probe = digits.test.images[:250]


def network(batch_norm):
    torch.manual_seed(0)
    layers = [nn.Linear(784, 50), nn.Sigmoid(), nn.Linear(50, 50), nn.Sigmoid(), nn.Linear(50, 10)]
    net = nn.Sequential(*layers)
    return bn.insert(net, probe) if batch_norm else net


def train(net, folder, steps=300):
    shutil.rmtree(folder, ignore_errors=True)  # delete the files of an earlier run
    folder.mkdir(parents=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    metrics = folder / "metrics.jsonl"
    with bn.Monitor(net, every=20, probe=probe, sinks=[JSONLines(metrics)]) as monitor:
        for step in range(steps):
            rows = torch.randint(60_000, (60,))
            batch = (digits.train.images[rows], digits.train.labels[rows])
            loss = F.cross_entropy(net(batch[0]), batch[1])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 0:  # Section 2: how a layer's gradient changes when only the layers below it are updated
                monitor.record_gradient_change(step, lambda y, b: F.cross_entropy(y, b[1]), batch, rate=0.1)
    last = monitor.layers[-1]
    unit = typical_unit(monitor.records, last)
    low, middle, high = monitor.records[-1].percentiles[last].z[:, unit].tolist()
    print(f"{folder.name}: last percentiles of unit {unit} in layer {last}: {low:.2f}, {middle:.2f}, {high:.2f}")


folder = Path("runs/monitor-example")
runs = (folder / "without", folder / "with")
for path, batch_norm in zip(runs, (False, True), strict=True):
    train(network(batch_norm), path)
report(Report(runs, folder / "report.html"))  # prints the path of the page; open it in a browser
