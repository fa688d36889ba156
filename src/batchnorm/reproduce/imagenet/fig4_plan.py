"""The plan of Figure 4, fig4.toml."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from . import plan
from .plan import Plan


def read_plan(path: Path | None = None) -> Plan:
    """Read a plan of members, by default the one that comes with the library.

    Raises:
        FileNotFoundError: where there is none.
        ValueError: where it is not a plan; it says why.

    >>> len(read_plan().runs)
    6

    Beyond the paper: declared before the runs.
    """
    return plan.read_plan(path or files(__package__).joinpath("fig4.toml"), ("members",))
