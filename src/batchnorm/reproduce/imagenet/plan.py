"""The plans of Figures 2 to 4: which runs, in which order, how long; files that are committed before they start."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, get_args

from ...train import RECIPES, Recipe

Group = Literal["figures", "rates", "dropout", "ablation"]
GROUPS = {"fig2": get_args(Group), "fig4": ("members",)}  # that each figure's plan may have
OWN = ("name", "recipe", "evaluate_every", "horizon", "end_rate")
EVERYWHERE = ("log_every", "checkpoint_every", "evaluate_batch")


@dataclass(frozen=True)
class PlannedRun:
    """One run: a recipe of the paper's, of another length, and what is changed in it."""

    name: str
    group: str
    variant: str
    """the paper's recipe that it derives from"""
    changed: dict[str, Any]
    """fields of the recipe that the plan sets for this run"""
    recipe: Recipe
    evaluate_every: int


@dataclass(frozen=True)
class Plan:
    """The runs in their order, and how they are logged."""

    runs: tuple[PlannedRun, ...]
    log_every: int
    checkpoint_every: int
    evaluate_batch: int

    def chosen(self, groups: Sequence[str], names: Sequence[str]) -> list[PlannedRun]:
        """Return the runs of these groups and of these names; all if neither is given."""
        unknown = [name for name in names if name not in {run.name for run in self.runs}]
        if unknown:
            listed = ", ".join(run.name for run in self.runs)
            raise ValueError(f"the plan has no run named {', '.join(unknown)}; it has {listed}")
        return [run for run in self.runs if (not groups or run.group in groups) and (not names or run.name in names)]


def read_plan(figure: Literal["fig2", "fig4"], path: Path | None = None) -> Plan:
    """Read a figure's plan, a TOML file; by default the one that comes with the library.

    A run lasts ``horizon`` epochs, and its rate falls to the share ``end_rate`` of the initial one: its own numbers,
    its group's, or those of the table ``train``.

    Args:
        figure: whose groups the plan may have.
        path: the file.

    >>> run = next(run for run in read_plan("fig2").runs if run.variant == "bn-x5")
    >>> round(run.recipe.decay ** (run.recipe.epochs / run.recipe.decay_epochs), 6)  # of the rate is left at the end
    0.003
    >>> len(read_plan("fig4").runs)
    6
    """
    file = path or files(__package__).joinpath(f"{figure}.toml")
    where, text = str(file), file.read_bytes()
    try:
        content = tomllib.loads(text.decode())
        everywhere, training = content.get("recipe", {}), content["train"]
        _check_table("train", training, (*OWN[2:], *EVERYWHERE))
        runs = [
            _planned(group["name"], {**training, **group, **run}, run, everywhere)
            for group in _known(content["group"], GROUPS[figure])
            for run in group["runs"]
        ]
        plan = Plan(tuple(runs), training["log_every"], training["checkpoint_every"], training["evaluate_batch"])
    except KeyError as error:
        raise ValueError(f"{where}: {error} is missing") from error
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from error
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        raise ValueError(f"{where}: two runs are called {next(n for n in names if names.count(n) > 1)}")
    return plan


def _known(found: Sequence[dict[str, Any]], groups: Sequence[str]) -> Sequence[dict[str, Any]]:
    for group in found:
        _check_table("a group", group, tuple(group))
        if group["name"] not in groups:
            raise ValueError(f"group {group['name']!r} is none of {', '.join(groups)}")
        _check_table(f"group {group['name']}", group, ("name", "runs", *OWN[2:]))
    return found


def _check_table(where: str, table: Any, known: Sequence[str]) -> None:
    """Refuse keys that nothing would read, and intervals that are none."""
    if not isinstance(table, dict):
        raise ValueError(f"{where} is {table!r}, not a table")
    for key, value in table.items():
        if key not in known:
            raise ValueError(f"{where}: {key} is none of {', '.join(known)}; what a recipe has is set for each run")
        if key in ("evaluate_every", *EVERYWHERE) and not (type(value) is int and value > 0):
            raise ValueError(f"{where}: {key}={value!r}, but it counts steps or images")


def _planned(group: str, settings: dict[str, Any], run: dict[str, Any], everywhere: dict[str, Any]) -> PlannedRun:
    name, horizon, end_rate = run["name"], settings["horizon"], settings["end_rate"]
    if run["recipe"] not in RECIPES:
        raise ValueError(f"{name}: there is no recipe {run['recipe']!r}; there are {', '.join(RECIPES)}")
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ValueError(f"{name!r} cannot be the name of a run: its files are called so")
    _check_table(name, {key: run[key] for key in OWN if key in run}, OWN)
    if not 0 < end_rate < 1 or not 0 < horizon < math.inf:
        raise ValueError(
            f"{name}: horizon={horizon} and end_rate={end_rate}, but a run has a length and a rate that falls"
        )
    changed = {key: value for key, value in run.items() if key not in OWN}
    if {"epochs", "decay_epochs"} & {*changed, *everywhere}:
        raise ValueError(f"{name}: epochs and decay_epochs follow from horizon and end_rate")
    values = {**asdict(RECIPES[run["recipe"]]), **everywhere, **changed, "name": name, "epochs": float(horizon)}
    if not 0 < values["decay"] < 1:
        raise ValueError(f"{name}: decay={values['decay']}, but the rate falls")
    values["decay_epochs"] = horizon * math.log(values["decay"]) / math.log(end_rate)
    if "end_rate" in run:
        changed["decay_epochs"] = values["decay_epochs"]
    recipe = Recipe.from_json(json.dumps(values))
    return PlannedRun(name, group, run["recipe"], changed, recipe, settings["evaluate_every"])


def differing(there: Recipe, here: Recipe) -> list[str]:
    """Return the fields in which two recipes differ, as sentences.

    >>> differing(Recipe(), Recipe(rate=0.1))
    ['rate is 0.0015 and 0.1']
    """
    pairs = {field.name: (getattr(there, field.name), getattr(here, field.name)) for field in fields(Recipe)}
    return [f"{name} is {first} and {second}" for name, (first, second) in pairs.items() if first != second]
