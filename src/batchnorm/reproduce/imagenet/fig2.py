"""``batchnorm reproduce fig2``: train the runs of a plan, and draw Figures 2 and 3 from the finished runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from ...optional_packages import MissingExtraError
from ...pictures import picture
from ...report.page import write_report
from ...report.runs import Run
from ...report.train_runs import used
from ...results import write_atomically, write_json
from ...train.metrics import steps_to
from ..publish import color, label
from .claims import Verdict, best_against_best, less_dropout, trusted, verdicts
from .curves import Seeds, best, end_slope, network_of, seeds_of, times_fewer, tuned_baseline, unnormalized
from .fig2_tables import (
    PAPER,
    SWEPT,
    Section,
    ablation,
    best_rates,
    dropout,
    failures,
    figure3,
    markdown,
    on_the_way,
    ran,
    rates,
    show_name,
)
from .plan import Group, Plan, read_plan
from .result_files import Finished, RunFiles, read_all
from .session import Session
from .training import Training

FURTHER = ("paper-rates", "dropout")  # the library's plans for Figure 2 besides the default plan
PAPERS_RATES = "the paper's rates"
TITLE = "Figures 2 and 3: Inception and its batch-normalized variants"
NAMED = 8  # the maximum number of unfinished runs that the command prints by name
LINES = {
    "inception": ("#8b8a84", "--", "Inception"),
    "bn-baseline": ("#14835b", ":", "BN-Baseline"),
    "bn-x5": ("#2a6fc9", "-", "BN-x5"),
    "bn-x30": ("#d9622b", "-", "BN-x30"),
    "bn-x5-sigmoid": ("#8a4fb0", "-.", "BN-x5-Sigmoid"),
}
# TUNED is the color and line style of the best unnormalized network if that is not Inception. OTHERS are the colors and
# line styles of the remaining unnormalized networks.
TUNED = ("#1c1b18", (0, (4, 1, 1, 1)))
OTHERS = (("#c2428a", "-"), ("#b58a00", "-"), ("#2a6fc9", "--"), ("#14835b", ":"))


@dataclass(frozen=True)
class Fig2(Session):
    """Train the networks of Section 4.2 according to a plan, and draw Figures 2 and 3 from the finished runs.

    You can spread the runs over several sessions and machines, because each run writes its own result file. To resume
    after an interruption, run the same command again. Without --data, nothing is trained, and the figures are drawn
    from the result files.

    Paper: Sec. 4.2.1, 4.2.2; Figs. 2, 3
    """

    out: Path = Path("runs/fig2")
    """Folder for the figures, the tables, the HTML report, and the runs' checkpoints."""
    group: tuple[Group, ...] = ()
    """Train only the runs in these groups of the plan."""

    @property
    def all_results(self) -> Path:
        """The folder of all result files; each plan in FURTHER has its own subfolder."""
        return self.results or self.out / "results"

    @property
    def result_files(self) -> Path:
        """The folder of the plan's result files."""
        return self.all_results / str(self.plan) if str(self.plan) in FURTHER else self.all_results


@dataclass(frozen=True)
class Study:
    """A plan, the finished runs on which its verdicts are based, and the names of the finished runs that are left out.

    :func:`trusted` decides which runs are left out.
    """

    plan: Plan
    finished: dict[str, Finished]
    untrusted: list[str]

    @classmethod
    def read(cls, plan: Path | None, results: Path, out: Path) -> Study:
        """Read a plan and its result files."""
        known = read_plan("fig2", plan, results)
        return cls(known, *trusted(read_all(known, results, out)))


@dataclass(frozen=True)
class Studies:
    """The studies of the library's plans for Figure 2.

    ``main`` is the study of the default plan. For a plan of your own, ``main`` is the study of that plan, and the
    other studies are None.
    """

    main: Study
    paper_rates: Study | None = None
    dropout: Study | None = None

    @classmethod
    def read(cls, options: Fig2) -> Studies:
        """Read the plans and all their result files."""
        folder, out = options.all_results, options.out
        if str(options.plan or "fig2") not in ("fig2", *FURTHER):
            return cls(Study.read(options.plan, folder, out))
        paper_rates, dropped = (Study.read(Path(name), folder / name, out) for name in FURTHER)
        return cls(Study.read(None, folder, out), paper_rates if paper_rates.finished else None, dropped)

    @property
    def shown(self) -> Study:
        """The study to draw: the main study or, until it has runs of Inception, the study at the paper's rates."""
        if self.paper_rates is None or network_of(self.main.finished, "inception"):
            return self.main
        return self.paper_rates

    @property
    def all(self) -> dict[str, Study]:
        """The main study and, if they exist, the others; the keys are prefixes that make the names of runs unique."""
        studies = {"": self.main, "paper-rates/": self.paper_rates, "dropout/": self.dropout}
        return {prefix: study for prefix, study in studies.items() if study is not None}

    @property
    def missing(self) -> dict[str, str]:
        """The names of the unfinished runs, each with the reason."""
        return {
            f"{prefix}{name}": why
            for prefix, study in self.all.items()
            for name, why in study.plan.missing(study.finished).items()
        }


