"""``batchnorm reproduce fig4``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...data.fingerprint import check_same_data, describe_data
from ...data.image_sources import check_complete, open_source
from ...train.saved_runs import open_runs
from .fig4_plan import read_plan
from .fig4_publication import publish
from .member import TakenMember, TrainedMember
from .member_files import MemberFiles
from .plan import Plan
from .result_files import RunFiles, read_all, read_result
from .session import Sitting


@dataclass(frozen=True)
class Fig4(Sitting):
    """Train the six networks of Section 4.2.3, evaluate them with 1 and 144 crops, and write Figure 4 as a table.

    The work spreads over as many sittings and machines as it needs: each member leaves a result file and its
    probabilities, and the same command goes on where it stopped. What has not been run is listed as such. Without
    --data nothing is trained, and the table is made of the files.

    Paper: Sec. 4.2.3; Fig. 4
    """

    out: Path = Path("runs/fig4")
    """Folder for the table, and the members' checkpoints."""
    runs: tuple[Path, ...] = ()
    """Finished runs to take as members instead of training those of the plan."""


def fig4(options: Fig4) -> Path:
    """Train and evaluate what is missing, write ``fig4.json`` and ``fig4.md``, and return the path of the table.

    Raises:
        FileNotFoundError: where there is no such folder of results, plan, data or run.
        ValueError: where a result is of another plan or of other data, or runs and data do not fit.
        RuntimeError: where a member failed.
        KeyboardInterrupt: where the members were stopped before their end.

    Paper: Sec. 4.2.3; Fig. 4
    """
    _check(options)
    options.check()
    plan = read_plan(options.plan)
    if options.data is None:
        return publish([MemberFiles(name, options.result_files) for name in _known(options, plan)], options.out)
    jobs = _taken(options, plan, options.data) if options.runs else _planned(options, plan, options.data)
    waiting = [job for job in jobs if not job.finished() and (not options.only or job.name in options.only)]
    return options.carry_out(waiting, lambda: publish([job.member for job in jobs], options.out))


def _known(options: Fig4, plan: Plan) -> list[str]:
    """Return the members that the files are of: the plan's, or those that were taken instead."""
    there = {path.stem: read_result(path, ()) for path in sorted(options.result_files.glob("*.json"))}
    if not any(
        "result" in content for content in there.values()
    ):  # how its training went, which a taken run leaves out
        return list(there)
    read_all(plan, options.result_files, options.out)  # refuses those of another plan
    return [run.name for run in plan.runs]


def _check(options: Fig4) -> None:
    if options.runs and options.data is None:
        raise ValueError("--runs without --data: give the images that the runs are to be evaluated on")
    if options.runs and options.only:
        raise ValueError("--only chooses members of the plan, and --runs takes others instead: give one of the two")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            "fig4 is one process: train each member with torchrun ... -m batchnorm train --recipe NAME, then give the"
            " runs with --runs"
        )


def _planned(options: Fig4, plan: Plan, path: Path) -> Sequence[TrainedMember | TakenMember]:
    finished = read_all(plan, options.result_files, options.out)
    for split in ("train", "val"):
        check_complete(open_source(path, split), path, split)
    data = describe_data(path)
    check_same_data({"the data given": data, **{name: one.data for name, one in finished.items()}})
    plan.chosen((), options.only)  # refuses names that it does not have
    return [
        TrainedMember(RunFiles(run, options.result_files, options.out), plan, options.machine(path), data)
        for run in plan.runs
    ]


def _taken(options: Fig4, plan: Plan, path: Path) -> Sequence[TrainedMember | TakenMember]:
    data, machine = describe_data(path, ("val",)), options.machine(path)
    source = open_source(path, "val")
    check_complete(source, path, "val")
    jobs = []
    for known, saved in open_runs(options.runs).items():
        saved.check(source.classes)
        name = known.strip("/").replace("/", "-")  # a path, where folders of the same name were given
        files = MemberFiles(name, options.result_files)
        jobs.append(TakenMember(saved, files, machine, data, plan.evaluate_batch, options.out / "runs" / name))
    return jobs
