"""``batchnorm report``: one self-contained page of HTML that compares runs."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Annotated, Any

import torch

from ..arguments import Positional, arg
from ..results import check_writable, write_atomically
from .figure1 import paper_versus_here, steps_to
from .runs import ACCURACIES, TOP1, Curve, Run, read_runs

PageSection = tuple[str, str, Sequence[Sequence[str]]]
# The maximum number of percentile values that the page holds per run. It suffices for 125 records of three layers, with
# 100 units per layer and three percentiles per unit. If fewer than ten records fit, the page exceeds the maximum and
# holds up to ten.
BUDGET = 125 * 3 * 3 * 100

MEASURES = (
    {
        "key": "z",
        "name": "drift of the nonlinearity's inputs",
        "text": "How far the distribution of a unit's input moved since the previous record, relative to the width of"
        " the distribution; median over the layer's units. With batch normalization, only beta and gamma set the mean"
        " and variance of these inputs.",
    },
    {
        "key": "x",
        "name": "drift of x = Wu, before normalization",
        "text": "How far the distribution of a unit's x = Wu, the input of batch normalization, moved since the"
        " previous record, relative to the width of the distribution; median over the layer's units. Nothing fixes the"
        " mean and variance of x.",
    },
    {
        "key": "gradient",
        "name": "change of a layer's gradient",
        "text": "||g' - g|| / ||g||, where g is a layer's gradient on a mini-batch, and g' is its gradient on the same"
        " mini-batch after a training step that updates only the layers below. This ratio shows how much the internal"
        " covariate shift of Section 2 affects the layer.",
    },
)


@dataclass(frozen=True)
class Report:
    """Compare runs on one self-contained page of HTML."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN...", help_behavior_hint="(one or more)")]
    """folders of runs, or folders that contain such folders"""
    out: Path = Path("report.html")
    """the page to write"""


def report(options: Report) -> Path:
    """Read the runs, write the page and return its path.

    Raises:
        FileNotFoundError: if a folder holds no run.
        ValueError: if a file of a run is malformed; the message names the file.
    """
    check_writable(options.out)
    runs = read_runs(options.runs)
    page = write_report(runs, options.out)
    for run in runs:
        print(run.line())
    print(f"report: {page}")
    return page


def write_report(
    runs: Sequence[Run], path: Path, *, title: str | None = None, sections: Sequence[PageSection] | None = None
) -> Path:
    """Write the page for these runs to ``path``, as a single file that loads no other files.

    Args:
        runs: the runs to compare.
        path: the file to write.
        title: the page's title; by default, a title made from the runs.
        sections: headings, texts and tables about the runs; by default, Section 4.1's claims.
    """
    # Replace lone surrogates, which come from undecodable file names or JSON strings: UTF-8 cannot encode them.
    write_atomically(path, render(runs, title=title, sections=sections).encode(errors="replace"))
    return path


def render(runs: Sequence[Run], *, title: str | None = None, sections: Sequence[PageSection] | None = None) -> str:
    """Return the page's HTML."""
    assets = files(__package__).joinpath("assets")
    text = {name: assets.joinpath(name).read_text("utf-8") for name in ("page.html", "page.css", "chart.js", "page.js")}
    style = "\n" + text["page.css"]
    script = "\n" + text["chart.js"] + text["page.js"].replace('"use strict";\n', "", 1)
    return Template(text["page.html"]).substitute(
        title=escape(title or _title(runs)),
        subtitle=escape(_subtitle(runs)),
        figures="".join(_figure(k, run) for k, run in enumerate(runs)),
        percentiles=escape(_percentiles(runs)),
        tables=_tables(runs, _section41(runs) if sections is None else sections),
        footer=escape(_footer(runs)),
        css=style,
        css_hash=_hash(style),
        data=_inert(_page_data(runs)),
        script=script,
        script_hash=_hash(script),
    )


def _hash(text: str) -> str:
    """Return the hash of an element's content for the page's Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inert(data: Any) -> str:
    """Return JSON in which <, > and & are escaped, because a run's name may contain "</script>"."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&"})


def _percentiles(runs: Sequence[Run]) -> str:
    levels = next((r.config["percentiles"] for r in runs if r.percentiles and "percentiles" in r.config), None)
    return "recorded" if levels is None else ", ".join(map(_ordinal, levels))


def _ordinal(level: float) -> str:
    """Return a percentile's name.

    >>> [_ordinal(level) for level in (1, 11, 22, 50, 99.9)]
    ['1st', '11th', '22nd', '50th', '99.9th']
    """
    suffix = "th" if level % 1 or level // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(int(level % 10), "th")
    return f"{level:g}{suffix}"


def _title(runs: Sequence[Run]) -> str:
    kinds = [run.config.get("batch_norm") for run in runs]
    if all(isinstance(kind, bool) for kind in kinds) and True in kinds and False in kinds:
        return "Activations over time, with and without batch normalization"
    return "Runs: " + ", ".join(run.name for run in runs)


def _subtitle(runs: Sequence[Run]) -> str:
    if len(runs) == 1:
        return f"One run, {runs[0].steps:,} steps."
    steps = sorted({run.steps for run in runs})
    count = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    return f"{len(runs)} runs of {count} steps."


