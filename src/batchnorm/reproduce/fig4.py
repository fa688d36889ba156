"""Figure 4: one network, many crops, many networks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import OmitArgPrefixes, arg

from ..results import environment, write_atomically, write_json
from ..train import Options, Stopped, train
from ..train.command import Overrides, resolve
from ..train.evaluation import open_runs
from ..train.recipe import MEMBERS, Recipe
from ..train.saved import SavedRun, open_run
from .fig4_table import figure4, markdown
from .member_files import MemberFiles

MemberName = Literal[
    "bn-x30-large-init", "bn-x30-dropout-5", "bn-x30-dropout-10", "bn-x30-per-activation",
    "bn-x30-large-init-dropout-5", "bn-x30-per-activation-dropout-10",
]  # fmt: skip
# What tells the members apart.
OWN = ("name", "seed", "dropout", "init_scale", "per_activation")


def fig4(
    options: Annotated[Options, OmitArgPrefixes, arg(name="run")],
    overrides: Annotated[Overrides, OmitArgPrefixes] = Overrides(),  # noqa: B008 - frozen
    runs: tuple[Path, ...] = (),
    only: tuple[MemberName, ...] = (),
) -> Path:
    """Train the six networks of Section 4.2.3, evaluate them with 1 and 144 crops, and write Figure 4 as a table.

    The work spreads over as many sittings as it needs: each member leaves a result file of its own, and the same
    command goes on where it stopped. What has not been run is listed as such.

    Args:
        options: where, on what, how often; out is runs/fig4 by default.
        overrides: fields to change in all six recipes, such as size, epochs, batch_size and rate.
        runs: finished runs to take instead of training the six.
        only: members to train in this sitting; all six by default.

    Raises:
        ValueError: where overrides would make the members alike, or runs and data do not fit.

    Paper: Sec. 4.2.3; Fig. 4
    """
    out = options.out or Path("runs/fig4")
    _check(overrides)
    recipes = {name: resolve(recipe, overrides) for name, recipe in MEMBERS.items()}
    taken = open_runs(runs) if runs else {}
    members = [MemberFiles(out, name) for name in taken or recipes]
    stopped: Stopped | None = None
    for files in members:
        allowed = stopped is None and (not only or files.name in only)
        try:
            saved = taken.get(files.name) or _trained(files, recipes[files.name], options, allowed=allowed)
        except Stopped as stop:
            stopped, saved = stop, None
        if saved is not None and not files.complete(saved.weights):
            files.evaluate(saved, options)
    table = _publish(out, members, str(options.data))
    if stopped is not None:
        raise KeyboardInterrupt(str(stopped)) from stopped
    return table


def _check(overrides: Recipe) -> None:
    given = [name for name in OWN if getattr(overrides, name) is not None]
    if given:
        raise ValueError(f"{', '.join(given)}: the six members differ in it, so it cannot be set for all of them")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise ValueError(
            "fig4 is one process: train each member with torchrun ... -m batchnorm train --recipe NAME, then give the"
            " runs with --runs"
        )


def _trained(files: MemberFiles, recipe: Recipe, options: Options, *, allowed: bool) -> SavedRun | None:
    """Return the member's finished run, trained now where that is allowed; None where there is nothing to evaluate."""
    if not (files.run / "recipe.json").exists() and files.complete():
        # Trained and evaluated on another machine, or its checkpoints were deleted.
        if Recipe.from_json(json.dumps(files.read()["recipe"])) != recipe:
            raise ValueError(f"{files.result} is of another recipe than asked for: choose another --out")
        return None
    if (files.run / "result.json").exists():
        saved = open_run(files.run)
        if saved.recipe == recipe:
            return saved if saved.weights else None
    if not allowed or train(recipe, replace(options, out=files.run)).diverged:
        return None
    return open_run(files.run)


def _publish(out: Path, members: Sequence[MemberFiles], data: str) -> Path:
    """Write ``fig4.json`` and ``fig4.md`` from the members' files, print the table and return its path."""
    found = [files for files in members if files.complete()]
    missing = {files.name: _why(files) for files in members if not files.complete()}
    results = {files.name: files.read() for files in found}
    figure = figure4(found, next(iter(results.values()))["recipe"]["size"]) if found else None
    images = next((f"{r['crops']['1']['examples']:,} images, {len(found)} network(s)" for r in results.values()), "")
    text = markdown(figure, images, missing)
    contents: dict[str, Any] = {
        "data": data,
        "environment": environment(),
        "members": {name: {key: r[key] for key in ("recipe", "weights", "crops")} for name, r in results.items()},
        "missing": missing,
    }
    if figure is not None:
        steps = [{**step._asdict(), "verdict": step.verdict} for step in figure.steps]
        contents |= {"rows": [row._asdict() for row in figure.rows], "steps": steps}
        contents |= {"disagreement": figure.disagreement, "ensemble": figure.together}
    write_json(out / "fig4.json", contents)
    write_atomically(out / "fig4.md", (text + "\n").encode())
    print(text)
    return out / "fig4.md"


def _why(files: MemberFiles) -> str:
    result = files.run / "result.json"
    diverged = result.exists() and json.loads(result.read_text())["diverged"]
    return "diverged in training" if diverged else "not yet run"
