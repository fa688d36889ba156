"""Section 2: if the gradient step ignores the normalization, parameters grow while the loss does not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...data import Digits
from ...layers import BatchNorm1d
from ...models import perceptron
from ...pictures import BLUE, GREEN, ORANGE
from ...processes import torch_threads
from ..publish import Experiment, publish
from .training import Setting, digits, evenly, train_

VARIANTS = {
    "centering outside the gradient": ORANGE,
    "centering and scaling outside the gradient": GREEN,
    "batch normalization": BLUE,
}


@dataclass(frozen=True)
class Section2(Experiment):
    """Show what happens if the gradient step ignores the normalization, for one bias vector and for a whole network.

    Paper: Sec. 2
    """

    bias_steps: int = 1000
    """Number of full-batch steps that train only the bias vector b."""
    steps: int = 2000
    """Number of steps that train the whole network, with mini-batches of 60."""
    rates: tuple[float, ...] = (0.1, 1.0)
    """Learning rates for the whole network; the first is also used for b."""
    std: float = 0.1
    """Standard deviation of the whole network's initial weights."""
    seed: int = 0
    """Seed of the weights and of the order of the examples."""
    out: Path = Path("runs/section2")


def section2(options: Section2) -> dict[str, Any]:
    """Run the experiments on b alone and on the whole network, and write one result file."""
    marks = evenly(options.steps, 20)
    jobs = [
        (variant, Setting(True, options.steps, rate, options.std, seed=options.seed), marks)
        for rate in options.rates
        for variant in VARIANTS
    ]
    runs = options.run(_whole, jobs)
    data = digits().train
    few = Digits(data.images[:1000], data.labels[:1000])
    with torch_threads(1):
        ignored, through = (
            train_bias(few, options.bias_steps, options.rates[0], options.seed, through=way) for way in (False, True)
        )
    alone = {"ignored": ignored, "in the gradient": through}
    claim = "b will grow indefinitely while the loss remains fixed; the model blows up when the normalization"
    claim += " parameters are computed outside the gradient descent step."
    norms, losses = ignored["norm of b"], ignored["loss"]
    verdicts = {
        "b grows and the loss does not change if the gradient ignores that E[x] depends on b": norms[-1] > norms[0]
        and max(losses) - min(losses) < 1e-6 * losses[0],
        "b does not grow if the gradient includes how E[x] depends on b": max(through["norm of b"]) < 1e-3 * norms[-1],
    }
    findings = {"b alone": alone, "whole network": runs}
    return publish(options, claim, findings, verdicts, draw)


def train_bias(data: Digits, steps: int, rate: float, seed: int, *, through: bool) -> dict[str, list[float]]:
    """Train only the bias b of x_hat = u + b - E[u + b], and return the norm of b and the loss before each step.

    Here, u is the output of a fixed first layer on all the data. Sigmoids and a fixed output layer are applied to
    x_hat, and the loss is the cross-entropy. If ``through`` is True, the gradient includes the dependence of E[u + b]
    on b.
    """
    net = perceptron(batch_norm=False, widths=(100,), std=0.1, seed=seed).double()
    u = net.linear1(data.images.double()).detach()  # type: ignore[operator]
    b = torch.zeros(u.shape[1], dtype=torch.float64, requires_grad=True)
    norms, losses = [], []
    for _ in range(steps):
        x = u + b
        mean = x.mean(0)
        x_hat = x - (mean if through else mean.detach())
        loss = F.cross_entropy(net.output(torch.sigmoid(x_hat)), data.labels)  # type: ignore[operator]
        (gradient,) = torch.autograd.grad(loss, b)
        norms.append(b.detach().norm().item())
        losses.append(loss.item())
        with torch.no_grad():
            b -= rate * gradient
    return {"norm of b": norms, "loss": losses}


class OutsideTheGradient(nn.Module):
    """Normalize a batch by its mean and standard deviation, which the gradient treats as constants.

    With ``scale=False``, only the mean is subtracted.

    Paper: Sec. 2, "ignores the dependence of E[x] on b"
    """

    def __init__(self, features: int, *, scale: bool, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.scale, self.eps = scale, eps

    def forward(self, x: Tensor) -> Tensor:
        """Return gamma x_hat + beta."""
        var, mean = torch.var_mean(x.detach(), 0, correction=0)
        x_hat = x - mean
        if self.scale:
            x_hat = x_hat * torch.rsqrt(var + self.eps)
        return self.weight * x_hat + self.bias


def build(variant: str, std: float, seed: int) -> nn.Sequential:
    """Build Section 4.1's network with the given kind of normalization, and a bias b before each normalization."""
    plain = perceptron(batch_norm=False, std=std, seed=seed)
    layers: list[nn.Module] = []
    for layer in plain:
        if isinstance(layer, nn.Sigmoid):
            outside = OutsideTheGradient(100, scale="scaling" in variant)
            layers.append(BatchNorm1d(100) if variant == "batch normalization" else outside)
        layers.append(layer)
    return nn.Sequential(*layers)


def _whole(job: tuple[str, Setting, Sequence[int]]) -> dict[str, Any]:
    variant, setting, marks = job
    net, data = build(variant, setting.std, setting.seed), digits()
    rows = []
    hidden = [m for m in net if isinstance(m, nn.Linear)][:-1]
    for step, loss in train_(net, data.train, setting, marks):
        b = torch.cat([m.bias for m in hidden]).norm().item()
        w = torch.cat([m.weight.flatten() for m in hidden]).norm().item()
        with torch.no_grad():  # the network is in training mode, so all variants normalize by the test set's statistics
            correct = net(data.test.images).argmax(1) == data.test.labels
        accuracy = correct.double().mean().item()
        rows.append({"step": step, "loss": loss, "norm of b": b, "norm of W": w, "accuracy": accuracy})
    return {"variant": variant, "rate": setting.rate, "rows": rows}


def draw(result: dict[str, Any], plt: Any) -> Any:
    """Draw two panels for b alone (norm of b, loss) and two for the whole network (norm of b, accuracy)."""
    alone, runs, rates = result["b alone"], result["whole network"], result["options"]["rates"]
    dashes = dict(zip(rates, cycle(("-", "--", ":", "-.")), strict=False))
    figure, grid = plt.subplots(2, 2, figsize=(7, 5.4))
    for axis, key in zip(grid[0], ("norm of b", "loss"), strict=True):
        for name, style in (("ignored", {"color": ORANGE}), ("in the gradient", {"color": BLUE, "ls": "--"})):
            axis.plot(alone[name][key], label=f"E[x] {name}", **style)
        axis.set(title=f"only b is trained: {key}", xlabel="steps")
    grid[0, 0].legend()
    for axis, key in zip(grid[1], ("norm of b", "accuracy"), strict=True):
        for run in runs:
            steps, values = zip(*((row["step"], row[key]) for row in run["rows"]), strict=True)
            name = f"{run['variant']}, rate {run['rate']:g}"
            axis.plot(steps, values, dashes[run["rate"]], color=VARIANTS[run["variant"]], label=name)
        axis.set(title=f"the whole network is trained: {key}", xlabel="steps")
    grid[1, 0].set_yscale("symlog", linthresh=0.01)
    names, handles = grid[1, 1].get_legend_handles_labels()[::-1]
    figure.legend(handles, names, loc="outside lower center", ncols=len(rates), fontsize=7)
    return figure
