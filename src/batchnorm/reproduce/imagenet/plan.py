"""The plans of Figures 2 to 4: TOML files that set the runs, their order, length and learning rates."""

from __future__ import annotations

import json
import math
import re
import statistics
import tomllib
from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from ...train import RECIPES, Recipe

Group = Literal["rates", "figures", "best", "dropout", "ablation"]
GROUPS = {"fig2": get_args(Group), "fig4": ("rates", "members")}  # the groups that a figure's plan may have
LIBRARY = ("fig2", "paper-rates", "dropout", "fig4", "fig4-paper-rates")  # the plans that --plan accepts by name
OWN = ("name", "recipe", "evaluate_every", "horizon", "end_rate", "times", "best_of")
SHARED = OWN[2:5]
EVERYWHERE = ("log_every", "checkpoint_every", "evaluate_batch")


@dataclass(frozen=True)
class PlannedRun:
    """One run: a recipe of the paper, with the length and the changes that the plan sets."""

    name: str
    group: str
    variant: str
    """the paper's recipe that the run derives from"""
    changed: dict[str, Any]
    """fields of the recipe that the run's own entry in the plan changes, with their values"""
    recipe: Recipe
    evaluate_every: int


@dataclass(frozen=True)
class Plan:
    """The runs of a plan, and the options that they share."""

    runs: tuple[PlannedRun, ...]
    """the runs whose rates are known, in order"""
    waiting: dict[str, str]
    """the names of runs whose rate depends on an unfinished sweep, each with that sweep"""
    best: dict[str, float]
    """the best rate of each recipe whose sweep is finished"""
    log_every: int
    checkpoint_every: int
    evaluate_batch: int

    def missing(self, finished: Container[str]) -> dict[str, str]:
        """Return the names of the unfinished runs, each with the reason."""
        unrun = {run.name: "not run yet" for run in self.runs if run.name not in finished}
        return unrun | {name: f"waits for {what}" for name, what in self.waiting.items()}

    def chosen(self, groups: Sequence[str], names: Sequence[str]) -> list[PlannedRun]:
        """Return the runs in these groups and with these names; an empty sequence allows all groups, or all names."""
        known = [*(run.name for run in self.runs), *self.waiting]
        unknown = [name for name in names if name not in known]
        if unknown:
            near = get_close_matches(unknown[0], known, 3)
            listed = f"did you mean {' or '.join(near)}?" if near else f"its runs are {', '.join(known)}"
            raise ValueError(f"the plan has no run named {', '.join(unknown)}; {listed}")
        early = [name for name in names if name in self.waiting]
        if early:
            raise ValueError(f"{early[0]} cannot run yet, because {self.waiting[early[0]]} is not finished")
        return [run for run in self.runs if (not groups or run.group in groups) and (not names or run.name in names)]


def read_plan(figure: Literal["fig2", "fig4"], path: Path | None = None, results: Path | None = None) -> Plan:
    """Read a plan for a figure from a TOML file; by default, from the library's plan for the figure.

    A run lasts ``horizon`` epochs, and its rate falls to the fraction ``end_rate`` of the initial rate. The run
    is validated every ``evaluate_every`` steps. These keys can be set in the run, in its group, or in the table
    ``train`` for all runs.

    Rates can come from the sweeps in the group ``rates``. ``rate = "best"`` is the rate with the highest accuracy in
    the sweep of the run's recipe, or of the recipe that ``best_of`` names. In a group with ``base = "inception"``, a
    run without ``rate`` has its recipe's rate times r / 0.0015, where r is the best rate of Inception's sweep and
    0.0015 is Inception's rate in the paper. ``times`` multiplies a rate that comes from a sweep.

    Args:
        figure: the figure, which decides the groups that the plan may have.
        path: the file, or the name of one of the library's plans.
        results: folder of the result files that decide which rate is the best.

    >>> run = next(run for run in read_plan("fig2", Path("paper-rates")).runs if run.variant == "bn-x5")
    >>> round(run.recipe.decay ** (run.recipe.epochs / run.recipe.decay_epochs), 6)  # fraction of the rate at the end
    0.003
    >>> read_plan("fig2").waiting["bn-x5-seed1"]
    'the sweep of inception'
    """
    named = path is None or (str(path) in LIBRARY and not path.exists())
    file = files(__package__).joinpath(f"{path or figure}.toml") if named else path
    assert file is not None
    if not file.is_file():
        raise FileNotFoundError(f"{path}: no such file; the library's plans are {', '.join(LIBRARY)}")
    where, text = str(file), file.read_bytes()
    try:
        content = tomllib.loads(text.decode())
        everywhere, training = content.get("recipe", {}), content["train"]
        _check_table("train", training, (*SHARED, *EVERYWHERE))
        groups = _known(content["group"], GROUPS[figure])
        names = [run["name"] for group in groups for run in group["runs"]]
        if len(set(names)) < len(names):
            raise ValueError(f"two runs are called {next(n for n in names if names.count(n) > 1)}: rename one of them")
        for run in (run for group in groups for run in group["runs"]):
            if run["recipe"] not in RECIPES:
                raise ValueError(f"{run['name']}: unknown recipe {run['recipe']!r}; choose from {', '.join(RECIPES)}")
        best = _best_rates([run for group in groups if group["name"] == "rates" for run in group["runs"]], results)
        runs, waiting = [], {}
        for group in groups:
            for run in group["runs"]:
                rate, sweep = _rate(group, run, best)
                if rate is None and sweep is not None:
                    waiting[run["name"]] = f"the sweep of {sweep}"
                    # Use the recipe's rate until the sweep is finished, so that `_planned` can check the other fields.
                    rate = RECIPES[run["recipe"]].rate
                planned = _planned(group["name"], {**training, **group, **run}, run, everywhere, rate)
                if planned.name not in waiting:
                    runs.append(planned)
        known = {recipe: rate for recipe, rate in best.items() if rate is not None}
        return Plan(tuple(runs), waiting, known, *(training[key] for key in EVERYWHERE))
    except KeyError as error:
        raise ValueError(f"{where}: the key {error} is missing") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error


