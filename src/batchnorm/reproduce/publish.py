"""Options and output of the commands that test a claim of the paper: a JSON file, a picture and verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ..errors import SEED_MAX, above, at_least, between
from ..pictures import BLUE, ORANGE, picture
from ..processes import map_on_cores
from ..report.summary import FIGURES
from ..results import check_writable, environment, write_json

VERDICTS = {True: "confirmed", False: "refuted", None: "the runs were too short to tell"}
Given = TypeVar("Given")
Found = TypeVar("Found")


# In every command, the options in POSITIVE must be above 0, and the options in COUNTS must be at least 1.
POSITIVE = ("rate", "rates", "equal_rate", "std", "stds", "factors", "tail")
COUNTS = ("steps", "batch_steps", "bias_steps", "marks", "seeds", "examples", "processes")


@dataclass(frozen=True)
class Experiment:
    """The options shared by the commands that test a claim of the paper.

    A command's name is the name of its class in lower case.
    """

    processes: int | None = None
    """Number of processes; by default one per core."""
    out: Path = Path("runs")
    """Folder for the JSON result and its picture."""

    def __post_init__(self) -> None:
        given = vars(self)
        above(0, **{name: given[name] for name in POSITIVE if name in given})
        at_least(1, **{name: given[name] for name in COUNTS if name in given})
        between(0, SEED_MAX, seed=given.get("seed"))
        between(1, given.get("steps", 1), points=given.get("points"))

    @property
    def name(self) -> str:
        """The name of the command and of its files."""
        return type(self).__name__.lower()

    def run(self, work: Callable[[Given], Found], jobs: Sequence[Given]) -> list[Found]:
        """Return ``[work(job) for job in jobs]``, computed with :func:`map_on_cores`.

        Raises:
            OSError: if the result file cannot be written; raised before any work is done.
        """
        check_writable(self.out / f"{self.name}.json")
        return map_on_cores(work, jobs, self.processes)


def publish(
    options: Experiment,
    claim: str,
    findings: Mapping[str, Any],
    verdicts: Mapping[str, bool | None],
    draw: Callable[[dict[str, Any], Any], Any],
) -> dict[str, Any]:
    """Write ``name.json`` and ``name.png`` to ``options.out``, print the result and return the JSON file's content.

    The keys of ``verdicts`` are statements that follow from the claim. A value is True if the statement holds here,
    False if it does not, and None if the runs were too short to tell. ``draw`` takes the JSON content and
    ``matplotlib.pyplot``, and returns a figure.
    """
    name, out = options.name, options.out
    given = {key: value for key, value in asdict(options).items() if key != "out"}
    # Record one thread, because `map_on_cores` gives each run one thread, however many threads this process uses.
    result = {"claim": claim, "options": given, "environment": {**environment(), "threads": 1}, **findings}
    result["verdicts"] = dict(verdicts)
    path = write_json(out / f"{name}.json", result)
    picture(partial(draw, result), out / f"{name}.png")
    measured = next(row.measured for row in FIGURES if row.command == f"reproduce {name}")
    print(f"the paper: {claim}\nmeasured: {measured(result)}")
    for statement, holds in verdicts.items():
        print(f"{VERDICTS[holds]}: {statement}")
    print(f"result: {path}\npicture: {out / f'{name}.png'}")
    return result


def mean(values: Sequence[float]) -> float:
    """Return the mean over seeds, rounded for result files."""
    return round(statistics.fmean(values), 5)


def spread(values: Sequence[float]) -> float | None:
    """Return the sample standard deviation over seeds, or None if there is only one seed."""
    return round(statistics.stdev(values), 5) if len(values) > 1 else None


def color(network: bool | str) -> str:
    """Return a network's color in pictures; ``network`` is its label, or whether it has batch normalization."""
    return BLUE if network in (True, label(True)) else ORANGE


def label(batch_norm: bool) -> str:
    """Return a network's label in pictures and result files."""
    return "with BN" if batch_norm else "without BN"
