"""``batchnorm report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from ..arguments import Positional, arg
from ..results import check_writable
from .page import write_report
from .runs import read_runs


@dataclass(frozen=True)
class Report:
    """Compare runs on one self-contained page of HTML."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN...", help_behavior_hint="(one or more)")]
    """folders of runs, or folders that hold them"""
    out: Path = Path("report.html")
    """the page to write"""


def report(options: Report) -> Path:
    """Read the runs, write the page and return its path.

    Raises:
        FileNotFoundError: if a folder holds no run.
        ValueError: if a file is not a run's, with its name.
    """
    check_writable(options.out)
    runs = read_runs(options.runs)
    page = write_report(runs, options.out)
    for run in runs:
        print(run.line())
    print(f"report: {page}")
    return page