def fig2(options: Fig2) -> Path:
    """Train the missing runs, write the figures, and return the path of the table."""
    options.check()
    started, plan = time.monotonic(), read_plan("fig2", options.plan, options.result_files)
    waiting = [] if options.data is None else _missing(options, plan)
    recipes = [job.files.run.recipe for job in waiting]
    table = options.run(waiting, recipes, plan.evaluate_batch, lambda: publish(Studies.read(options), options.out))
    # Runs whose rates come from a sweep could not start before the sweep finished; train them now.
    return fig2(options.after(started)) if waiting and plan.waiting else table


def _missing(options: Fig2, plan: Plan) -> list[Training]:
    data, finished = options.open_data(plan)
    # Runs of different plans can have the same name, so each plan in FURTHER has its own folder.
    out = options.out / str(options.plan) if str(options.plan) in FURTHER else options.out
    return [
        Training(RunFiles(run, options.result_files, out), plan, options, data)
        for run in plan.chosen(options.group, options.only)
        if run.name not in finished
    ]


def publish(studies: Studies, out: Path) -> Path:
    """Write ``fig2.json``, ``fig2.md``, ``report.html`` and the pictures, print a summary and return fig2.md's path."""
    parts, shown = sections(studies), studies.shown.finished
    write_json(out / "fig2.json", summary(studies))
    table = out / "fig2.md"
    write_atomically(table, f"# {TITLE}\n\n{markdown(parts)}\n".encode())
    judged = _judged(studies, studies.shown)
    print(markdown([part for part in parts if part.heading.startswith("Figure 3")]), "", *judged, sep="\n")
    if missing := list(studies.missing):
        more = f" and {len(missing) - NAMED} more, listed in {table}" if len(missing) > NAMED else ""
        print(f"not run yet: {', '.join(missing[:NAMED])}{more}")
    written = [table]
    if runs := _as_runs(shown):
        written.append(write_report(runs, out / "report.html", title=TITLE, sections=parts))
    try:
        written += pictures(shown, out)
        if (old := studies.paper_rates) is not None and old is not studies.shown:
            written += pictures(old.finished, out / "paper-rates")
    except MissingExtraError as error:
        print(f"no pictures: {error}")
    print("\n" + "\n".join(map(str, written)))
    return table


def summary(studies: Studies) -> dict[str, Any]:
    """Return the content of ``fig2.json``, from which README's tables are made."""
    finished = studies.shown.finished
    inception, tuned = network_of(finished, "inception"), tuned_baseline(finished)
    networks = {name: network for name in PAPER if (network := network_of(finished, name))}
    at_best = {name: network for name in ("bn-baseline", "bn-x5") if (network := seeds_of(finished, "best", name))}
    first = next(iter(finished.values()), None)
    return {
        "data": first.data if first else None,
        "environment": first.environment if first else None,
        "size": first.run.recipe.size if first else None,
        "epochs": inception.runs[0].run.recipe.epochs if inception else first.run.recipe.epochs if first else None,
        "rates": PAPERS_RATES if studies.shown is studies.paper_rates else "best of the sweep",
        "best rates": studies.main.plan.best,
        "networks": {name: _network(network, inception, tuned) for name, network in networks.items()},
        "at its best rate": {name: _network(network, inception, tuned) for name, network in at_best.items()},
        "best-tuned baseline": tuned[0] if tuned else None,
        "end slope": end_slope(inception.curve),
        "figure 3": figure3(finished)._asdict(),
        "claims": claims_table(studies).rows,
        "verdicts": [verdict._asdict() for verdict in _judged(studies, studies.shown)],
        "not yet run": list(studies.shown.plan.missing(finished)),
        "planned": list(studies.missing),
    }


def _network(network: Seeds, inception: Seeds, tuned: tuple[str, Seeds] | None) -> dict[str, Any]:
    top = best(network.curve)
    return {
        "seeds": len(network.runs),
        "rate": network.runs[0].run.recipe.rate,
        "maximum": None if top is None else top[1],
        "step": None if top is None else top[0],
        "maxima": [top[1] for curve in network.curves if (top := best(curve)) is not None],
        "final": network.final,
        "times fewer steps": times_fewer(inception.curve, network.curve),
        "times fewer than best-tuned": times_fewer(tuned[1].curve, network.curve) if tuned else None,
    }


