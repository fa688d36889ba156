"""One network of Figure 1: a resumable run that trains, monitors and evaluates it.

The run's folder holds ``config.json``, ``metrics.jsonl``, ``checkpoint.pt`` and, at the end, ``summary.json``.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...data import MNIST, mnist
from ...errors import differences
from ...inference import fold
from ...jobs import Stopped, stop_signal
from ...monitor import Monitor
from ...monitor.sinks import as_json
from ...population import estimate_
from ...processes import torch_threads
from ...results import environment, read_json, write_atomically, write_json
from ...train.lock import locked
from ...train.metrics import Metrics
from .training import Setting, accuracy, order, train_

PERCENTILES = (15, 50, 85)
PROBE = 250
RECORDS = 125
GRADIENT_RECORDS = 25
CHECKPOINTS = 10
SEGMENT = 100

Show = Callable[[int, str], None]


@dataclass(frozen=True)
class NetworkRun:
    """The training run of one network, as a :class:`batchnorm.jobs.Job` that can run in parallel with other jobs.

    If the folder holds an unfinished run with the same setting, that run is resumed. With ``any_steps``, the run in the
    folder may have been started with another number of steps.

    Paper: Sec. 4.1; Alg. 2
    """

    folder: Path
    setting: Setting
    any_steps: bool = False

    @property
    def name(self) -> str:
        """The name of the run in messages."""
        return self.folder.name

    @property
    def steps(self) -> int:
        """The number of training steps."""
        return self.setting.steps

    def prepare(self) -> int:
        """Create the folder, and return the step to resume from: 0 if there is no checkpoint.

        Raises:
            ValueError: if the folder holds a run with another setting or with more steps, or an unreadable checkpoint.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._config_there()
        step, _, _ = _load(self.folder, self.setting.network())
        if step > self.steps:
            raise ValueError(f"{self.folder} is already at step {step:,}: increase --steps, or use another --out")
        return step

    def finished(self) -> bool:
        """Return whether the run has reached its last step."""
        summary = self.folder / "summary.json"
        return summary.exists() and read_json(summary).get("steps") == self.steps

    def __call__(self) -> None:
        """Train in this process, with one thread."""
        with torch_threads(1), stop_signal() as stop:
            if not self.train(lambda: stop.requested):
                raise Stopped("stopped before the end")

    def train(self, stopped: Callable[[], bool] = lambda: False, show: Show = lambda step, text: None) -> bool:
        """Train until the end or until a stop is requested; return whether the end was reached.

        Args:
            stopped: called at least every 100 steps; if it returns True, the run saves a checkpoint and ends.
            show: called every 100 steps with the step and a text with the loss and the last test accuracy.
        """
        setting, folder = self.setting, self.folder
        net, data = setting.network(), mnist()
        with locked(folder):
            step, seconds, position = self._resume(net)
            began = time.perf_counter() - seconds
            with closing(Metrics(folder / "metrics.jsonl", position)) as metrics:
                watch = _Watch(setting, net, data, metrics, show)
                if step == 0:
                    watch.measure(0, float("nan"))
                for now, loss in train_(net, data.train, setting, watch.marks, start=step):
                    step = now
                    watch.measure(step, loss)
                    stop = stopped()
                    if stop or step in watch.save_at or step == setting.steps:
                        save(folder, net, step, time.perf_counter() - began, metrics.position())
                    if stop:
                        break
            if step < setting.steps:
                return False
            summary = {"steps": step, "accuracy": finish(net, setting, data)}
            write_json(folder / "summary.json", {**summary, "seconds": round(time.perf_counter() - began, 2)})
        return True

    def _config_there(self) -> dict[str, Any]:
        """Check and return the configuration of the run in the folder; return {} if the folder has no checkpoint."""
        if not (self.folder / "checkpoint.pt").exists():
            return {}
        path = self.folder / "config.json"
        try:
            there = read_json(path)
        except ValueError as error:
            raise ValueError(f"{path} cannot be read ({error}): use another --out, or remove {self.folder}") from error
        here = {k: v for k, v in _config(self.setting).items() if not (self.any_steps and k == "steps")}
        if differs := differences(there, here):
            steps_only = len(differs) == 1 and differs[0].startswith("steps ")
            more = ", add --resume to train for more --steps" if steps_only else ""
            raise ValueError(
                f"{self.folder} holds another run ({', '.join(differs)}): use its options{more}, or another --out"
            )
        return there

    def _resume(self, net: nn.Module) -> tuple[int, float, int]:
        """Write the configuration, delete any old summary, and load the checkpoint; return :func:`_load`'s result."""
        there = self._config_there() or {"environment": environment()}
        write_json(self.folder / "config.json", {**there, **_config(self.setting)})
        (self.folder / "summary.json").unlink(missing_ok=True)
        return _load(self.folder, net)


