"""The plan of Figures 2 and 3, fig2.toml."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Literal, get_args

from . import plan
from .plan import Plan

Group = Literal["figures", "rates", "dropout", "ablation"]


def read_plan(path: Path | None = None) -> Plan:
    """Read a plan, by default the one that comes with the library.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: where it is not a plan; it says why.

    >>> run = next(run for run in read_plan().runs if run.variant == "bn-x5")
    >>> round(run.recipe.decay ** (run.recipe.epochs / run.recipe.decay_epochs), 6)  # of the rate is left at the end
    0.003

    Beyond the paper: declared before the runs.
    """
    return plan.read_plan(path or files(__package__).joinpath("fig2.toml"), get_args(Group))
