"""How much does :class:`batchnorm.Monitor` slow down a training loop?"""

from __future__ import annotations

import statistics
import time
from operator import truediv
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data import mnist
from ..errors import at_least
from ..models import perceptron
from ..monitor import Monitor
from ..results import check_writable, environment, write_json


def monitor(steps: int = 500, rounds: int = 15, out: Path = Path("runs/bench/monitor.json")) -> None:
    """Time an eager training loop of the network of the paper's Section 4.1, with and without a monitor.

    One monitor records percentiles on the training batch, and another one on a probe of 250 test images.

    Args:
        steps: updates in each timed loop; with the monitor's default every=100, 500 updates give five records.
        rounds: number of rounds, each of which times the loop without a monitor and with each of the two monitors;
            results are medians.
        out: the result file; published result files are in results/.
    """
    at_least(1, steps=steps, rounds=rounds)
    check_writable(out)
    data = mnist()
    net = perceptron(seed=0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(rows: Tensor) -> float:
        began = time.perf_counter()
        for row in rows.unbind():
            loss = F.cross_entropy(net(data.train.images[row]), data.train.labels[row])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return (time.perf_counter() - began) / len(rows)

    load = environment()["load"]
    seconds: dict[str, list[float]] = {"no monitor": [], "on the batch": [], "on a probe of 250": []}
    train(torch.randint(60_000, (100, 60)))
    for _ in range(rounds):
        rows = torch.randint(60_000, (steps, 60))
        seconds["no monitor"].append(train(rows))
        with Monitor(net):
            seconds["on the batch"].append(train(rows))
        with Monitor(net, probe=data.test.images[:250]):
            seconds["on a probe of 250"].append(train(rows))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    # Divide times of the same round, because the machine's speed can change between rounds.
    ratios = {name: map(truediv, values, seconds["no monitor"]) for name, values in seconds.items()}
    added = {name: round(statistics.median(values) - 1, 4) for name, values in ratios.items()}
    result = {
        "what": "seconds per training step, and how much time the monitor adds",
        "options": {"steps": steps, "rounds": rounds},
        "environment": {**environment(), "load average before": load},
        "seconds": seconds,
        "median": median,
        "added": added,
    }
    write_json(out, result)
    for name, value in median.items():
        print(f"{name}: {1e6 * value:.0f} us per step, {added[name]:+.1%} relative to no monitor")
