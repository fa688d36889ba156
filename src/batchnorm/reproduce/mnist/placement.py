"""Sections 3.2 and 5: should BN normalize the nonlinearity's input (Wu) or the nonlinearity's output?"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ...evaluate.predictions import evaluating
from ...layers import BatchNorm1d
from ...models import perceptron
from ...pictures import BLUE, GREEN
from ..publish import Experiment, mean, publish, spread
from .training import Setting, accuracy, digits, train_

Where = Literal["before", "after"]
NONLINEARITIES = {"sigmoid": nn.Sigmoid, "relu": nn.ReLU}
STATISTICS = ("skewness", "excess kurtosis", "sparsity")


@dataclass(frozen=True)
class Placement(Experiment):
    """Compare networks that have BN before the nonlinearity with networks that have BN after it.

    The comparison covers accuracy, and the distributions of Wu and of the nonlinearity's output.

    Paper: Sec. 3.2, "more Gaussian"; Sec. 5, the standardization layer
    """

    steps: int = 3000
    """Updates per network."""
    rate: float = 0.1
    """Learning rate."""
    std: float = 0.1
    """Standard deviation of the initial weights."""
    seeds: int = 3
    """Number of seeds per setting."""
    out: Path = Path("runs/placement")


def placement(options: Placement) -> dict[str, Any]:
    """Run the experiment and write its result."""
    kinds: tuple[Where, ...] = ("before", "after")
    jobs = [
        (where, name, Setting(True, options.steps, options.rate, options.std, seed=seed))
        for name in NONLINEARITIES
        for where in kinds
        for seed in range(options.seeds)
    ]
    results = options.run(_train, jobs)
    rows = []
    for k in range(0, len(jobs), options.seeds):
        (where, name, _), found = jobs[k], results[k : k + options.seeds]
        final = [r["accuracy"] for r in found]
        row = {"nonlinearity": name, "batch normalization": f"{where} it", "accuracy": final}
        rows.append({**row, "mean": mean(final), "spread": spread(final), "shapes": found[0]["shapes"]})
    claim = "Wu + b is more likely to have a symmetric, non-sparse distribution, that is 'more Gaussian'."
    note = "measured on 5,000 test digits, with seed 0; u is the nonlinearity's output"
    return publish(options, claim, {"shapes are": note, "runs": rows}, _verdicts(rows), draw)


def _verdicts(rows: list[dict[str, Any]]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for before, after in zip(rows[::2], rows[1::2], strict=True):
        name, shapes = before["nonlinearity"], list(before["shapes"].values())[-1]
        for key in ("skewness", "sparsity"):
            less = all(shapes[f"Wu {k + 1}"][key] < shapes[f"u {k}"][key] for k in (1, 2))
            found[f"{name}, BN before it: Wu has less {key} than its input u in layers 2 and 3"] = less
        found[f"{name}: BN before it is more accurate than after it"] = before["mean"] > after["mean"]
    return found


def build(where: Where, nonlinearity: str, std: float, seed: int) -> nn.Sequential:
    """Build Section 4.1's network, with z = g(BN(Wu)) if ``where`` is "before", and z = BN(g(Wu + b)) otherwise."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for name, layer in perceptron(batch_norm=where == "before", std=std, seed=seed).named_children():
        if isinstance(layer, nn.Sigmoid):
            k = name.removeprefix("sigmoid")
            layers[f"g{k}"] = NONLINEARITIES[nonlinearity]()
            if where == "after":
                layers[f"bn{k}"] = BatchNorm1d(100)
        else:
            layers[name] = layer
    return nn.Sequential(layers)


def _train(job: tuple[Where, str, Setting]) -> dict[str, Any]:
    where, name, setting = job
    net, data = build(where, name, setting.std, setting.seed), digits()
    found = {"0": shapes(net, data.test.images[:5000])}
    for step, _ in train_(net, data.train, setting, [setting.steps]):
        found[str(step)] = shapes(net, data.test.images[:5000])
    return {"accuracy": accuracy(net, data.test), "shapes": found}


@torch.no_grad()
def shapes(net: nn.Sequential, images: Tensor) -> dict[str, dict[str, float]]:
    """Return skewness, excess kurtosis and sparsity of each layer's Wu and nonlinearity output u, in evaluation mode.

    Paper: Sec. 3.2, "symmetric, non-sparse"
    """
    found = {}
    v = images
    with evaluating(net):
        for name, module in net.named_children():
            v = module(v)
            if name.startswith(("linear", "g")):
                found[name.replace("linear", "Wu ").replace("g", "u ")] = shape(v.double())
    return found


def shape(v: Tensor) -> dict[str, float]:
    """Return the skewness, excess kurtosis and sparsity of values of shape (examples, units).

    Let c = v - E[v] and s^2 = E[c^2], over examples. Skewness is |E[c^3] / s^3| and excess kurtosis is
    E[c^4] / s^4 - 3, both averaged over units. Sparsity is Hoyer's measure (sqrt(K) - |v|_1 / |v|_2) / (sqrt(K) - 1),
    averaged over examples, where v holds an example's K units. Sparsity is 0 if all units have the same magnitude, 1 if
    only one unit is not zero, and about 0.2 for Gaussian values.
    """
    c = v - v.mean(0)
    s = c.square().mean(0).sqrt()
    alive = s > 1e-9  # a constant unit, such as a ReLU that never fires, has no skewness or kurtosis
    standard = c[:, alive] / s[alive]
    root = v.shape[1] ** 0.5
    hoyer = (root - v.abs().sum(1) / v.norm(dim=1).clamp(min=1e-12)) / (root - 1)
    values = (standard.pow(3).mean(0).abs().mean(), standard.pow(4).mean(0).mean() - 3, hoyer.mean())
    return {name: round(value.item(), 4) for name, value in zip(STATISTICS, values, strict=True)}


def draw(result: dict[str, Any], plt: Any) -> Any:
    """Draw the skewness, kurtosis and sparsity of each layer, and the test accuracies."""
    figure, grid = plt.subplots(2, 2, figsize=(7.5, 5.4))
    axes = grid.flat
    names = []
    for k, row in enumerate(result["runs"]):
        last = list(row["shapes"].values())[-1]
        where = row["batch normalization"].removesuffix(" it")
        style = {"color": BLUE if where == "before" else GREEN}
        mark = "o" if row["nonlinearity"] == "sigmoid" else "s"
        names.append(f"{row['nonlinearity']}, BN {where}")
        places = [i + 0.16 * (k - (len(result["runs"]) - 1) / 2) for i in range(len(last))]
        for axis, key in zip(axes, STATISTICS, strict=False):
            axis.plot(places, [v[key] for v in last.values()], mark, ms=4, label=names[-1], **style)
            axis.set(title=f"{key} after training", xticks=range(len(last)), xticklabels=list(last))
        axes[3].errorbar([k], [row["mean"]], [row["spread"] or 0], fmt=mark, ms=4, capsize=2, **style)
    axes[3].set(title="test accuracy", xticks=range(len(names)))
    axes[3].set_xticklabels([name.replace(", ", "\n") for name in names])
    axes[3].margins(x=0.15)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure
