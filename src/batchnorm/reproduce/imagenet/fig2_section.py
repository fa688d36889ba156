"""A table with a heading, and how numbers are written in one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .result_files import Finished

Rows = list[list[str]]


class Section(NamedTuple):
    """Hold a table with what is to be said above it; the first row is the header.

    Beyond the paper: how results are shown.
    """

    heading: str
    text: str
    rows: Rows


def markdown(parts: Sequence[Section]) -> str:
    """Return the tables as Markdown.

    >>> print(markdown([Section("Heading", "Text.", [["a", "b"], ["1", "2"]])]))
    ## Heading
    <BLANKLINE>
    Text.
    <BLANKLINE>
    | a | b |
    |---|---|
    | 1 | 2 |

    Beyond the paper: how results are shown.
    """
    blocks = []
    for part in parts:
        table = [f"| {' | '.join(row)} |" for row in part.rows]
        table.insert(1, "|---" * len(part.rows[0]) + "|")
        blocks += [f"## {part.heading}", *([part.text] if part.text else []), "\n".join(table)]
    return "\n\n".join(blocks)


def show_accuracy(one: Finished | None, key: str = "top1") -> str:
    """Return a run's accuracy at the end, or what there is instead."""
    if one is None:
        return "not yet run"
    if one.diverged:
        return f"diverged by step {one.result['steps']:,}"
    return f"{one.result[key]:.1%}"


def show_steps(value: int | None) -> str:
    """Return a number of steps."""
    return "never" if value is None else f"{value:,}"


def show_times(value: float | None) -> str:
    """Return a ratio of steps."""
    return "-" if value is None else f"{value:.1f}"


def show_name(name: str) -> str:
    """Return a network's name as the paper writes it.

    >>> show_name("inception, rate 0.015")
    'Inception, rate 0.015'
    """
    return name[:1].upper() + name[1:]
