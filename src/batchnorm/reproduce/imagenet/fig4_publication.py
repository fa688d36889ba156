"""What the members' files amount to: Figure 4 as a table, and as numbers for README and other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...data.fingerprint import check_same_data
from ...results import write_atomically, write_json
from .fig4_table import CONTEXT, PAPER, alone, figure4, markdown, notes
from .member_files import MemberFiles

KEPT = ("recipe", "weights", "crops", "environment")


def publish(members: Sequence[MemberFiles], out: Path) -> Path:
    """Write ``fig4.json`` and ``fig4.md`` from the members' files, print the table and return its path.

    Raises:
        ValueError: where two members were evaluated on different images.

    Paper: Fig. 4
    """
    missing = {files.name: why for files in members if (why := files.missing()) is not None}
    told = {files.name: files.read() for files in members if files.result.is_file()}
    found = [files for files in members if files.name not in missing]
    results = {files.name: told[files.name] for files in found}
    check_same_data({name: result["data"] for name, result in told.items()})
    first = next(iter(told.values()), None)
    figure = figure4(found, told[found[0].name]["recipe"]["size"]) if found else None
    examples = next((one["examples"] for result in told.values() for one in result["crops"].values()), 0)
    images = f"{examples:,} images, {len(found) or len(told)} network(s)"
    rows, remarks = alone(told), notes(told)
    text = markdown(figure, rows, images, missing, remarks)
    contents: dict[str, Any] = {
        "data": first["data"] if first else None,
        "environment": first["environment"] if first else None,
        "members": {name: {key: result[key] for key in KEPT} for name, result in results.items()},
        "missing": missing,
    }
    if figure is not None:
        steps = [{**step._asdict(), "verdict": step.verdict, "says": str(step)} for step in figure.steps]
        contents |= {"rows": [row._asdict() for row in (*rows, *figure.rows)], "steps": steps}
        contents |= {"paper": [row._asdict() for row in (*PAPER, *CONTEXT)]}
        contents |= {"disagreement": figure.disagreement, "ensemble": figure.together}
    write_json(out / "fig4.json", contents)
    table = out / "fig4.md"
    write_atomically(table, (text + "\n").encode())
    print(text, "", table, sep="\n")
    return table
