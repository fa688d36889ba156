"""Markdown tables of result files, for README and the documentation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Result = dict[str, Any]


class Row(NamedTuple):
    """A row: what is measured, the command, what the paper says, the result file, and a function that summarizes it."""

    what: str
    command: str
    paper: str
    file: str
    measured: Callable[[Result], str]


def read(results: Path, file: str) -> Result | None:
    """Return a result file's content, or None if the file does not exist."""
    path = results / file
    return json.loads(path.read_text()) if path.exists() else None


def cells(row: Row, results: Path) -> list[str]:
    """Return the measurement, linked to its result file, and the machine; without the file, "not yet run" and ""."""
    result = read(results, row.file)
    if result is None:
        return ["not yet run", ""]
    return [f"[{row.measured(result)}](results/{row.file})", machine(result)]


def machine(result: Result) -> str:
    """Return the hardware, the version of torch and, if the result has them, the numbers of repetitions."""
    return ", ".join(filter(None, (hardware(result), repetitions(result))))


def hardware(result: Result) -> str:
    """Return the GPU or the CPU, and the version of torch."""
    env = result.get("environment") or result["hardware"]
    name = env.get("gpu") or env.get("device") or f"{env['hardware']}, {env['cores']} cores"
    return f"{name}, torch {env['torch']}"


def repetitions(result: Result) -> str:
    """Return the number of seeds, rounds or pairs of timings as text, or an empty string if there is none.

    >>> repetitions({"options": {"seeds": 3}}), repetitions({"rounds": 1}), repetitions({"options": {"seed": 0}})
    ('3 seeds', '1 round', '1 seed')
    >>> repetitions({"rows": [{"pairs": 8}, {"pairs": 30}]})
    '8 to 30 pairs'
    """
    settings = {**result.get("settings", {}), **result.get("options", {})}
    for word in ("seeds", "rounds", "pairs"):
        found = {part[word] for part in (result, settings, *rows_of(result)) if isinstance(part.get(word), int)}
        if found:
            least, most = min(found), max(found)
            return f"{least} to {most} {word}" if least < most else f"{most} {word if most != 1 else word[:-1]}"
    return "1 seed" if "seed" in settings else ""


def rows_of(result: Result) -> list[Result]:
    """Return a result's rows or, if it has some, its members or networks."""
    rows = result.get("members") or result.get("rows") or result.get("networks") or []
    return list(rows.values()) if isinstance(rows, dict) else rows


def table(rows: list[list[str]]) -> str:
    """Return rows as a Markdown table; the first row is the header.

    >>> print(table([["a", "b"], ["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