def _as_runs(finished: Mapping[str, Finished]) -> list[Run]:
    """Return the networks of Figure 2 as runs for the HTML report, each with its mean curve over seeds."""
    runs = []
    for name, (network, _, _) in drawn(finished).items():
        first = network.runs[0]
        config = {**used(asdict(first.run.recipe)), "name": first.run.variant, "seed": f"{len(network.runs)} seeds"}
        end = {"accuracy": {"folded": statistics.fmean(network.final)}} if network.final else {}
        curves = {"val_top1": network.curve}
        runs.append(Run(name, {**config, "environment": first.environment}, end, curves, [], []))
    return runs


def claims_table(studies: Studies) -> Section:
    """Tabulate every claim with what the paper reports and with a verdict for each choice of rates."""
    main, old = studies.main, studies.paper_rates
    columns = {_at_r(main): {v.claim: v for v in _judged(studies, main)}}
    if old is not None:
        columns[PAPERS_RATES] = {v.claim: v for v in _judged(studies, old)}
    if any(run.startswith("best-") for run in (*main.plan.waiting, *(r.name for r in main.plan.runs))):
        columns["each at its best rate"] = {v.claim: v for v in best_against_best(main.finished)}
    rows = [["claim", "paper", *columns]]
    for claim, verdict in next(iter(columns.values())).items():
        rows.append([claim, verdict.paper, *(_cell(column.get(claim)) for column in columns.values())])
    text = (
        "A claim is checked for every seed. If it compares two networks, it is checked for every pair of a seed of one"
        ' network and a seed of the other; "by seeds" marks the values of these pairs. A claim is confirmed if it holds'
        " in all cases, refuted if it holds in none, and not resolved otherwise. If a network has fewer than three"
        ' seeds, "seen" and "not seen" replace "confirmed" and "refuted".'
    )
    if studies.dropout is not None and studies.dropout.finished:
        text += (
            " In the first column of verdicts, the verdicts on dropout come from separate runs, on fewer images and at"
            " another rate. Removing dropout counts as costing no accuracy if the mean accuracy falls by at most the"
            " noise of one run: half the width of the 95% prediction interval for one more run."
        )
    return Section("What the paper found", text, rows)


def _judged(studies: Studies, study: Study) -> list[Verdict]:
    """Return the verdicts of a study. The main study's verdicts on dropout come from the plan for dropout."""
    found = {v.claim: v for v in verdicts(study.plan, study.finished)}
    if study is studies.main and (dropped := studies.dropout) is not None:
        complete = not dropped.plan.missing(dropped.finished)
        found |= {v.claim: v for v in less_dropout(dropped.finished if complete else {})}
    return list(found.values())


def _at_r(main: Study) -> str:
    r = main.plan.best.get("inception")
    return "at Inception's best rate" if r is None else f"at r = {r:g}, 5 r, 30 r"


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    return f"{verdict.verdict}: {verdict.found}" if verdict.found else verdict.verdict


def sections(studies: Studies) -> list[Section]:
    """Return all tables that have rows."""
    main, old, dropped = studies.main, studies.paper_rates, studies.dropout
    parts = [claims_table(studies), *_tables(main.finished)]
    if dropped is not None:
        parts.append(dropout(dropped.finished))
    if old is not None:
        parts += [part._replace(heading=f"{part.heading}, {PAPERS_RATES}") for part in _tables(old.finished)]
    finished = {f"{prefix}{name}": one for prefix, study in studies.all.items() for name, one in study.finished.items()}
    parts.append(ran(finished))
    untrusted = [[name] for study in studies.all.values() for name in study.untrusted]
    text = (
        "These runs diverged within their first steps, and at least one of them has batch normalization, so faulty"
        " arithmetic on the device is the likely cause. The verdicts ignore these runs. Delete their result files and"
        " train them again."
    )
    parts.append(Section("Runs that do not count", text, [["run"], *untrusted]))
    parts.append(Section("Not run yet", "", [["run", ""], *(list(item) for item in studies.missing.items())]))
    return [part for part in parts if len(part.rows) > 1]


def _tables(finished: Mapping[str, Finished]) -> list[Section]:
    return [table(finished) for table in (figure3, on_the_way, best_rates, failures, rates, dropout, ablation)]


def pictures(finished: Mapping[str, Finished], out: Path) -> list[Path]:
    """Draw Figure 2, ``fig2-unnormalized.png`` and ``fig2-rates.png``, each only if it has runs; return the paths."""
    paths = []
    if any(one.run.group == "figures" for one in finished.values()):
        paths += [out / "fig2.png", out / "fig2.svg"]
    for path in paths:
        picture(partial(_figure2, finished), path)
    if unnormalized(finished):
        paths.append(out / "fig2-unnormalized.png")
        picture(partial(_unnormalized, finished), paths[-1])
    if any(one.run.group == "rates" for one in finished.values()):
        paths.append(out / "fig2-rates.png")
        picture(partial(_rates, finished), paths[-1])
    return paths


