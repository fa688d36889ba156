"""Sections 1 and 3.3: batch normalization prevents a network from getting stuck in saturated nonlinearities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import between
from ...monitor.taps import Taps, probing
from ..publish import Experiment, color, label, publish
from .training import Setting, digits, evenly, train_


@dataclass(frozen=True)
class Saturation(Experiment):
    """Measure the fraction of saturated sigmoids in each layer during training, with and without BN.

    Paper: Sec. 1, saturated regime; Abstract, "saturating nonlinearities"
    """

    steps: int = 5000
    """Updates per run."""
    rate: float = 0.1
    """Learning rate."""
    stds: tuple[float, ...] = (0.1, 1.0)
    """Standard deviations of the initial weights; the defaults are a small and a large value."""
    tail: float = 0.05
    """A sigmoid is saturated if its output is within this distance of 0 or 1."""
    points: int = 25
    """Number of measurements during each run; there is also one before training."""
    seed: int = 0
    """Seed of the weights and of the order of the examples."""
    out: Path = Path("runs/saturation")

    def __post_init__(self) -> None:
        super().__post_init__()
        between(0, 0.5, tail=self.tail)


def saturation(options: Saturation) -> dict[str, Any]:
    """Run the experiment and write its result."""
    marks = [0, *evenly(options.steps, options.points)]
    settings = [
        Setting(kind, options.steps, options.rate, std, seed=options.seed)
        for std in options.stds
        for kind in (False, True)
    ]
    jobs = [(setting, marks, options.tail) for setting in settings]
    rows: list[dict[str, Any]] = [
        {"network": label(s.batch_norm), "std": s.std, "steps": marks, "saturated": fractions}
        for s, fractions in zip(settings, options.run(_follow, jobs), strict=True)
    ]
    claim = "Batch Normalization makes it possible to use saturating nonlinearities by preventing the network from"
    claim += " getting stuck in the saturated modes."
    verdicts = {
        f"initial std {plain['std']:g}: at the end, the most saturated layer is less saturated with BN": (
            max(bn["saturated"][-1].values()) < max(plain["saturated"][-1].values())
        )
        for plain, bn in zip(rows[::2], rows[1::2], strict=True)
    }
    return publish(options, claim, {"runs": rows}, verdicts, draw)


def _follow(job: tuple[Setting, Sequence[int], float]) -> list[dict[str, float]]:
    setting, marks, tail = job
    net, data = setting.network(), digits()
    probe = data.test.images[:1000]
    fractions = [saturated(net, probe, tail)]
    fractions += [saturated(net, probe, tail) for _ in train_(net, data.train, setting, marks)]
    return fractions


def saturated(net: nn.Module, batch: Tensor, tail: float) -> dict[str, float]:
    """Return, for each layer, the fraction of sigmoid outputs on a batch that are within ``tail`` of 0 or 1.

    Paper: Sec. 1, "into the saturated regime of the nonlinearity"
    """
    found: dict[str, float] = {}

    def see(name: str, z: Tensor, x: Tensor) -> None:
        found[name] = float(((torch.sigmoid(z) - 0.5).abs() > 0.5 - tail).double().mean())

    names = [name for name, m in net.named_modules() if isinstance(m, nn.Sigmoid)]
    with probing(net), Taps(net, names, see):
        net(batch)
    return found


def draw(result: dict[str, Any], plt: Any) -> Any:
    """Draw the saturated fraction of each layer during training, one row of panels per initial standard deviation."""
    rows, stds = result["runs"], result["options"]["stds"]
    layers = list(rows[0]["saturated"][0])
    shape, size = (len(stds), len(layers)), (9, 2.2 * len(stds))
    figure, grid = plt.subplots(*shape, figsize=size, sharey=True, squeeze=False)
    for axes_row, std in zip(grid, stds, strict=True):
        for axis, layer in zip(axes_row, layers, strict=True):
            for row in (r for r in rows if r["std"] == std):
                name = row["network"]
                axis.plot(row["steps"], [f[layer] for f in row["saturated"]], color=color(name), label=name)
            axis.set(title=f"{layer}, initial std {std:g}", ylim=(-0.02, 1))
        axes_row[0].set_ylabel("saturated fraction")
    for axis in grid[-1]:
        axis.set_xlabel("training steps")
    grid[0][0].legend()
    return figure