def _best_rates(sweep: Sequence[dict[str, Any]], results: Path | None) -> dict[str, float | None]:
    """Return each recipe's best rate: the rate with the highest mean accuracy or, if several have it, the lowest.

    The best rate is None until all runs of the recipe are finished. A run that diverged counts as accuracy 0.
    """
    accuracies: dict[str, dict[float, list[float | None]]] = {}
    for run in sweep:
        file = None if results is None else results / f"{run['name']}.json"
        accuracy = None if file is None or not file.is_file() else _accuracy(file)
        of_rates = accuracies.setdefault(run["recipe"], {})
        of_rates.setdefault(run.get("rate", RECIPES[run["recipe"]].rate), []).append(accuracy)
    best: dict[str, float | None] = {}
    for recipe, of_rates in accuracies.items():
        means = {rate: statistics.fmean(a or 0.0 for a in found) for rate, found in of_rates.items()}
        complete = all(a is not None for found in of_rates.values() for a in found)
        best[recipe] = min(means, key=lambda rate: (-means[rate], rate)) if complete else None
    return best


def _accuracy(file: Path) -> float:
    try:
        return float(json.loads(file.read_text())["result"]["top1"] or 0.0)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{file} is not the result file of a run ({error!r}): choose another --results, or move the file away"
        ) from error


def _rate(group: dict[str, Any], run: dict[str, Any], best: dict[str, float | None]) -> tuple[float | None, str | None]:
    """Return a run's rate, and the recipe whose sweep sets the rate.

    The rate is None if that sweep is not finished, or if the run keeps its recipe's rate. The recipe is None if no
    sweep sets the run's rate.
    """
    sweep = group.get("base")
    if run.get("rate") == "best":
        sweep = run.get("best_of", run["recipe"])
    elif "rate" in run or sweep is None:
        if "times" in run:
            raise ValueError(
                f"{run['name']}: 'times' is only for rates from a sweep, but this run's rate is not from one: remove"
                " 'times'"
            )
        return run.get("rate"), None
    if sweep not in best:
        raise ValueError(
            f"{run['name']}: the rate comes from a sweep of {sweep}, but the group 'rates' has no runs of {sweep}"
        )
    found = best[sweep]
    if found is None:
        return None, sweep
    factor = 1.0 if run.get("rate") == "best" else RECIPES[run["recipe"]].rate / RECIPES[sweep].rate
    return float(f"{found * factor * run.get('times', 1):.9g}"), sweep


def _known(found: Sequence[dict[str, Any]], groups: Sequence[str]) -> Sequence[dict[str, Any]]:
    for group in found:
        _check_table("a group", group, tuple(group))
        if group["name"] not in groups:
            raise ValueError(f"unknown group {group['name']!r}; choose from {', '.join(groups)}")
        _check_table(f"group {group['name']}", group, ("name", "runs", "base", *SHARED))
    return found


def _check_table(where: str, table: Any, known: Sequence[str]) -> None:
    """Raise ValueError if ``table`` is not a dict, has unknown keys, or has counts that are not positive integers."""
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a TOML table, but is {table!r}")
    for key, value in table.items():
        if key not in known:
            raise ValueError(
                f"{where}: unknown key {key}; known keys are {', '.join(known)}. To change a field of the recipe,"
                " set it in [recipe] for all runs, or in a run"
            )
        if key in ("evaluate_every", *EVERYWHERE) and not (type(value) is int and value > 0):
            raise ValueError(f"{where}: {key}={value!r}: must be a positive integer")


def _planned(
    group: str, settings: dict[str, Any], run: dict[str, Any], everywhere: dict[str, Any], rate: float | None
) -> PlannedRun:
    name, horizon, end_rate = run["name"], settings["horizon"], settings["end_rate"]
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(
            f"{name!r} cannot be the name of a run, because a file gets the same name: use letters, digits, '_', '-'"
            " and '.', and do not start with '-' or '.'"
        )
    _check_table(name, {key: run[key] for key in OWN if key in run}, OWN)
    if not 0 < end_rate < 1 or not 0 < horizon < math.inf:
        raise ValueError(
            f"{name}: horizon={horizon} must be above 0 and finite, and end_rate={end_rate} must be between 0 and 1"
        )
    changed = {key: value for key, value in run.items() if key not in OWN}
    if {"epochs", "decay_epochs"} & {*changed, *everywhere}:
        raise ValueError(f"{name}: remove epochs and decay_epochs, which are computed from horizon and end_rate")
    if {"times", "rate"} & run.keys():
        changed["rate"] = rate
    own = changed if rate is None else {**changed, "rate": rate}
    values = {**asdict(RECIPES[run["recipe"]]), **everywhere, **own, "name": name, "epochs": float(horizon)}
    if not 0 < values["decay"] < 1:
        raise ValueError(f"{name}: decay={values['decay']}: must be between 0 and 1")
    values["decay_epochs"] = horizon * math.log(values["decay"]) / math.log(end_rate)
    if "end_rate" in run:
        changed["decay_epochs"] = values["decay_epochs"]
    recipe = Recipe.from_json(json.dumps(values))
    return PlannedRun(name, group, run["recipe"], changed, recipe, settings["evaluate_every"])