def _figure2(finished: Mapping[str, Finished], plt: Any) -> Any:
    """Draw the curves in two panels: all steps, and the first steps.

    The second panel ends after a quarter of the longest run, or at the end of the shortest run if that comes first.
    """
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for axis in axes:
        _curves(axis, finished)
    curves = [c for name in LINES for c in network_of(finished, name).curves if c]
    if curves:
        ends = [curve[-1][0] for curve in curves]
        first = min(*ends, max(ends) / 4)
        highest = max((value for curve in curves for step, value in curve if step <= first), default=1.0)
        axes[1].set(xlim=(0, first), ylim=(0, 1.05 * highest))
    axes[0].set_title("all steps")
    axes[1].set_title("the first steps")
    axes[0].set(ylabel="validation accuracy", xlim=(0, None), ylim=(0, None))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=7, fontsize=7)
    return figure


def _curves(axis: Any, finished: Mapping[str, Finished]) -> None:
    """Draw each network's curves, mean and per seed, and a dot where the mean reaches Inception's best accuracy."""
    target = best(network_of(finished, "inception").curve)
    if target is not None:
        axis.axhline(target[1], color="#8b8a84", lw=0.5, label=f"Inception's best, {target[1]:.1%}")
    for name, (network, tint, style) in drawn(finished).items():
        _line(axis, network, name, tint, style)
        reached = None if target is None else steps_to(network.curve, target[1])
        if reached is not None:
            axis.plot(reached, dict(network.curve)[reached], "o", ms=4, color=tint)
    _steps_and_percent(axis)


def drawn(finished: Mapping[str, Finished]) -> dict[str, tuple[Seeds, str, Any]]:
    """Return the paper's networks and the best unnormalized network, with their colors and line styles in Figure 2."""
    found: dict[str, tuple[Seeds, str, Any]] = {
        name: (network_of(finished, variant), tint, style) for variant, (tint, style, name) in LINES.items()
    }
    tuned = tuned_baseline(finished)
    if tuned is not None and tuned[0] != "inception":
        found[show_name(tuned[0])] = (tuned[1], *TUNED)
    return {name: one for name, one in found.items() if one[0].curve}


def _unnormalized(finished: Mapping[str, Finished], plt: Any) -> Any:
    figure, axis = plt.subplots(figsize=(5.6, 2.8))
    tuned, others = tuned_baseline(finished), cycle(OTHERS)
    known = {tuned[0] if tuned else "": TUNED, "inception": LINES["inception"][:2]}
    for name, network in unnormalized(finished).items():
        end = ", diverged" if network.diverged else ""
        _line(axis, network, f"{show_name(name)}{end}", *(known.get(name) or next(others)))
    axis.set(ylabel="validation accuracy", xlim=(0, None), ylim=(0, None))
    _steps_and_percent(axis)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper")
    return figure


def _line(axis: Any, network: Seeds, name: str, tint: str, style: Any) -> None:
    for curve in network.curves if len(network.runs) > 1 else ():
        axis.plot([step for step, _ in curve], [value for _, value in curve], color=tint, lw=0.5, alpha=0.5)
    steps, values = [step for step, _ in network.curve], [value for _, value in network.curve]
    axis.plot(steps, values, color=tint, ls=style, label=name)


def _steps_and_percent(axis: Any) -> None:
    axis.set_xlabel("training steps")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:g}K" if value else "0")
    axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")


def _rates(finished: Mapping[str, Finished], plt: Any) -> Any:
    figure, axis = plt.subplots(figsize=(4.4, 2.8))
    crossed = False
    drawn_as = {
        "inception": (color(False), label(False)),
        "bn-baseline": (color(True), label(True)),
        "bn-x5": (LINES["bn-x5-sigmoid"][0], SWEPT["bn-x5"]),
    }
    for variant, (tint, name) in drawn_as.items():
        runs = sorted(seeds_of(finished, "rates", variant).runs, key=lambda one: one.run.recipe.rate)
        points = [(one.run.recipe.rate, one.result["top1"] or 0.0) for one in runs]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", ms=3, color=tint, label=name)
        diverged = [one.run.recipe.rate for one in runs if one.diverged]
        crossed |= bool(diverged)
        axis.plot(diverged, [0.0] * len(diverged), "x", color=tint, clip_on=False)
    rates = sorted({one.run.recipe.rate for one in finished.values() if one.run.group == "rates"})
    axis.set(xscale="log", xlabel="learning rate (x: diverged)" if crossed else "learning rate")
    axis.set(ylabel="validation accuracy", ylim=(0, None))
    axis.set_xticks(rates, [f"{rate:g}" for rate in rates])
    if len(rates) > 8:
        axis.tick_params(axis="x", rotation=60)
    axis.minorticks_off()
    axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axis.legend()
    return figure
