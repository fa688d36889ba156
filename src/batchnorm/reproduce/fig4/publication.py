"""What the members' files amount to: Figure 4 as a table, and as numbers for README and other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...data.identity import check_same_data
from ...results import write_atomically, write_json
from .member_files import MemberFiles
from .table import CONTEXT, PAPER, figure4, markdown

KEPT = ("recipe", "weights", "crops", "environment")


def publish(members: Sequence[MemberFiles], out: Path) -> Path:
    """Write ``fig4.json`` and ``fig4.md`` from the members' files, print the table and return its path.

    Raises:
        ValueError: where two members were evaluated on different images.

    Paper: Fig. 4
    """
    missing = {files.name: why for files in members if (why := files.missing()) is not None}
    found = [files for files in members if files.name not in missing]
    results = {files.name: files.read() for files in found}
    check_same_data({name: result["data"] for name, result in results.items()})
    first = next(iter(results.values()), None)
    figure = figure4(found, first["recipe"]["size"]) if first else None
    images = f"{first['crops']['1']['examples']:,} images, {len(found)} network(s)" if first else ""
    text = markdown(figure, images, missing)
    contents: dict[str, Any] = {
        "data": first["data"] if first else None,
        "environment": first["environment"] if first else None,
        "members": {name: {key: result[key] for key in KEPT} for name, result in results.items()},
        "missing": missing,
    }
    if figure is not None:
        steps = [{**step._asdict(), "verdict": step.verdict, "says": str(step)} for step in figure.steps]
        contents |= {"rows": [row._asdict() for row in figure.rows], "steps": steps}
        contents |= {"paper": [row._asdict() for row in (*PAPER, *CONTEXT)]}
        contents |= {"disagreement": figure.disagreement, "ensemble": figure.together}
    write_json(out / "fig4.json", contents)
    table = out / "fig4.md"
    write_atomically(table, (text + "\n").encode())
    print(text, "", table, sep="\n")
    return table
