"""A claim of the paper as a command: its options, and its result as a JSON file with a picture beside it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ..errors import SEED_MAX, above, at_least, between
from ..pictures import picture
from ..processes import map_on_cores
from ..report.summary import FIGURES
from ..results import check_writable, environment, write_json

Given = TypeVar("Given")
Found = TypeVar("Found")

# With batch normalization, without, and two more.
BLUE, ORANGE, GREEN, GREY = "#2a6fc9", "#d9622b", "#14835b", "#8b8a84"


# Options of several commands: numbers above 0, and counts.
POSITIVE = ("rate", "rates", "equal_rate", "std", "stds", "factors", "tail")
COUNTS = ("steps", "batch_steps", "bias_steps", "marks", "seeds", "examples", "processes")


@dataclass(frozen=True)
class Experiment:
    """The options that all commands for a claim have; a command has the name of its class."""

    processes: int | None = None
    """Processes; by default one per core."""
    out: Path = Path("runs")
    """Folder for the result, a JSON file, and its picture; the published ones are in results."""

    def __post_init__(self) -> None:
        given = vars(self)
        above(0, **{name: given[name] for name in POSITIVE if name in given})
        at_least(1, **{name: given[name] for name in COUNTS if name in given})
        between(0, SEED_MAX, seed=given.get("seed"))
        between(1, given.get("steps", 1), points=given.get("points"))

    @property
    def name(self) -> str:
        """The command's name, and that of its files."""
        return type(self).__name__.lower()

    def run(self, work: Callable[[Given], Found], jobs: Sequence[Given]) -> list[Found]:
        """Return ``[work(job) for job in jobs]``, computed by several processes.

        Raises:
            OSError: if the result could not be written afterwards.
        """
        check_writable(self.out / f"{self.name}.json")
        return map_on_cores(work, jobs, self.processes)


def publish(
    options: Experiment,
    claim: str,
    findings: Mapping[str, Any],
    verdicts: Mapping[str, bool],
    draw: Callable[[Any], Any],
) -> dict[str, Any]:
    """Write ``name.json`` and ``name.png`` into ``options.out``, print the finding and return what the file holds.

    The verdicts are statements that follow from the claim, and whether they hold here.
    """
    name, out = options.name, options.out
    given = {key: value for key, value in asdict(options).items() if key != "out"}
    # Whatever this process may use, each training ran on one thread: map_on_cores.
    result = {"claim": claim, "options": given, "environment": {**environment(), "threads": 1}, **findings}
    result["verdicts"] = dict(verdicts)
    path = write_json(out / f"{name}.json", result)
    picture(draw, out / f"{name}.png")
    measured = next(row.measured for row in FIGURES if row.command == f"reproduce {name}")
    print(f"the paper: {claim}\nmeasured: {measured(result)}")
    for statement, holds in verdicts.items():
        print(f"{'confirmed' if holds else 'refuted'}: {statement}")
    print(f"result: {path}\npicture: {out / f'{name}.png'}")
    return result


def mean(values: Sequence[float]) -> float:
    """Return the mean over seeds, as result files state it."""
    return round(statistics.fmean(values), 5)


def spread(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation over seeds; None if there is only one."""
    return round(statistics.stdev(values), 5) if len(values) > 1 else None


def colour(network: bool | str) -> str:
    """Return a network's colour in every picture, by its label or by whether it has batch normalization."""
    return BLUE if network in (True, label(True)) else ORANGE


def label(batch_norm: bool) -> str:
    """Return a network's name in every picture."""
    return "with BN" if batch_norm else "without BN"
