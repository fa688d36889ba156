"""Abstract: batch normalization lets us "be less careful about initialization"."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..publish import Experiment, color, label, mean, publish, spread
from .training import Setting, accuracies


@dataclass(frozen=True)
class Init(Experiment):
    """Train networks with and without BN from initial weights with different standard deviations; compare accuracies.

    Paper: Abstract, "be less careful about initialization"; Sec. 3.3
    """

    stds: tuple[float, ...] = (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
    """Standard deviations of the initial weights."""
    steps: int = 5000
    """Updates per run."""
    rate: float = 1.0
    """Learning rate of both networks; the default is near the best rate of the network without BN."""
    seeds: int = 3
    """Number of seeds per setting."""
    out: Path = Path("runs/init")


def init(options: Init) -> dict[str, Any]:
    """Run the experiment and write its result."""
    jobs = [
        Setting(kind, options.steps, options.rate, std, seed=seed)
        for kind in (False, True)
        for std in options.stds
        for seed in range(options.seeds)
    ]
    results: dict[tuple[bool, float], list[float]] = {}
    for setting, final in zip(jobs, options.run(_final, jobs), strict=True):
        results.setdefault((setting.batch_norm, setting.std), []).append(final)
    rows: list[dict[str, Any]] = [
        {"network": label(kind), "std": std, "mean": mean(runs), "spread": spread(runs), "runs": runs}
        for (kind, std), runs in results.items()
    ]
    claim = "Batch Normalization allows us to be less careful about initialization."
    plain, normalized = (
        {row["std"] for row in rows if row["network"] == label(kind) and row["mean"] > 0.9} for kind in (False, True)
    )
    statement = "networks with BN exceed 90% at every standard deviation at which networks without BN do, and at others"
    verdicts = {statement: plain < normalized if plain or normalized else None}
    return publish(options, claim, {"final test accuracy": rows}, verdicts, draw)


def _final(setting: Setting) -> float:
    return accuracies(setting, [setting.steps])[0]


def draw(result: dict[str, Any], plt: Any) -> Any:
    """Draw the final accuracies of all seeds, and their means, against the standard deviation."""
    options = result["options"]
    figure, axis = plt.subplots(figsize=(4.6, 2.8))
    for name in (label(False), label(True)):
        rows = [row for row in result["final test accuracy"] if row["network"] == name]
        axis.plot([r["std"] for r in rows], [r["mean"] for r in rows], "o-", ms=3, color=color(name), label=name)
        for row in rows:
            axis.plot([row["std"]] * len(row["runs"]), row["runs"], ".", ms=3, color=color(name), alpha=0.5)
    axis.set(
        xscale="log", xlabel="standard deviation of the initial weights", ylabel="test accuracy", ylim=(0, 1),
        title=f"after {options['steps']:,} steps at rate {options['rate']:g}, {options['seeds']} seeds",
    )  # fmt: skip
    axis.legend(loc="lower center")
    return figure
