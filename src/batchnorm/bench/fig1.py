"""How long does ``reproduce fig1`` take, compared with the same experiment in plain eager PyTorch?"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from ..data import MNIST, mnist
from ..errors import JobsFailedError, above, at_least
from ..results import check_writable, environment, write_json


def fig1(
    steps: int = 50_000,
    rate: float = 0.1,
    std: float = 0.1,
    rounds: int = 1,
    out: Path = Path("runs/bench/fig1.json"),
) -> None:
    """Time the command ``reproduce fig1`` against a command that runs the same experiment in plain eager PyTorch.

    Both commands train with autograd and ``torch.optim.SGD``. The eager command uses batch normalization from
    ``torch.nn``, trains one network after the other with torch's default number of threads, evaluates every 1,000
    steps, and writes no files. The command ``reproduce fig1`` uses batch normalization from this library, trains with
    one thread per network, evaluates more often at first, monitors the networks, and writes checkpoints, the figure and
    the report. ``reproduce fig1`` is timed in two forms: "one process" trains one network after the other, and
    "make run" trains both at once, each in its own process, as the command ``make run`` does.

    Args:
        steps: updates per network.
        rate: learning rate.
        std: standard deviation of the initial weights.
        rounds: number of rounds, each of which runs every command once; the reported ratios are ratios of medians.
        out: the result file; published result files are in results/.
    """
    above(0, rate=rate, std=std)
    at_least(1, steps=steps, rounds=rounds)
    check_writable(out)
    contenders: dict[str, Callable[[int], list[float]]] = {
        "eager": partial(_eager, steps, rate, std),
        "one process": partial(_reproduce, steps, rate, std, 1),
        "make run": partial(_reproduce, steps, rate, std, 2),
    }
    load = environment()["load"]
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    accuracies: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for seed in range(rounds):
        for name, contender in contenders.items():
            began = time.perf_counter()
            accuracies[name].append(contender(seed))
            seconds[name].append(time.perf_counter() - began)
            plain, normalized = accuracies[name][-1]
            print(f"{name}: {seconds[name][-1]:.1f} s, accuracy {plain:.2%} without BN and {normalized:.2%} with BN")
    median = {name: statistics.median(values) for name, values in seconds.items()}
    faster = {name: round(median["eager"] / median[name], 2) for name in contenders}
    result = {
        "what": "seconds that each command takes to train both networks, and test accuracy without and with BN",
        "options": {"steps": steps, "rate": rate, "std": std, "rounds": rounds},
        "environment": {**environment(), "load average before": load},
        "seconds": seconds,
        "accuracy": accuracies,
        "times faster than eager": faster,
    }
    write_json(out, result)
    for name, ratio in faster.items():
        print(f"{name}: {median[name]:.1f} s, {ratio:.2f} times as fast as eager")


def _eager(steps: int, rate: float, std: float, seed: int) -> list[float]:
    text = _run(__spec__.name, steps, rate, std, seed)
    return list(json.loads(text.splitlines()[-1]))


def _reproduce(steps: int, rate: float, std: float, processes: int, seed: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        words = ["--steps", steps, "--rate", rate, "--std", std, "--seed", seed]
        _run("batchnorm", "reproduce", "fig1", *words, "--processes", processes, "--out", folder)
        summaries = [json.loads((Path(folder) / n / "summary.json").read_text()) for n in ("without-bn", "with-bn")]
    # The eager command evaluates with running averages, so use the accuracy with running averages here too.
    return [s["accuracy"]["running"] for s in summaries]


def _run(module: str, *words: object) -> str:
    command = [sys.executable, "-m", module, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise JobsFailedError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def build(batch_norm: bool, std: float) -> nn.Sequential:
    """Build the network of the paper's Section 4.1, with layers from ``torch.nn`` only."""
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
    """Train for ``steps`` steps, evaluate every 1,000 steps and at the end, and return the final test accuracy."""
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


if __name__ == "__main__":
    # `fig1` above runs this module as the eager command, and times it.
    torch.manual_seed(int(sys.argv[4]))
    digits, steps, rate, std = mnist(), int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
    print(json.dumps([train(build(batch_norm, std), digits, steps, rate) for batch_norm in (False, True)]))
