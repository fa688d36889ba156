"""``batchnorm reproduce fig4``: train the members of an ensemble, evaluate them, and make Figure 4 from their files."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...data.image_sources import check_complete, check_same_data, describe_data, open_source
from ...results import write_atomically, write_json
from ...train.saved_runs import open_runs
from .fig4_table import CONTEXT, PAPER, alone, figure4, markdown, notes, sweep_table
from .plan import Plan, read_plan
from .result_files import MemberFiles, RunFiles, read_all, read_result
from .session import Session
from .training import TakenMember, TrainedMember, Training

KEPT = ("recipe", "weights", "crops", "environment")


@dataclass(frozen=True)
class Fig4(Session):
    """Train the six networks of Section 4.2.3, evaluate them with 1 and 144 crops, and write Figure 4 as a table.

    The networks are the members of an ensemble. You can spread them over several sessions and machines, because each
    member writes its own files: a result file and its class probabilities. To resume after an interruption, run the
    same command again. The table lists the members that have not run. Without --data, nothing is trained, and the table
    is made from the members' files.

    Paper: Sec. 4.2.3; Fig. 4
    """

    out: Path = Path("runs/fig4")
    """Folder for the table, and the members' checkpoints."""
    runs: tuple[Path, ...] = ()
    """Use these finished runs of batchnorm train as members, instead of training the plan's members."""
    trust: bool = False
    """With --runs, allow calling the functions named in the runs' recipe.json; networks of your own need this."""


def fig4(options: Fig4) -> Path:
    """Train and evaluate missing members, write ``fig4.json`` and ``fig4.md``, and return the path of the table."""
    _check(options)
    options.check()
    started, plan = time.monotonic(), read_plan("fig4", options.plan, options.result_files)
    if options.data is None:
        members = [MemberFiles(name, options.result_files) for name in _known(options, plan)]
        return publish(members, options.out, _sweep_text(options, plan))
    jobs = _taken(options, plan) if options.runs else _planned(options, plan)
    waiting = [job for job in jobs if not job.finished() and (not options.only or job.name in options.only)]
    recipes = [job.files.run.recipe for job in waiting if isinstance(job, Training)]
    names = [job.name for job in jobs] if options.runs else _members(plan)
    members = [MemberFiles(name, options.result_files) for name in names]
    table = options.run(
        waiting, recipes, plan.evaluate_batch, lambda: publish(members, options.out, _sweep_text(options, plan))
    )
    # Members whose rates come from a sweep could not start before the sweep finished; train them now.
    return fig4(options.after(started)) if waiting and plan.waiting and not options.runs else table


def _known(options: Fig4, plan: Plan) -> list[str]:
    """Return the names of the members: the plan's members, or the runs that were given with --runs."""
    there = {path.stem: read_result(path, ()) for path in sorted(options.result_files.glob("*.json"))}
    # Only result files of runs given with --runs lack the key "result".
    if not any("result" in content for content in there.values()):
        return list(there)
    read_all(plan, options.result_files, options.out)  # raises ValueError if a file belongs to another plan
    return _members(plan)


def _sweep_text(options: Fig4, plan: Plan) -> str:
    """Return the finished runs of the plan's sweeps of rates as Markdown, or "" if there are none."""
    runs = [] if options.runs else [run for run in plan.runs if run.group == "rates"]
    found = {run.name: RunFiles(run, options.result_files, options.out).read() for run in runs}
    best = read_plan("fig4", options.plan, options.result_files).best  # the sweep may have ended since `plan` was read
    return sweep_table({name: one for name, one in found.items() if one is not None}, best)


def _members(plan: Plan) -> list[str]:
    return [*(run.name for run in plan.runs if run.group == "members"), *plan.waiting]


def _check(options: Fig4) -> None:
    if options.runs and options.data is None:
        raise ValueError("--runs needs --data DIR, the images to evaluate the runs on")
    if options.runs and options.only:
        raise ValueError(
            "--only and --runs cannot be combined: --only selects runs of the plan, and --runs replaces them"
        )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            "fig4 does not run under torchrun, but WORLD_SIZE is above 1: train each member with torchrun ... -m"
            " batchnorm train --recipe NAME, then run fig4 without torchrun, and give it the runs' folders with --runs"
        )


def _planned(options: Fig4, plan: Plan) -> Sequence[Training | TakenMember]:
    data, _ = options.open_data(plan)
    plan.chosen((), options.only)  # raises ValueError if --only has an unknown name
    return [
        (TrainedMember if run.group == "members" else Training)(
            RunFiles(run, options.result_files, options.out), plan, options, data
        )
        for run in plan.runs
    ]


def _taken(options: Fig4, plan: Plan) -> Sequence[Training | TakenMember]:
    data, source = describe_data(options.images, ("val",)), open_source(options.images, "val")
    check_complete(source, options.images, "val")
    jobs = []
    for known, saved in open_runs(options.runs, trust=options.trust).items():
        saved.trained(source.classes)  # raises ValueError if the run cannot be loaded or does not fit the data
        # `known` is the name of the run's folder, or the folder's path if any two of the folders have the same name.
        name = known.strip("/").replace("/", "-")
        files = MemberFiles(name, options.result_files)
        jobs.append(TakenMember(saved, files, options, data, plan.evaluate_batch, options.out / "runs" / name))
    return jobs


def publish(members: Sequence[MemberFiles], out: Path, sweep: str = "") -> Path:
    """Write ``fig4.json`` and ``fig4.md`` from the members' files, print the table and return its path.

    Args:
        members: the members' files.
        out: folder of the table.
        sweep: the sweeps of rates, as Markdown.
    """
    missing = {files.name: why for files in members if (why := files.missing()) is not None}
    told = {files.name: files.read() for files in members if files.result.is_file()}
    found = [files for files in members if files.name not in missing]
    results = {files.name: told[files.name] for files in found}
    check_same_data({name: result["data"] for name, result in told.items()})
    first = next(iter(told.values()), None)
    figure = figure4(found, told[found[0].name]["recipe"]["size"]) if found else None
    examples = next((one["examples"] for result in told.values() for one in result["crops"].values()), 0)
    images = f"{examples:,} images, {len(found) or len(told)} network(s)"
    rows, remarks = alone(told), notes(told)
    text = markdown(figure, rows, images, missing, remarks) + (f"\n\n{sweep}" if sweep else "")
    contents: dict[str, Any] = {
        "data": first["data"] if first else None,
        "environment": first["environment"] if first else None,
        "members": {name: {key: result[key] for key in KEPT} for name, result in results.items()},
        "missing": missing,
    }
    if figure is not None:
        contents |= {"rows": [row._asdict() for row in (*rows, *figure.rows)]}
        contents |= {"steps": [step.as_dict() for step in figure.steps]}
        contents |= {"paper": [row._asdict() for row in (*PAPER, *CONTEXT)]}
        contents |= {"disagreement": figure.disagreement, "ensemble": figure.together}
        contents |= {"best ensemble": [step.as_dict() for step in figure.chosen]}
        contents |= {"statement": figure.statement}
    write_json(out / "fig4.json", contents)
    table = out / "fig4.md"
    write_atomically(table, (text + "\n").encode())
    print(text, "", table, sep="\n")
    return table
