"""``batchnorm reproduce fig2``: train the runs of a plan, and make Figures 2 and 3 of what is finished."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...extras import MissingExtraError
from ...report.page import write_report
from ...report.runs import Run
from ...results import write_atomically, write_json
from .claims import Verdict, verdicts
from .curves import best, end_slope, network_of, times_fewer, tuned_baseline
from .fig2_picture import drawn, pictures
from .fig2_tables import PAPER, Section, ablation, dropout, failures, figure3, markdown, on_the_way, ran, rates
from .plan import Group, Plan, read_plan
from .result_files import Finished, RunFiles, read_all
from .session import Session
from .training import Training

TITLE = "Figures 2 and 3: Inception and its batch-normalized variants"


@dataclass(frozen=True)
class Fig2(Session):
    """Train the networks of Section 4.2 by a plan, and make Figures 2 and 3 of what is finished.

    The work spreads over as many sessions and machines as it needs: each run leaves a result file of its own, and the
    same command resumes where it stopped. Without --data nothing is trained, and the figures are made of the files.

    Paper: Sec. 4.2.1, 4.2.2; Figs. 2, 3
    """

    out: Path = Path("runs/fig2")
    """Folder for the figures, the tables, the page, and the runs' checkpoints."""
    group: tuple[Group, ...] = ()
    """Train runs of these groups alone."""


def fig2(options: Fig2) -> Path:
    """Train what is missing, write the figures, and return the path of the table."""
    options.check()
    plan = read_plan("fig2", options.plan)
    waiting = [] if options.data is None else _missing(options, plan)

    def figures() -> Path:
        return publish(plan, read_all(plan, options.result_files, options.out), options.out)

    return options.run(waiting, (job.files.run.recipe.size for job in waiting), figures)


def _missing(options: Fig2, plan: Plan) -> list[Training]:
    data, finished = options.open_data(plan)
    return [
        Training(RunFiles(run, options.result_files, options.out), plan, options, data)
        for run in plan.chosen(options.group, options.only)
        if run.name not in finished
    ]


def publish(plan: Plan, finished: Mapping[str, Finished], out: Path) -> Path:
    """Write ``fig2.json``, ``fig2.md``, ``report.html`` and the pictures, print the table and return its path."""
    parts = sections(plan, finished)
    write_json(out / "fig2.json", summary(plan, finished))
    table = out / "fig2.md"
    write_atomically(table, f"# {TITLE}\n\n{markdown(parts)}\n".encode())
    print(markdown([part for part in parts if part.heading == "Figure 3"]), "", *verdicts(plan, finished), sep="\n")
    if missing := [run.name for run in plan.runs if run.name not in finished]:
        print(f"not yet run: {', '.join(missing)}")
    written = [table]
    if runs := _as_runs(finished):
        written.append(write_report(runs, out / "report.html", title=TITLE, sections=parts))
    try:
        written += pictures(finished, out)
    except MissingExtraError as error:
        print(f"no pictures: {error}")
    print("\n" + "\n".join(map(str, written)))
    return table


def summary(plan: Plan, finished: Mapping[str, Finished]) -> dict[str, Any]:
    """Return what was found, for README's table and for other programs."""
    inception, tuned = network_of(finished, "inception"), tuned_baseline(finished)
    networks: dict[str, Any] = {}
    for variant in PAPER:
        network = network_of(finished, variant)
        if network:
            top = best(network.curve)
            networks[variant] = {
                "seeds": len(network.runs),
                "maximum": None if top is None else top[1],
                "step": None if top is None else top[0],
                "maxima": [top[1] for curve in network.curves if (top := best(curve)) is not None],
                "final": network.final,
                "times fewer steps": times_fewer(inception.curve, network.curve),
                "times fewer than best-tuned": times_fewer(tuned[1].curve, network.curve) if tuned else None,
            }
    first = next(iter(finished.values()), None)
    return {
        "data": first.data if first else None,
        "environment": first.environment if first else None,
        "size": first.run.recipe.size if first else None,
        "epochs": first.run.recipe.epochs if first else None,
        "networks": networks,
        "best-tuned baseline": tuned[0] if tuned else None,
        "end slope": end_slope(inception.curve) if inception.curve else None,
        "figure 3": figure3(finished)._asdict(),
        "verdicts": [verdict._asdict() for verdict in verdicts(plan, finished)],
        "not yet run": [run.name for run in plan.runs if run.name not in finished],
    }


def _as_runs(finished: Mapping[str, Finished]) -> list[Run]:
    """Return what Figure 2 draws, each the mean over its seeds, as the page takes them."""
    runs = []
    for name, (network, _, _) in drawn(finished).items():
        first = network.runs[0]
        config = {**asdict(first.run.recipe), "name": first.run.variant, "seed": f"{len(network.runs)} seeds"}
        end = {"accuracy": {"folded": statistics.fmean(network.final)}} if network.final else {}
        curves = {"val_top1": network.curve}
        runs.append(Run(name, {**config, "environment": first.environment}, end, curves, [], []))
    return runs


def sections(plan: Plan, finished: Mapping[str, Finished]) -> list[Section]:
    """Return all tables; those of which nothing is finished are left out."""
    judged = verdicts(plan, finished)
    parts = [
        figure3(finished),
        on_the_way(finished),
        Section("What the paper found", "", [list(Verdict._fields), *(list(v) for v in judged)]),
        failures(finished),
        rates(finished),
        dropout(finished),
        ablation(finished),
        ran(finished),
        Section(
            "Not yet run", "", [["run", "group"], *([r.name, r.group] for r in plan.runs if r.name not in finished)]
        ),
    ]
    return [part for part in parts if len(part.rows) > 1]
