"""``batchnorm compare``: compare your network without and with batch normalization, each version at its best rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm as TorchBatchNorm

from ..arguments import OmitArgPrefixes, arg
from ..data.image_sources import describe_data, training_splits
from ..errors import above, at_least
from ..jobs import run_side_by_side
from ..report.page import write_report
from ..report.runs import Run
from ..report.train_runs import used
from ..results import check_writable, environment, read_json, write_result
from ..train import RECIPES, Options, Recipe, train
from ..train.distributed import find_device
from ..train.final_network import folded_network
from ..train.metrics import curve, read
from ..train.own_network import Change
from ..train.resume import claim_folder
from ..train.train_command import RecipeName, check_before_training, make_overrides, resolve
from .imagenet.curves import STUDENT, best, mean_curve, times_fewer
from .imagenet.fig2_tables import Section, markdown
from .imagenet.sharing import checked_gpu
from .publish import label

QUESTION = "validation accuracy without and with batch normalization, each network at its best learning rate"
VARIED = ("name", "normalize", "rate", "seed")
RULE = (
    "Each network is compared at the rate with its highest mean accuracy over seeds, where accuracy is the final"
    " validation accuracy of the folded network. A run that diverged counts as 0%. The verdict is inconclusive if the"
    " 95% interval of the difference of means contains 0. Intervals combine the spread of the seeds (Student's t) with"
    " the sampling error of the validation images."
)


if TYPE_CHECKING:
    _Overrides = Recipe
else:
    _Overrides = make_overrides("rate", "seed", "normalize", "start", "freeze_statistics")


def compare(
    options: Annotated[Options, OmitArgPrefixes, arg(name="run")],
    recipe: RecipeName = "bn-x5",
    overrides: Annotated[_Overrides, OmitArgPrefixes] = _Overrides(),  # noqa: B008 - frozen
    rates: tuple[float, ...] = (0.003, 0.01, 0.03, 0.1),
    seeds: int = 3,
    jobs: int = 1,
    minutes: float | None = None,
) -> None:
    """Train your network without and with batch normalization at several rates, and compare both at their best rates.

    If your network has batch normalization, it is compared with a copy from which batch normalization is
    removed. If it has none, it is compared with a copy into which batch normalization is inserted.

    Each run has its own folder in --out. The default --out is runs/compare-NAME, where NAME is the value of --name or,
    by default, is made from --network. At the end, report.html and compare.json are written to --out. After an
    interruption, run the same command again to resume. If you add rates or seeds, only the missing runs are trained.

    Args:
        options: data, folder, device and how often to report.
        recipe: the paper's recipe that sets the schedule and the augmentation.
        overrides: fields of the recipe to change.
        rates: learning rates to try.
        seeds: number of runs of each network at each rate, at least 2.
        jobs: number of runs to train in parallel.
        minutes: save and stop after this many minutes.

    Paper: Fig. 2, for a network of your own
    """
    above(0, rates=rates)
    at_least(2, seeds=seeds)
    at_least(1, jobs=jobs)
    at_least(0, minutes=minutes)
    if not overrides.factory:
        raise ValueError("nothing to compare: name your own network with --network FILE.py:FUNCTION")
    chosen = resolve(RECIPES[recipe], overrides)
    out = options.out or Path("runs") / f"compare-{chosen.name}"
    on_gpu = find_device(options.device).type == "cuda"
    classes, note = check_before_training(chosen, options)
    if note is not None:
        print(note)
    changes = _changes(chosen, classes)
    splits = training_splits(options.data, chosen.validate)
    data = describe_data(options.data, splits)
    check_writable(out / "compare.json")
    images = data[splits[1]]
    planned = chosen.steps(-(-data[splits[0]] // chosen.batch_size))
    steps = planned if options.max_steps is None else min(planned, options.max_steps)

    def job(batch_norm: bool, rate: float, seed: int) -> TrainingJob:
        name = f"{label(batch_norm).replace(' ', '-').lower()}-rate-{_shown(rate)}-seed-{seed}"
        one = replace(chosen, name=name, normalize=changes[batch_norm], rate=rate, seed=seed)
        return TrainingJob(one, replace(options, out=out / name), steps, jobs)

    networks = {
        (kind, rate): SeedRuns(kind, rate, [job(kind, rate, seed) for seed in range(seeds)], images)
        for rate in rates
        for kind in changes
    }
    trainings = [job for network in networks.values() for job in network.jobs]
    # Before any training, raise an error if the folder of a run has other settings or data.
    for one in trainings:
        if (one.folder / "recipe.json").exists():
            claim_folder(one.folder, one.recipe, data, planned_steps=steps)
    waiting = [one for one in trainings if not one.finished()]
    print(
        f"{chosen.factory} without batch normalization (--normalize {changes[False]}) and with it"
        f" (--normalize {changes[True]}):"
        f" {data[splits[0]]:,} training images of {classes:,} classes, {images:,} validation images,"
        f" {len(trainings)} runs of {steps:,} steps in {out}, {len(waiting)} of them unfinished",
        flush=True,
    )
    together = min(jobs, len(waiting)) if on_gpu else 1
    with checked_gpu(together, [one.recipe for one in waiting], options.evaluate_batch, options.precision):
        complete = run_side_by_side(waiting, jobs=jobs, minutes=minutes)
    if not complete:
        raise KeyboardInterrupt("stopped; run the same command again to resume")
    publish(networks, out, network=chosen.factory, changes={label(k): v for k, v in changes.items()}, data=data)


def _changes(recipe: Recipe, classes: int) -> dict[bool, Change]:
    """Return the changes that turn the recipe's network into the networks without and with batch normalization.

    Both networks are built and folded, to find problems before training.
    """
    has = any(isinstance(m, TorchBatchNorm) for m in recipe.network(classes).modules())
    changes: dict[bool, Change] = {False: "remove", True: "as-is"} if has else {False: "as-is", True: "insert"}
    for change in changes.values():
        folded_network(replace(recipe, normalize=change).network(classes).eval(), recipe.size)
    return changes


@dataclass(frozen=True)
class TrainingJob:
    """One run of the comparison, in its own folder."""

    recipe: Recipe
    options: Options
    steps: int
    neighbors: int
    """maximum number of runs that train at the same time, including this run"""

    @property
    def name(self) -> str:
        """The run's name."""
        return self.recipe.name

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.options.folder(self.recipe)

    def finished(self) -> bool:
        """Return whether the run has diverged or reached its last step."""
        path = self.folder / "result.json"
        result = read_json(path) if path.is_file() else {"diverged": False, "steps": None}
        return bool(result["diverged"] or result["steps"] == self.steps)

    def __call__(self) -> None:
        """Train, or resume training."""
        torch.set_num_threads(max(1, torch.get_num_threads() // self.neighbors))
        train(self.recipe, self.options)


@dataclass(frozen=True)
class SeedRuns:
    """The runs of one network at one rate, with different seeds.

    Paper: Fig. 2
    """

    batch_norm: bool
    rate: float
    jobs: Sequence[TrainingJob]
    images: int
    """number of validation images"""

    @cached_property
    def accuracies(self) -> list[float]:
        """The final validation accuracy of each seed's folded network, or 0 for a run that diverged."""
        return [read_json(job.folder / "result.json")["top1"] or 0.0 for job in self.jobs]

    @property
    def mean(self) -> float:
        """The mean accuracy over seeds."""
        return statistics.fmean(self.accuracies)

    @cached_property
    def run(self) -> Run:
        """The mean accuracy curve over seeds, with its 95% interval as a band, for the HTML page."""
        curves = [dict(curve(read(job.folder / "metrics.jsonl"))) for job in self.jobs]
        middle = mean_curve([list(one.items()) for one in curves])
        edges = [(step, interval([one[step] for one in curves], self.images)) for step, _ in middle]
        name = f"{label(self.batch_norm)}, rate {_shown(self.rate)}"
        config = {
            **used(asdict(self.jobs[0].recipe)),
            "name": name,
            "seed": f"{len(self.jobs)} seeds",
            "environment": environment(),
        }
        low, high = ([(step, edge[k]) for step, edge in edges] for k in (0, 1))
        end = {"accuracy": {"folded": self.mean}}
        return Run(name, config, end, {"val_top1": middle}, [], [], {"val_top1": {"low": low, "high": high}})


def interval(values: Sequence[float], images: int) -> tuple[float, float]:
    """Return the 95% interval of a mean accuracy over seeds, measured on ``images`` validation images.

    >>> [round(edge, 3) for edge in interval([0.48, 0.50, 0.52], 10_000)]
    [0.449, 0.551]
    """
    mean, half = statistics.fmean(values), _half_width([values], images)
    return max(mean - half, 0.0), min(mean + half, 1.0)


def difference(before: Sequence[float], after: Sequence[float], images: int) -> tuple[float, float, float]:
    """Return the mean of ``after`` minus the mean of ``before``, and the ends of the difference's 95% interval.

    >>> [round(value, 3) for value in difference([0.5, 0.5, 0.5], [0.75, 0.75, 0.75], 100)]
    [0.25, 0.12, 0.38]
    """
    gap, half = statistics.fmean(after) - statistics.fmean(before), _half_width([before, after], images)
    return gap, max(gap - half, -1.0), min(gap + half, 1.0)


def _half_width(groups: Sequence[Sequence[float]], images: int) -> float:
    """Return half the width of the 95% interval of a mean accuracy, or of the difference of two mean accuracies.

    ``groups`` holds the accuracies of one or two networks, with one accuracy per seed. The width combines Welch's t
    over seeds with the sampling error of the images.
    """
    means = [statistics.fmean(values) for values in groups]
    of_images = 1.96 * math.sqrt(sum(p * (1 - p) for p in means) / images)
    parts = [(statistics.variance(values) / len(values), len(values) - 1) for values in groups]
    total = sum(part for part, _ in parts)
    if not total:
        return of_images
    freedom = total**2 / sum(part**2 / n for part, n in parts)
    student = STUDENT[min(int(freedom + 1e-9), len(STUDENT)) - 1]
    return math.hypot(student * math.sqrt(total), of_images)


def verdict(gap: float, low: float, high: float) -> str:
    """Return the verdict as text: batch normalization helps or hurts, or the result is inconclusive.

    >>> verdict(0.02, -0.01, 0.05)
    'inconclusive: the difference is +2.0 points, and its 95% interval, -1.0 to +5.0, contains 0'
    """
    told = f"the difference is {100 * gap:+.1f} points"
    ends = f"{100 * low:+.1f} to {100 * high:+.1f}"
    if low <= 0 <= high:
        return f"inconclusive: {told}, and its 95% interval, {ends}, contains 0"
    return f"batch normalization {'helps' if gap > 0 else 'hurts'}: {told} (95% interval {ends})"


def publish(networks: Mapping[tuple[bool, float], SeedRuns], out: Path, **told: Any) -> None:
    """Compare the two networks at their best rates, write compare.json and report.html, and print the result.

    Args:
        networks: the runs of each network at each rate; a key is (whether the network has batch normalization, rate).
        out: folder for the files.
        told: further entries of compare.json; ``network``, the name of the network, is required.

    Paper: Figs. 2, 3
    """
    plain, normalized = (
        max((seeds for (kind, _), seeds in networks.items() if kind == wanted), key=lambda seeds: seeds.mean)
        for wanted in (False, True)
    )
    gap = difference(plain.accuracies, normalized.accuracies, plain.images)
    found, top = verdict(*gap), best(plain.run.accuracy)
    times = times_fewer(plain.run.accuracy, normalized.run.accuracy)
    parts = [
        Section("Verdict", f"{found[0].upper()}{found[1:]}. {_steps(times, top)} {RULE}", _best(plain, normalized)),
        Section("Every rate", _edges(networks, plain, normalized), _rates(networks)),
    ]
    shared = {key: value for key, value in used(asdict(plain.jobs[0].recipe)).items() if key not in VARIED}
    write_result(
        out / "compare.json",
        QUESTION,
        **told,
        recipe=shared,
        seeds=[job.recipe.seed for job in plain.jobs],
        rates=[
            {"network": label(kind), "rate": rate, "mean": seeds.mean, "accuracies": seeds.accuracies}
            for (kind, rate), seeds in networks.items()
        ],
        best_rates={"without BN": plain.rate, "with BN": normalized.rate},
        difference=dict(zip(("mean", "low", "high"), gap, strict=True)),
        times_fewer_steps=times,
        verdict=found,
        rule=RULE,
    )
    title = f"{told['network']}: {found.partition(':')[0]}"
    page = write_report([plain.run, normalized.run], out / "report.html", title=title, sections=parts)
    print(markdown(parts), f"result: {out / 'compare.json'}\npage: {page}", sep="\n\n")


def _best(*networks: SeedRuns) -> list[list[str]]:
    rows = [["network", "accuracy", "95% interval", "seeds"]]
    for seeds in networks:
        low, high = interval(seeds.accuracies, seeds.images)
        rows.append([seeds.run.name, f"{seeds.mean:.1%}", f"{low:.1%} to {high:.1%}", _listed(seeds.accuracies)])
    return rows


def _rates(networks: Mapping[tuple[bool, float], SeedRuns]) -> list[list[str]]:
    cells = {key: f"{seeds.mean:.1%} ({_listed(seeds.accuracies)})" for key, seeds in networks.items()}
    rates = dict.fromkeys(rate for _, rate in networks)
    return [["rate", label(False), label(True)], *([_shown(r), cells[False, r], cells[True, r]] for r in rates)]


def _shown(rate: float) -> str:
    """Return a rate as text; no two rates have the same text, because it is part of the names of folders.

    >>> _shown(0.10), _shown(0.1234567)
    ('0.1', '0.1234567')
    """
    return short if float(short := f"{rate:g}") == rate else repr(rate)


def _listed(accuracies: Sequence[float]) -> str:
    return ", ".join(f"{accuracy:.1%}" for accuracy in accuracies)


def _steps(times: float | None, top: tuple[int, float] | None) -> str:
    if top is None:
        return (
            "Without batch normalization, at least one run diverged before its first validation, so the numbers of"
            " steps cannot be compared."
        )
    # Say how the curves were measured: the final accuracies in the verdict use population statistics instead of running
    # averages, so they may be higher than every point of the curves.
    during = (
        "In the validations during training, which use running averages, the best mean accuracy without BN is"
        f" {top[1]:.1%}"
    )
    if times is None:
        return f"{during}; with BN, the mean accuracy never reaches this value."
    how = f"in {times:.1f} times fewer steps" if times > 1 else "but not in fewer steps"
    return f"{during}; with BN, this accuracy is also reached, {how}."


def _edges(networks: Mapping[tuple[bool, float], SeedRuns], *chosen: SeedRuns) -> str:
    """Explain the table of rates, and warn if a better rate may lie outside the sweep."""
    rates = sorted({rate for _, rate in networks})
    edges = [seeds.run.name for seeds in chosen if seeds.rate in (rates[0], rates[-1])]
    note = f" The best rate is at an end of the sweep ({'; '.join(edges)}): extend --rates." if edges else ""
    return f"Validation accuracy at the end of training: the mean and, in parentheses, the value of each seed.{note}"
