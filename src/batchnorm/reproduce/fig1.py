"""Figure 1: test accuracy and sigmoid inputs of Section 4.1's network over training, with and without BN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..report.claims import paper_versus_here, steps_to
from ..report.figure1 import draw
from ..report.page import write_report
from ..report.runs import Run, read_runs
from ..results import write_json
from .training import Setting
from .workers import run_all


@dataclass(frozen=True)
class Fig1:
    """Train Section 4.1's network with and without batch normalization, and draw Figure 1.

    The paper gives neither the learning rate nor the width of the Gaussians; the defaults here are this project's.

    Paper: Sec. 4.1; Fig. 1
    """

    steps: int = 50_000
    """Updates of each network."""
    rate: float = 0.1
    """Learning rate of plain stochastic gradient descent, for both networks."""
    std: float = 0.1
    """Width of the Gaussians that the weights start from."""
    batch_size: int = 60
    """Examples in a mini-batch."""
    seed: int = 0
    """Seed of the weights and of the order of the examples; the same for both networks."""
    out: Path = Path("runs/fig1")
    """Folder for the runs, the figure and the report."""
    resume: bool = False
    """Go on from the checkpoints in the folder."""
    processes: int = 2
    """2 trains both networks side by side, one core each; 1 trains one after the other."""


def fig1(options: Fig1) -> Path:
    """Run the experiment of Figure 1 and return the path of its report.

    Paper: Sec. 4.1; Fig. 1
    """
    settings = {
        name: Setting(batch_norm, options.steps, options.rate, options.std, options.batch_size, options.seed)
        for name, batch_norm in (("without-bn", False), ("with-bn", True))
    }
    complete = run_all(settings, options.out, resume=options.resume, processes=options.processes)
    if not complete:
        print(f"stopped before the end; what there is follows. Go on with --resume --out {options.out}")
    runs = read_runs([options.out])
    draw(runs, options.out)
    page = write_report(runs, options.out / "report.html")
    write_json(options.out / "result.json", _result(options, runs))
    for run in runs:
        print(run.line())
    print(f"figure: {options.out / 'fig1.png'}\nreport: {page}")
    return page


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
