"""The plan of the runs: which, in which order, how long; a file that is committed before they start."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.resources.abc import Traversable
from typing import Any

from ...train import RECIPES, Recipe

PAPER_EPOCHS = RECIPES["inception"].epochs
OWN = ("name", "recipe", "evaluate_every")


@dataclass(frozen=True)
class PlannedRun:
    """Say what one run is: a recipe of the paper's, in compressed time, and what is changed in it.

    Paper: Sec. 4.2
    """

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
    """Hold the runs in their order, and how they are logged.

    Paper: Sec. 4.2
    """

    runs: tuple[PlannedRun, ...]
    log_every: int
    checkpoint_every: int
    evaluate_batch: int

    def chosen(self, groups: Sequence[str], names: Sequence[str]) -> list[PlannedRun]:
        """Return the runs of these groups and of these names, all where neither is given.

        Raises:
            ValueError: where a name is not in the plan.
        """
        unknown = [name for name in names if name not in {run.name for run in self.runs}]
        if unknown:
            listed = ", ".join(run.name for run in self.runs)
            raise ValueError(f"the plan has no run named {', '.join(unknown)}; it has {listed}")
        return [run for run in self.runs if (not groups or run.group in groups) and (not names or run.name in names)]


def read_plan(path: Traversable, groups: Sequence[str]) -> Plan:
    """Read a plan, a TOML file.

    Recipes are in the paper's time, what the plan changes in them too: ``epochs`` and ``decay_epochs`` are multiplied
    by horizon / 775 of their group.

    Args:
        path: the file.
        groups: names that its groups may have.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: where it is not a plan; it says why.

    Beyond the paper: declared before the runs.
    """
    where, text = str(path), path.read_text("utf-8")
    try:
        content = tomllib.loads(text)
        everywhere, training = content.get("recipe", {}), content["train"]
        runs = [
            _planned(group, run, everywhere, training["evaluate_every"])
            for group in _known(content["group"], groups)
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
        if group["name"] not in groups:
            raise ValueError(f"group {group['name']!r} is none of {', '.join(groups)}")
    return found


def _planned(group: dict[str, Any], run: dict[str, Any], everywhere: dict[str, Any], evaluate_every: int) -> PlannedRun:
    if run["recipe"] not in RECIPES:
        raise ValueError(f"{run['name']}: there is no recipe {run['recipe']!r}")
    base, compressed = RECIPES[run["recipe"]], group["horizon"] / PAPER_EPOCHS
    changed = {key: value for key, value in run.items() if key not in OWN}
    values = {**asdict(base), **everywhere, **changed, "name": run["name"]}
    values |= {key: values[key] * compressed for key in ("epochs", "decay_epochs")}
    return PlannedRun(
        run["name"],
        group["name"],
        run["recipe"],
        changed,
        Recipe.from_json(json.dumps(values)),
        run.get("evaluate_every", evaluate_every),
    )


def differing(there: Recipe, here: Recipe) -> list[str]:
    """Say in which fields two recipes differ.

    >>> differing(Recipe(), Recipe(rate=0.1))
    ['rate is 0.0015 and 0.1']

    Beyond the paper: results are not mixed.
    """
    pairs = {field.name: (getattr(there, field.name), getattr(here, field.name)) for field in fields(Recipe)}
    return [f"{name} is {first} and {second}" for name, (first, second) in pairs.items() if first != second]
