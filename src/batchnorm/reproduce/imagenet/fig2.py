"""``batchnorm reproduce fig2``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...data.fingerprint import check_same_data, describe_data
from ...data.image_sources import check_complete, open_source
from .fig2_plan import Group, read_plan
from .fig2_publication import publish
from .plan import Plan
from .result_files import RunFiles, read_all
from .session import Sitting
from .training import Training


@dataclass(frozen=True)
class Fig2(Sitting):
    """Train the networks of Section 4.2 by a plan, and make Figures 2 and 3 of what is finished.

    The work spreads over as many sittings and machines as it needs: each run leaves a result file of its own, and the
    same command goes on where it stopped. Without --data nothing is trained, and the figures are made of the files.

    Paper: Sec. 4.2.1, 4.2.2; Figs. 2, 3
    """

    out: Path = Path("runs/fig2")
    """Folder for the figures, the tables, the page, and the runs' checkpoints."""
    group: tuple[Group, ...] = ()
    """Train runs of these groups alone."""


def fig2(options: Fig2) -> Path:
    """Train what is missing, write the figures, and return the path of the table.

    Raises:
        FileNotFoundError: where there is no such folder of results, plan or data.
        ValueError: where a result is of another plan or of other data, or no run may train.
        RuntimeError: where a run failed.
        KeyboardInterrupt: where the runs were stopped before their end.

    Paper: Sec. 4.2.1, 4.2.2; Figs. 2, 3
    """
    options.check()
    plan = read_plan(options.plan)
    waiting = [] if options.data is None else _missing(options.data, options, plan)

    def figures() -> Path:
        return publish(plan, read_all(plan, options.result_files, options.out), options.out)

    return options.carry_out(waiting, figures)


def _missing(path: Path, options: Fig2, plan: Plan) -> list[Training]:
    finished = read_all(plan, options.result_files, options.out)
    for split in ("train", "val"):
        check_complete(open_source(path, split), path, split)
    data = describe_data(path)
    check_same_data({"the data given": data, **{name: one.data for name, one in finished.items()}})
    return [
        Training(RunFiles(run, options.result_files, options.out), plan, options.machine(path), data)
        for run in plan.chosen(options.group, options.only)
        if run.name not in finished
    ]
