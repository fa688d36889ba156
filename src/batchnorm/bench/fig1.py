"""How long does ``reproduce fig1`` take, compared with the same experiment written plainly in eager PyTorch?"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import JobsFailedError, above, at_least
from ..results import check_writable, environment, write_json

COMMAND = "import sys; from batchnorm.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class BenchFig1:
    """Time Figure 1's experiment, both networks, against plain eager PyTorch; whole commands, from start to report."""

    steps: int = 50_000
    """Updates of each network."""
    rate: float = 0.1
    """Learning rate."""
    std: float = 0.1
    """Width of the initial Gaussians."""
    rounds: int = 1
    """How often each contender runs, in turns; ratios are of medians."""
    out: Path = Path("runs/bench/fig1.json")
    """The result file; the published ones are in results."""

    def __post_init__(self) -> None:
        above(0, rate=self.rate, std=self.std)
        at_least(1, steps=self.steps, rounds=self.rounds)


def fig1(options: BenchFig1) -> dict[str, Any]:
    """Run the contenders in turns, write the result file and return what is in it.

    Both train with autograd and ``torch.optim.SGD``. Eager uses ``torch.nn``'s layer, trains one network after the
    other on torch's default threads, evaluates 50 times and writes nothing. ``reproduce fig1`` uses this library's
    layer on one thread a network, evaluates 71 times, monitors, writes checkpoints, the figure and the report.
    """
    check_writable(options.out)
    contenders: dict[str, Callable[[int], list[float]]] = {
        "eager": lambda seed: _eager(options, seed),
        "one process": lambda seed: _reproduce(options, seed, processes=1),
        "make run": lambda seed: _reproduce(options, seed, processes=2),
    }
    load = os.getloadavg()[0]  # what else the machine was doing: above 0.5 the times say little
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    accuracies: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for seed in range(options.rounds):
        for name, contender in contenders.items():
            began = time.perf_counter()
            accuracies[name].append(contender(seed))
            seconds[name].append(time.perf_counter() - began)
            plain, normalized = accuracies[name][-1]
            print(f"{name}: {seconds[name][-1]:.1f} s, accuracy {plain:.2%} without and {normalized:.2%} with BN")
    median = {name: statistics.median(values) for name, values in seconds.items()}
    result = {
        "what": "seconds for both networks, whole commands, and test accuracy without and with BN",
        "options": {key: value for key, value in asdict(options).items() if key != "out"},
        "environment": {**environment(), "load average before": load},
        "seconds": seconds,
        "accuracy": accuracies,
        "times faster than eager": {name: round(median["eager"] / median[name], 2) for name in contenders},
    }
    write_json(options.out, result)
    for name, ratio in result["times faster than eager"].items():  # type: ignore[attr-defined]
        print(f"{name}: {median[name]:.1f} s, {ratio:.2f} times faster than eager")
    return result


def _eager(options: BenchFig1, seed: int) -> list[float]:
    values = [options.steps, options.rate, options.std, seed]
    text = _run([sys.executable, "-m", "batchnorm.bench.eager_fig1", *map(str, values)])
    return list(json.loads(text.splitlines()[-1]))


def _reproduce(options: BenchFig1, seed: int, processes: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        words = ["reproduce", "fig1", "--steps", options.steps, "--rate", options.rate, "--std", options.std]
        words += ["--seed", seed, "--processes", processes, "--out", folder]
        _run([sys.executable, "-c", COMMAND, *map(str, words)])
        summaries = [json.loads((Path(folder) / n / "summary.json").read_text()) for n in ("without-bn", "with-bn")]
    # With running averages, as eager has them.
    return [s["accuracy"]["running"] for s in summaries]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise JobsFailedError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout
