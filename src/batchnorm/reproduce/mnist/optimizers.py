"""Section 3.1: a network with BN can be trained by batch gradient descent, SGD and variants such as Adagrad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import SGD, Adagrad, Optimizer

from ...data import Digits
from ...errors import between
from ..publish import Experiment, color, label, publish
from .training import Setting, accuracy, digits, evenly, train_

Parameters = Any
OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "batch gradient descent": lambda p: SGD(p, lr=1.0),
    "SGD": lambda p: SGD(p, lr=0.1),
    "SGD with momentum": lambda p: SGD(p, lr=0.02, momentum=0.9),
    "Adagrad": lambda p: Adagrad(p, lr=0.02),
}


@dataclass(frozen=True)
class Optimizers(Experiment):
    """Train Section 4.1's network with full-batch gradient descent, SGD, SGD with momentum, and Adagrad.

    Paper: Sec. 3.1
    """

    steps: int = 2000
    """Updates per network on mini-batches of 60; batch gradient descent makes --batch-steps updates instead."""
    batch_steps: int = 200
    """Updates of batch gradient descent."""
    batch: int = 6000
    """Number of training digits for batch gradient descent, which uses all of them in each step."""
    std: float = 0.1
    """Standard deviation of the initial weights."""
    seed: int = 0
    """Seed of the weights and of the order of the examples."""
    out: Path = Path("runs/optimizers")

    def __post_init__(self) -> None:
        super().__post_init__()
        between(2, 60_000, batch=self.batch)


def optimizers(options: Optimizers) -> dict[str, Any]:
    """Run the experiment and write its result."""
    jobs = []
    for name in OPTIMIZERS:
        full = name == "batch gradient descent"
        for kind in (False, True):
            steps, size = (options.batch_steps, options.batch) if full else (options.steps, 60)
            setting = Setting(kind, steps, std=options.std, batch_size=size, seed=options.seed)
            jobs.append((name, setting, options.batch if full else 60_000))
    rows = options.run(_train, jobs)
    claim = "A model employing Batch Normalization can be trained using batch gradient descent, or Stochastic Gradient"
    claim += " Descent with a mini-batch size m > 1, or with any of its variants such as Adagrad."
    verdicts = {
        f"{row['optimizer']} trains the network with BN to more than 50% accuracy": row["accuracy"][-1] > 0.5
        for row in rows
        if row["network"] == label(True)
    }
    return publish(options, claim, {"runs": rows}, verdicts, draw)


def _train(job: tuple[str, Setting, int]) -> dict[str, Any]:
    name, setting, examples = job
    train, test = digits()
    net: nn.Module = setting.network()
    optimizer = OPTIMIZERS[name](net.parameters())
    data = Digits(train.images[:examples], train.labels[:examples])
    trained = train_(net, data, setting, evenly(setting.steps, 20), optimizer=optimizer)
    found = [(step, loss, accuracy(net, test)) for step, loss in trained]
    steps, losses, accuracies = map(list, zip(*found, strict=True))
    return {
        "optimizer": name,
        "network": label(setting.batch_norm),
        "settings": {k: v for k, v in optimizer.defaults.items() if isinstance(v, float) and v},
        "batch size": setting.batch_size,
        "steps": steps,
        "loss": losses,
        "accuracy": accuracies,
    }


def draw(result: dict[str, Any], plt: Any) -> Any:
    """Draw the test accuracies during training, one panel per optimizer."""
    figure, axes = plt.subplots(1, len(OPTIMIZERS), figsize=(11, 2.6), sharey=True)
    for axis, name in zip(axes, OPTIMIZERS, strict=True):
        for row in (r for r in result["runs"] if r["optimizer"] == name):
            axis.plot(row["steps"], row["accuracy"], color=color(row["network"]), label=row["network"])
        axis.set(title=name, xlabel="training steps", ylim=(0, 1))
    axes[0].set_ylabel("test accuracy")
    axes[0].legend()
    return figure
