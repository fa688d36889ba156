"""One network of Figure 1: trained, watched, estimated, folded, written to its folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...data import MNIST, mnist
from ...inference import fold
from ...monitor import JSONLines, Monitor
from ...population import estimate_
from .run_folder import RunFolder
from .training import Setting, accuracy, accuracy_steps, order, train_

PERCENTILES = (15, 50, 85)
PROBE = 250
RECORDS = 125
GRADIENT_RECORDS = 25
CHECKPOINTS = 10
SEGMENT = 100

Progress = Callable[[int, float, float], None]


def run(
    setting: Setting,
    path: Path,
    *,
    resume: bool = False,
    stopped: Callable[[], bool] = lambda: False,
    progress: Progress = lambda step, loss, accuracy: None,
) -> bool:
    """Train one network into ``path``; return whether it came to its end.

    Args:
        setting: what to train.
        path: the run's folder.
        resume: go on from the folder's checkpoint.
        stopped: asked every 100 steps; where it says yes, a checkpoint is left and the run ends.
        progress: told the step, the loss and the last test accuracy every 100 steps.

    Paper: Sec. 4.1; Alg. 2
    """
    folder, net, data = RunFolder(path), setting.network(), mnist()
    config = {**asdict(setting), "percentiles": list(PERCENTILES)}
    step, seconds = folder.resume(net, config) if resume else folder.start(config)
    clock = _Clock(seconds)
    probe = data.test.images[:PROBE]
    watch = _Watch(setting, folder, net, data, progress, clock)
    with JSONLines(folder.metrics) as sink:
        # Not entered: it would count the training passes, and record some of them by itself.
        monitor = Monitor(net, percentiles=PERCENTILES, probe=probe, sinks=[sink])
        if step == 0:
            watch.measure(0, float("nan"), monitor)
        for now, loss in train_(net, data.train, setting, watch.marks, start=step):
            watch.measure(now, loss, monitor)
            step = now
            if stopped():
                break
    folder.save(net, step, clock())
    if step < setting.steps:
        return False
    folder.finish({"steps": step, "accuracy": finish(net, setting, data), "seconds": round(clock(), 2)})
    return True


class _Clock:
    """Count seconds, those of the run before it was resumed among them."""

    def __init__(self, before: float) -> None:
        self.began = time.perf_counter() - before

    def __call__(self) -> float:
        return time.perf_counter() - self.began


class _Watch:
    """Decide at which steps what is measured, and measure it."""

    def __init__(
        self,
        setting: Setting,
        folder: RunFolder,
        net: nn.Sequential,
        data: MNIST,
        progress: Progress,
        clock: _Clock,
    ) -> None:
        self.setting, self.folder, self.net, self.data = setting, folder, net, data
        self.progress, self.clock = progress, clock
        steps = setting.steps
        self.accuracy_at = {0, *accuracy_steps(steps)}
        self.record_at = _evenly(steps, RECORDS, 10)
        self.gradients_at = _evenly(steps, GRADIENT_RECORDS, 50)
        self.save_at = _evenly(steps, CHECKPOINTS, SEGMENT) - {0}
        regular = range(SEGMENT, steps + 1, SEGMENT)
        self.marks = {*self.accuracy_at, *self.record_at, *self.gradients_at, *self.save_at, *regular}
        self.accuracy = float("nan")

    def measure(self, step: int, loss: float, monitor: Monitor) -> None:
        """Do what is due at this step."""
        if step in self.accuracy_at:
            self.accuracy = accuracy(self.net, self.data.test)
            self.folder.log(step=step, accuracy=self.accuracy)
        if step % SEGMENT == 0:
            if step:
                self.folder.log(step=step, loss=float(f"{loss:.5g}"))
            self.progress(step, loss, self.accuracy)
        if step in self.record_at:
            monitor.record(step)
        if step in self.gradients_at:
            # The examples that the next step would take.
            rows = order(self.setting, len(self.data.train.images), step, step + 1)[0]
            batch = (self.data.train.images[rows], self.data.train.labels[rows])
            monitor.record_gradient_change(step, _loss, batch, self.setting.rate)
        if step in self.save_at:
            self.folder.save(self.net, step, self.clock())


def _evenly(steps: int, count: int, closest: int) -> set[int]:
    """Return about ``count`` steps from 0 on, no two closer than ``closest``."""
    return set(range(0, steps + 1, max(steps // count, closest)))


def _loss(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output, batch[1])


def finish(net: nn.Sequential, setting: Setting, data: MNIST) -> dict[str, Any]:
    """Return the test accuracy with running averages, with population statistics, and of the folded network.

    Paper: Alg. 2, l. 7-12
    """
    accuracies = {"running": accuracy(net, data.test)}
    if setting.batch_norm:
        # One epoch in mini-batches of the training size, in the order a further epoch would take.
        rows = order(setting, len(data.train.images), 0, len(data.train.images) // setting.batch_size)
        estimate_(net, (data.train.images[row] for row in rows.unbind()))
        accuracies["population"] = accuracy(net, data.test)
        accuracies["folded"] = accuracy(fold(net.eval(), data.test.images[:2]), data.test)
    return accuracies
