"""Figure 1: test accuracy and sigmoid inputs of Section 4.1's network during training, with and without BN."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...errors import between
from ...jobs import run_side_by_side, stop_signal
from ...processes import torch_threads
from ...progress import Display
from ...report.figure1 import draw, paper_versus_here, steps_to
from ...report.page import write_report
from ...report.runs import Run, read_runs
from ...results import check_writable, write_json
from .network_run import NetworkRun
from .training import Setting


@dataclass(frozen=True)
class Fig1:
    """Train Section 4.1's network with and without batch normalization, and draw Figure 1.

    The paper does not give the learning rate or the standard deviation of the initial weights; the defaults are this
    project's choice.

    After an interruption, run the same command again to resume from the last checkpoint. If the networks are already
    trained, nothing is trained, and only the results are written again.

    Paper: Sec. 4.1; Fig. 1
    """

    steps: int = 50_000
    """Updates per network."""
    rate: float = 0.1
    """Learning rate of plain SGD, for both networks."""
    std: float = 0.1
    """Standard deviation of the initial weights."""
    batch_size: int = 60
    """Examples in a mini-batch."""
    seed: int = 0
    """Seed of the weights and of the order of the examples; the same for both networks."""
    out: Path = Path("runs/fig1")
    """Folder for the runs, the figure and the report; an unfinished run with the same options is resumed."""
    resume: bool = False
    """Also resume a run that was started with another number of --steps, for example to train it for longer."""
    processes: int = 2
    """2 trains both networks in parallel, with one thread each; 1 trains one network after the other."""

    def __post_init__(self) -> None:
        between(1, 2, processes=self.processes)
        self.settings()

    def settings(self) -> dict[str, Setting]:
        """Return the settings of both networks, by name."""
        return {
            name: Setting(batch_norm, self.steps, self.rate, self.std, self.batch_size, self.seed)
            for name, batch_norm in (("without-bn", False), ("with-bn", True))
        }


def fig1(options: Fig1) -> Path:
    """Run the experiment of Figure 1, or resume it, and return the path of its report.

    After Ctrl-C, each network that is being trained saves a checkpoint and stops within 100 steps. A second Ctrl-C
    stops the training at once.

    Raises:
        KeyboardInterrupt: if the training was stopped before the end.
        ValueError: if the folder holds a run with other options, or a checkpoint that cannot be used.
        OSError: if a file cannot be written.
        JobsFailedError: if the process that trains a network failed.
    """
    check_writable(options.out / "result.json")
    complete = _train(options)
    folders = [folder for run in options.settings() if ((folder := options.out / run) / "metrics.jsonl").exists()]
    page = options.out / "report.html"
    runs = read_runs(folders) if folders else []  # no run has metrics yet if Ctrl-C came early
    if runs:
        draw(runs, options.out)
        write_report(runs, page)
    if not complete:
        raise KeyboardInterrupt(f"stopped before the end; run the same command again to resume: {_command(options)}")
    result = _result(options, runs)
    write_json(options.out / "result.json", result)
    for run in runs:
        print(run.line())
    for what, paper, plain, normalized in result["paper versus here"][1:]:
        told = paper if paper.startswith("not in the paper") else f"the paper: {paper}"
        print(f"{what}: {plain} without BN, {normalized} with BN; {told}")
    print(f"figure: {options.out / 'fig1.png'}\nreport: {page}")
    return page


def _train(options: Fig1) -> bool:
    """Train each network in its folder, or resume it; return whether all reached their last step."""
    runs = [NetworkRun(options.out / name, setting, options.resume) for name, setting in options.settings().items()]
    found = {run: run.prepare() for run in runs}
    runs = [run for run in runs if not run.finished()]
    for run in runs:
        if found[run]:
            print(f"{run.name}: resuming from step {found[run]:,}", flush=True)
    if not runs:
        print(
            "this run is finished, so only its results are written again: to start over, choose another"
            f" --out or remove {options.out}",
            flush=True,
        )
    if options.processes > 1:
        return run_side_by_side(runs, jobs=len(runs))
    with torch_threads(1), stop_signal() as stop, Display() as display:
        for run in runs:
            display.add(run.name, run.steps, "step")
        return all(run.train(lambda: stop.requested, partial(display.update, run.name)) for run in runs)


def _command(options: Fig1) -> str:
    """Return the command line with these options.

    >>> _command(Fig1(steps=100, out=Path("my runs"), resume=True))
    "batchnorm reproduce fig1 --steps 100 --out 'my runs' --resume"
    """
    words = ["batchnorm", "reproduce", "fig1"]
    for name, value in asdict(options).items():
        if value != getattr(Fig1, name):
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return shlex.join(words)


def _result(options: Fig1, runs: Sequence[Run]) -> dict[str, Any]:
    return {
        "claim": "Batch Normalization helps the network train faster and achieve higher accuracy; it makes the"
        " distribution more stable and reduces the internal covariate shift.",
        "options": {key: value for key, value in asdict(options).items() if key not in ("out", "resume")},
        "environment": runs[0].config["environment"],
        "runs": {run.name: run.summary for run in runs},
        "accuracy": {run.name: run.accuracy for run in runs},
        "steps to": steps_to(runs),
        "paper versus here": paper_versus_here(runs),
    }
