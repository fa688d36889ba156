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
    """Return two cells: the measurement, linked to its result file, and the machine; or "not yet run" and ""."""
    result = read(results, row.file)
    if result is None:
        return ["not yet run", ""]
    return [f"[{row.measured(result)}](results/{row.file})", machine(result)]


def machine(result: Result) -> str:
    """Return the hardware, the version of torch and, if the result has one, the number of seeds or of rounds."""
    env = result.get("environment") or result["hardware"]
    name = env.get("gpu") or env.get("device") or f"{env['hardware']}, {env['cores']} cores"
    n = _repetitions(result)
    return f"{name}, torch {env['torch']}" + (f", {n}" if n else "")


def _repetitions(result: Result) -> str:
    """Return the number of seeds or of rounds as text, "up to" the highest if networks differ, or an empty string.

    >>> _repetitions({"options": {"seeds": 3}}), _repetitions({"rounds": 1}), _repetitions({"options": {"seed": 0}})
    ('3 seeds', '1 round', '1 seed')
    """
    networks, options = result.get("networks"), result.get("options", {})
    parts = [result, options, *(networks.values() if isinstance(networks, dict) else ())]
    for word in ("seeds", "rounds"):
        counts = {part[word] for part in parts if isinstance(part.get(word), int)}
        if counts:
            n = max(counts)
            return f"{'up to ' if len(counts) > 1 else ''}{n} {word if n > 1 else word[:-1]}"
    return "1 seed" if "seed" in options else ""


def table(rows: list[list[str]]) -> str:
    """Return rows as a Markdown table; the first row is the header.

    >>> print(table([["a", "b"], ["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])