def save(folder: Path, net: nn.Module, step: int, seconds: float, metrics_size: int) -> None:
    """Replace the checkpoint atomically; ``seconds`` is the time that the run has taken so far."""
    content = io.BytesIO()
    torch.save({"net": net.state_dict(), "step": step, "seconds": seconds, "metrics_size": metrics_size}, content)
    write_atomically(folder / "checkpoint.pt", content.getvalue())


def _load(folder: Path, net: nn.Module) -> tuple[int, float, int]:
    """Load the checkpoint into ``net``; return its step, the seconds trained so far and the metrics file's size.

    Without a checkpoint, nothing is loaded, and all three values are 0.
    """
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0, 0.0, 0
    try:
        state = torch.load(path, weights_only=True)
        net.load_state_dict(state["net"])
        return int(state["step"]), float(state["seconds"]), int(state["metrics_size"])
    except Exception as error:  # torch.load can raise many kinds of exceptions
        why = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read ({why}): remove this file to start over") from error


def _config(setting: Setting) -> dict[str, Any]:
    return {**asdict(setting), "percentiles": list(PERCENTILES)}


class _Watch:
    """Decide what to measure at which steps, measure it and write it to the metrics file."""

    def __init__(self, setting: Setting, net: nn.Sequential, data: MNIST, metrics: Metrics, show: Show) -> None:
        self.setting, self.net, self.data, self.metrics, self.show = setting, net, data, metrics, show
        # Do not use the monitor in a `with` block, because it would then record training passes by itself. `measure`
        # calls the monitor at the chosen steps.
        self.monitor = Monitor(net, percentiles=PERCENTILES, probe=data.test.images[:PROBE])
        steps = setting.steps
        self.accuracy_at = {0, *accuracy_steps(steps)}
        self.record_at = _evenly(steps, RECORDS, 10)
        self.gradients_at = _evenly(steps, GRADIENT_RECORDS, 50)
        self.save_at = _evenly(steps, CHECKPOINTS, SEGMENT) - {0}
        regular = range(SEGMENT, steps + 1, SEGMENT)
        self.marks = {*self.accuracy_at, *self.record_at, *self.gradients_at, *self.save_at, *regular}
        self.accuracy = float("nan")

    def measure(self, step: int, loss: float) -> None:
        if step in self.accuracy_at:
            self.accuracy = accuracy(self.net, self.data.test)
            self.metrics.write({"step": step, "accuracy": self.accuracy})
        if step % SEGMENT == 0:
            if step:
                self.metrics.write({"step": step, "loss": float(f"{loss:.5g}")})
            self.show(step, (f"loss {loss:.4f}, " if step else "") + f"accuracy {self.accuracy:.2%}")
        if step in self.record_at:
            self.metrics.write(as_json(self.monitor.record(step)))
        if step in self.gradients_at:
            # Measure on the mini-batch of the next training step.
            rows = order(self.setting, len(self.data.train.images), step, step + 1)[0]
            batch = (self.data.train.images[rows], self.data.train.labels[rows])
            change = self.monitor.record_gradient_change(step, _loss, batch, self.setting.rate)
            self.metrics.write(as_json(change))


def accuracy_steps(steps: int) -> list[int]:
    """Return the steps at which accuracy is measured: often in the first 5,000 steps, and after every 2% of the run.

    >>> accuracy_steps(50_000)[:3], len(accuracy_steps(50_000)), accuracy_steps(50_000)[-1]
    ([100, 200, 300], 71, 50000)
    """
    early = {*range(100, 1000, 100), *range(1000, 5000, 250)}
    every = max(steps // 50, 100)
    late = range(every, steps + 1, every)
    return sorted({s for s in {*early, *late, steps} if s <= steps})


def _evenly(steps: int, count: int, closest: int) -> set[int]:
    """Return about ``count`` evenly spaced steps that start at 0 and are at least ``closest`` steps apart."""
    return set(range(0, steps + 1, max(steps // count, closest)))


def _loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def finish(net: nn.Sequential, setting: Setting, data: MNIST) -> dict[str, Any]:
    """Return the test accuracy with running averages, with population statistics, and of the folded network.

    For a network without batch normalization, return only its test accuracy, under the key "running". In a network with
    batch normalization, this function replaces the running averages with population statistics.

    Paper: Alg. 2, l. 7-12
    """
    accuracies = {"running": accuracy(net, data.test)}
    if setting.batch_norm:
        # Estimate population statistics from one epoch of mini-batches that are as large as in training.
        rows = order(setting, len(data.train.images), 0, len(data.train.images) // setting.batch_size)
        estimate_(net, (data.train.images[row] for row in rows.unbind()))
        accuracies["population"] = accuracy(net, data.test)
        accuracies["folded"] = accuracy(fold(net.eval(), data.test.images[:2]), data.test)
    return accuracies