def _figure(k: int, run: Run) -> str:
    if not run.accuracy:
        return ""
    final = run.summary.get("accuracy")
    value, how = run.accuracy[-1][1], str(run.accuracy_kind)
    if isinstance(final, dict) and "folded" in final:
        value, how = final["folded"], f"{how} of the folded network"
    elif isinstance(final, dict) and (named := [name for name in final if name.startswith(TOP1)]):
        value, how = final[named[-1]], named[-1]
    name = f'<i class="run{k % 6}"></i>{escape(run.name)}'
    return f'<div class="figure"><span>{name}</span><b>{value:.2%}</b><span>{escape(how)}</span></div>'


def _footer(runs: Sequence[Run]) -> str:
    found = [r.config["environment"] for r in runs if isinstance(r.config.get("environment"), dict)]
    parts = [f"{key}: {value}" for key, value in (found[0] if found else {}).items() if value is not None]
    return " · ".join(parts)


def _section41(runs: Sequence[Run]) -> list[PageSection]:
    return [
        ("Paper versus here", "What Section 4.1 says, and what these runs show.", paper_versus_here(runs)),
        ("Steps to given accuracies", "The step of the first evaluation that reached each accuracy.", steps_to(runs)),
    ]


def _tables(runs: Sequence[Run], sections: Sequence[PageSection]) -> str:
    config = _config(runs)
    parts = [
        *sections,
        ("At the end", "Final accuracy with each kind of statistics (Algorithm 2).", _final(runs)),
        ("Configuration", "Settings that differ between runs are bold.", config),
    ]
    return "\n".join(
        f"<section><h2>{escape(heading)}</h2><p>{escape(text)}</p>{_table(rows, mark=rows is config)}</section>"
        for heading, text, rows in parts
        if len(rows) > 1
    )


def _final(runs: Sequence[Run]) -> list[list[str]]:
    found = [accuracy if isinstance(accuracy := run.summary.get("accuracy"), dict) else {} for run in runs]
    names = {
        "running": "running averages",
        "population": "population statistics (estimate_)",
        "folded": "folded network (fold)",
    }
    names |= {key: key for f in found for key in f if key.startswith(TOP1)}
    rows = [
        [names[key], *(f"{f[key]:.2%}" if key in f else "-" for f in found)]
        for key in names
        if any(key in f for f in found)
    ]
    return [["statistics", *(run.name for run in runs)], *rows]


def _config(runs: Sequence[Run]) -> list[list[str]]:
    keys = list(dict.fromkeys(key for run in runs for key in run.config if key != "environment"))
    rows = [[key.replace("_", " "), *(str(run.config.get(key, "-")) for run in runs)] for key in keys]
    return [["option", *(run.name for run in runs)], *rows]


def _table(rows: Sequence[Sequence[str]], mark: bool) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = ""
    for row in rows[1:]:
        kind = ' class="differs"' if mark and len(set(row[1:])) > 1 else ""
        body += f"<tr><td>{escape(row[0])}</td>" + "".join(f"<td{kind}>{escape(c)}</td>" for c in row[1:]) + "</tr>"
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _page_data(runs: Sequence[Run]) -> dict[str, Any]:
    accuracies = sorted({key for run in runs for key in run.curves if key.endswith(ACCURACIES)})
    return {"measures": MEASURES, "accuracies": accuracies, "runs": [_run_data(run) for run in runs]}


def _run_data(run: Run) -> dict[str, Any]:
    shift: dict[str, Any] = {}
    if len(run.percentiles) > 1 and run.layers:
        shift["z"] = {layer: _curve(run.drift_curve(layer, "z")) for layer in run.layers}
        shift["x"] = {layer: _curve(run.drift_curve(layer, "x")) for layer in run.layers}
    if run.gradient_changes:
        shift["gradient"] = {
            layer: _curve([(r.step, c.relative) for r in run.gradient_changes if (c := r.gradient_change.get(layer))])
            for layer in run.gradient_changes[0].gradient_change
        }
    return {
        "name": run.name,
        "curves": {
            key: {
                **_curve(curve),
                **{edge: _curve(values)["values"] for edge, values in run.bands.get(key, {}).items()},
            }
            for key, curve in run.curves.items()
        },
        "percentiles": _percentile_data(run),
        "shift": shift,
    }


def _curve(curve: Curve) -> dict[str, list[float | None]]:
    finite = [(s, v) for s, v in _thin(curve, 1000) if abs(v) < float("inf")]
    return {"steps": [s for s, _ in finite], "values": [float(f"{v:.5g}") for _, v in finite]}


def _thin(items: Sequence[Any], limit: int) -> list[Any]:
    """Keep at most ``limit`` items, evenly spaced, including the last."""
    every = max(-(-len(items) // limit), 1)
    return [item for k, item in enumerate(items) if (len(items) - 1 - k) % every == 0]


def _percentile_data(run: Run) -> dict[str, Any] | None:
    if not run.layers:
        return None
    size = sum(run.percentiles[0].percentiles[layer].z.numel() for layer in run.layers)
    records = _thin(run.percentiles, max(BUDGET // size, 10))
    layers = []
    for name in run.layers:
        values = torch.stack([r.percentiles[name].z for r in records])
        layers.append(
            {
                "name": name,
                "count": values.shape[1],
                "units": values.shape[2],
                "typical": run.typical(name),
                "data": base64.b64encode(values.numpy().astype("<f4").tobytes()).decode(),
            }
        )
    return {"steps": [r.step for r in records], "layers": layers}
