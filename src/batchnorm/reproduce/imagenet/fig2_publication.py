"""What the finished runs amount to: pictures, tables, a page, and the numbers that README quotes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...extras import MissingExtraError
from ...report.page import write_report
from ...report.runs import Run
from ...results import write_atomically, write_json
from .claims import verdicts
from .curves import best, end_slope, network_of, times_fewer, tuned_baseline
from .fig2_picture import drawn, pictures
from .fig2_section import markdown
from .fig2_tables import PAPER, figure3, sections
from .plan import Plan
from .result_files import Finished

TITLE = "Figures 2 and 3: Inception and its batch-normalized variants"


def publish(plan: Plan, finished: Mapping[str, Finished], out: Path) -> Path:
    """Write ``fig2.json``, ``fig2.md``, ``report.html`` and the pictures, print the table and return its path.

    Paper: Figs. 2, 3
    """
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
    """Return what was found, for README's table and for other programs.

    Paper: Figs. 2, 3
    """
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
