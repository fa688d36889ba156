"""A fair version of Section 4.1's comparison: each network at its own best rate, with several seeds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from ...errors import at_least
from ..publish import Experiment, color, label, mean, publish, spread
from .training import Setting, accuracies, held_out


@dataclass(frozen=True)
class Comparison(Experiment):
    """Sweep the learning rate with and without BN, then compare the networks at their best rates and at --equal-rate.

    Paper: Sec. 4.1; Fig. 1 a
    """

    rates: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
    """Learning rates of the sweep."""
    sweep_steps: int = 5000
    """Updates per run of the sweep, on 55,000 training digits; the best rate is chosen on the other 5,000."""
    marks: tuple[int, ...] = (1000, 5000, 15_000, 50_000)
    """Step counts at which the test accuracies are compared; the last is the length of the runs."""
    equal_rate: float = 0.1
    """Learning rate at which both networks are also compared; the default is Figure 1's rate."""
    std: float = 0.1
    """Standard deviation of the initial weights."""
    seeds: int = 3
    """Number of seeds per setting."""
    out: Path = Path("runs/comparison")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(10, sweep_steps=self.sweep_steps)
        if list(self.marks) != sorted(self.marks):
            raise ValueError(f"marks={self.marks}: give step counts in increasing order")


def comparison(options: Comparison) -> dict[str, Any]:
    """Run the sweep and the comparison, and write their result."""
    early = (options.sweep_steps // 10, options.sweep_steps)
    sweep = _trained(options, product((False, True), options.rates), early, hold_out=True)
    best = {
        kind: max(options.rates, key=lambda rate: fmean(run[-1] for run in sweep[kind, rate])) for kind in (False, True)
    }
    pairs = {(kind, rate) for kind in (False, True) for rate in (best[kind], options.equal_rate)}
    full = _trained(options, sorted(pairs), options.marks, hold_out=False)
    fair = [_row(kind, best[kind], full[kind, best[kind]], options.marks) for kind in (False, True)]
    findings = {
        "chosen on": "5,000 digits held out of the training set, mean over seeds, at the sweep's last step",
        "sweep": [_row(kind, rate, sweep[kind, rate], early) for kind, rate in sorted(sweep)],
        "best rate": {label(kind): rate for kind, rate in best.items()},
        "best against best": fair,
        "equal rate": [
            _row(kind, options.equal_rate, full[kind, options.equal_rate], options.marks) for kind in (False, True)
        ],
    }
    claim = "Batch Normalization helps the network train faster and achieve higher accuracy."
    verdicts = {
        f"at their best rates, the network with BN is more accurate at step {mark:,}": bn > plain
        for mark, plain, bn in zip(options.marks, *(row["mean"] for row in fair), strict=True)
    }
    return publish(options, claim, findings, verdicts, draw)


Table = dict[tuple[bool, float], list[list[float]]]


def _trained(options: Comparison, pairs: Iterable[tuple[bool, float]], marks: Sequence[int], hold_out: bool) -> Table:
    """Train one network per seed and pair (has BN, rate); return the accuracies at the steps in ``marks``, by pair."""
    jobs = [
        (Setting(kind, marks[-1], rate, options.std, seed=seed), marks)
        for kind, rate in pairs
        for seed in range(options.seeds)
    ]
    table: Table = {}
    for (setting, _), result in zip(jobs, options.run(partial(_accuracies, hold_out), jobs), strict=True):
        table.setdefault((setting.batch_norm, setting.rate), []).append(result)
    return table


def _accuracies(hold_out: bool, job: tuple[Setting, Sequence[int]]) -> list[float]:
    return accuracies(*job, data=held_out() if hold_out else None)


def _row(kind: bool, rate: float, runs: Sequence[Sequence[float]], marks: Sequence[int]) -> dict[str, Any]:
    """Return the accuracies' mean and spread (sample standard deviation) over seeds at each step in ``marks``."""
    columns = list(zip(*runs, strict=True))
    return {
        "network": label(kind),
        "rate": rate,
        "steps": list(marks),
        "mean": [mean(c) for c in columns],
        "spread": [spread(c) for c in columns],
        "runs": [list(r) for r in runs],
    }


def draw(result: dict[str, Any], plt: Any) -> Any:
    """Draw the sweep of the rates, and the test accuracies at the best rates and at the equal rate."""
    figure, axes = plt.subplots(1, 4, figsize=(11, 2.6))
    early = result["sweep"][0]["steps"]
    for k, (axis, mark) in enumerate(zip(axes, early, strict=False)):
        for name in (label(False), label(True)):
            rows = [row for row in result["sweep"] if row["network"] == name]
            rates, means = [row["rate"] for row in rows], [row["mean"][k] for row in rows]
            axis.plot(rates, means, "o-", ms=3, color=color(name), label=name)
        axis.set(xscale="log", xlabel="learning rate", title=f"sweep: held-out accuracy at step {mark:,}", ylim=(0, 1))
    for axis, key in zip(axes[2:], ("best against best", "equal rate"), strict=True):
        lowest = 1.0
        for row in result[key]:
            bars = [s or 0 for s in row["spread"]]
            lowest = min([lowest, *(m - s for m, s in zip(row["mean"], bars, strict=True))])
            style = {"color": color(row["network"]), "label": f"{row['network']}, rate {row['rate']:g}"}
            axis.errorbar(row["steps"], row["mean"], bars, fmt="o-", ms=3, capsize=2, **style)
        axis.set(xscale="log", xlabel="training steps", title=f"{key}: test accuracy", ylim=(lowest // 0.05 * 0.05, 1))
    for axis in axes:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3))
    return figure
