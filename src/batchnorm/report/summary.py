"""Write the tables of results in README and docs from the files under results/.

``python -m batchnorm.report.summary`` rewrites the text between the markers in README.md and docs/.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ..results import write_atomically
from .speeds import alternatives, networks, speeds
from .tables import Result, Row, cells, machine, read, table

MARKERS = ("<!-- results: written by python -m batchnorm.report.summary -->", "<!-- end of results -->")
NOT_RUN = "Not yet run."


def _fig1(r: Result) -> str:
    runs = r["runs"]
    plain, folded = runs["without-bn"]["accuracy"]["running"], runs["with-bn"]["accuracy"]["folded"]
    return f"accuracy {folded:.1%} with BN (folded), {plain:.1%} without BN, at learning rate {r['options']['rate']}"


def _comparison(r: Result) -> str:
    plain, normalized = r["best against best"]
    return "accuracy with / without BN: " + ", ".join(
        f"{normalized['mean'][i]:.1%} / {plain['mean'][i]:.1%} at step {plain['steps'][i]:,}" for i in (0, -1)
    )


def _fig2(r: Result) -> str:
    run = {name: n for name, n in r["networks"].items() if n["maxima"]}
    told = []
    if times := run.get("bn-x5", {}).get("times fewer steps"):
        told.append(f"{times:.1f} times fewer steps (BN-x5)")
    if "bn-x30" in run and "inception" in run:
        best, stock = (f"{run[name]['maximum']:.1%}" for name in ("bn-x30", "inception"))
        told.append(f"accuracy {best} (BN-x30; Inception {stock})")
    if missing := len(r["not yet run"]):
        told.append(f"{missing} runs not yet run")
    return "; ".join(told)


def _fig4(r: Result) -> str:
    errors = {(row["model"], row["crops"]): row["top5"] for row in r["rows"]}
    single, ensemble = errors["single crop, mean over networks", "1"], errors["ensemble", "144"]
    many = f"{len(r['members'])} networks and 144 crops"
    return (
        f"top-5 error {ensemble:.1%} with {many}, {single:.1%} with one network and one crop"
        f" ({r['data']['classes']} classes)"
    )


def _section2(r: Result) -> str:
    b = r["b alone"]["ignored"]
    return f"b's norm grows to {b['norm of b'][-1]:.3g}; the loss goes from {b['loss'][0]:.4f} to {b['loss'][-1]:.4f}"


def _init(r: Result) -> str:
    def trained(network: str) -> str:
        widths = [row["std"] for row in r["final test accuracy"] if row["network"] == network and row["mean"] > 0.9]
        return f"{min(widths):g} to {max(widths):g}" if widths else "none"

    told = f"{trained('without BN')} without BN, {trained('with BN')} with BN"
    return f"std of the initial weights for over 90% accuracy: {told}"


def _jacobian(r: Result) -> str:
    last = max(pair["step"] for pair in r["pairs"])

    def near(network: str, matrix: str) -> str:
        shares = [
            p[matrix]["fraction between 1/2 and 2"] for p in r["pairs"] if (p["step"], p["network"]) == (last, network)
        ]
        return f"{min(shares):.0%} to {max(shares):.0%}"

    names = ("with BN", "without BN")
    told = ", ".join(f"{near(name, 'J')} {name} (random: {near(name, 'random')})" for name in names)
    return f"values from 1/2 to 2: {told}"


def _scale(r: Result) -> str:
    far = r["largest"]
    return (
        f"outputs differ by at most {far['output']:.0%} of what eps allows, gradients by at most"
        f" {max(far['du'], far['dW']):.1%} of their norm"
    )


def _saturation(r: Result) -> str:
    last = {(run["network"], run["std"]): max(run["saturated"][-1].values()) for run in r["runs"]}
    std = max((share, std) for (network, std), share in last.items() if network == "without BN")[1]
    without, with_bn = last["without BN", std], last["with BN", std]
    return (
        f"saturated outputs in the worst layer: {without:.0%} without BN, {with_bn:.0%} with BN"
        f" (std of the initial weights: {std:g})"
    )


def _placement(r: Result) -> str:
    before, after = (
        {x["nonlinearity"]: x["mean"] for x in r["runs"] if x["batch normalization"] == place}
        for place in ("before it", "after it")
    )
    return "accuracy with BN before / after the nonlinearity: " + ", ".join(
        f"{name} {mean:.1%} / {after[name]:.1%}" for name, mean in before.items()
    )


def _optimizers(r: Result) -> str:
    rows = [x["accuracy"][-1] for x in r["runs"] if x["network"] == "with BN"]
    return f"{len(rows)} methods reach accuracies of {min(rows):.1%} to {max(rows):.1%} with BN"


FIGURES = [
    Row("Figure 1", "reproduce fig1", "BN trains faster and ends with a higher accuracy", "fig1.json", _fig1),
    Row(
        "Figure 1, each network at its best rate",
        "reproduce comparison",
        "not in the paper",
        "comparison.json",
        _comparison,
    ),
    Row(
        "Figures 2, 3",
        "reproduce fig2 --data DIR",
        "14 times fewer steps (BN-x5); accuracy 74.8% (BN-x30; Inception 72.2%)",
        "fig2.json",
        _fig2,
    ),
    Row("Figure 4", "reproduce fig4 --data DIR", "4.9% top-5 error", "fig4.json", _fig4),
    Row("Section 2", "reproduce section2", "the bias b grows, the loss does not change", "section2.json", _section2),
    Row("Section 3.1", "reproduce optimizers", "any variant of SGD can be used", "optimizers.json", _optimizers),
    Row("Sections 3.2, 5", "reproduce placement", "normalize before the nonlinearity", "placement.json", _placement),
    Row("Section 3.3", "reproduce scale", "BN((aW)u) = BN(Wu)", "scale.json", _scale),
    Row("Section 3.3", "reproduce jacobian", "singular values near 1 (conjecture)", "jacobian.json", _jacobian),
    Row("Section 1", "reproduce saturation", "saturated modes are avoided", "saturation.json", _saturation),
    Row("Abstract", "reproduce init", "less careful about initialization", "init.json", _init),
]


def paper(results: Path) -> str:
    """Return the table of the paper's figures and claims as Markdown; rows without a result file say "not yet run"."""
    header = ["part of the paper", "command", "the paper says", "measured here", "on"]
    rows = [[row.what, f"`batchnorm {row.command}`", row.paper, *cells(row, results)] for row in FIGURES]
    return table([header, *rows])


def figures(results: Path) -> str:
    """Return README's Figures 2 to 4 as Markdown; a figure without a result file is left out.

    Paper: Figs. 2, 3, 4
    """
    blocks = []
    if fig2 := read(results, "fig2.json"):
        blocks += [
            "![Figure 2: validation accuracy against training steps](results/fig2.png)",
            *_rates(fig2),
            f"Figures 2 and 3: {_images(fig2)} at {fig2['size']} px, {fig2['epochs']:g} epochs, {machine(fig2)}"
            f" ([seeds, sweeps and verdicts](docs/fig2.md)). The paper's values are to the right of ours.",
            table([_narrow(row) for row in fig2["figure 3"]["rows"]]),
        ]
    if fig4 := read(results, "fig4.json"):
        rows = [["network", "crops", "networks", "top-1 error", "top-5 error"]]
        ours = [
            {**row, "model": f"here: {row['model']}"} for row in fig4["rows"] if row["model"] not in fig4["members"]
        ]
        shown = [*(row for row in fig4["paper"] if row["model"].startswith("BN-Inception")), *ours]
        rows += [[r["model"], r["crops"], r["models"], *(_error(r[k]) for k in ("top1", "top5"))] for r in shown]
        recipe = next(iter(fig4["members"].values()))["recipe"]
        blocks += [
            f"Figure 4: {_images(fig4)} at {recipe['size']} px, {recipe['epochs']:g} epochs, {machine(fig4)}"
            ' ([each network](docs/fig4.md)). Rows that start with "here" are ours; the others are the paper\'s.',
            table(rows),
            *_verdicts(fig4["steps"], fig4.get("best ensemble", [])),
        ]
    return "\n\n".join(blocks)


def _rates(r: Result) -> list[str]:
    """Return a table that compares the networks at the same rate and at their best rates, and a count of the verdicts.

    Networks that did not reach Inception's best accuracy are left out.

    >>> _rates({"networks": {"inception": {"maximum": 0.2}}})
    []
    """
    plain, same = r["networks"].get("inception"), r["networks"].get("bn-baseline")
    rows = [("BN-Baseline", "both at the same learning rate", same)] if plain and same else []
    names = {"bn-baseline": "BN-Baseline", "bn-x5": "BN-x5"}
    rows += [(names[name], "each at its own best rate", n) for name, n in r.get("at its best rate", {}).items()]
    shown = [
        [f"{name} against Inception, {rates}", f"{n['times fewer steps']:.1f} times fewer", f"{n['maximum']:.1%}"]
        for name, rates, n in rows
        if n["times fewer steps"]
    ]
    told = []
    if plain and shown:
        header = ["", f"steps to Inception's best accuracy ({plain['maximum']:.1%})", "own best accuracy"]
        told.append(table([header, *shown]))
    if found := [verdict["verdict"] for verdict in r.get("verdicts", ())]:
        counts = [f"{n} {what}" for what in ("confirmed", "refuted", "not resolved") if (n := found.count(what))]
        where = "([table](docs/fig2.md#what-the-paper-found))"
        told.append(f"The paper's claims, on this small data set: {', '.join(counts)} {where}.")
    return told


def _narrow(row: list[str]) -> list[str]:
    """Shorten a row of our Figure 3: keep the columns that are compared with the paper, and drop each seed's value."""
    return [re.sub(r" \(.*", "", cell) for cell in (*row[:1], *row[2:8])]


def _verdicts(steps: list[Result], best: list[Result]) -> list[str]:
    """Tabulate whether each change, such as more crops, lowers the error in Figure 4.

    Args:
        steps: the verdict on each change, separately for the top-1 and the top-5 error.
        best: the comparison of the best ensemble with the best network, for each error.

    >>> step = {"name": "144 crops instead of 1", "error": "top-1", "verdict": "confirmed"}
    >>> print(*_verdicts([step, {**step, "error": "top-5"}], []))
    | does this lower the error? | top-1 | top-5 |
    |---|---|---|
    | 144 crops instead of 1 | confirmed | confirmed |
    """
    errors = list(dict.fromkeys(step["error"] for step in steps))
    names = dict.fromkeys(step["name"].rstrip(",") for step in steps)
    found = {(step["name"].rstrip(","), step["error"]): step["verdict"] for step in steps}
    rows = [[name, *(found.get((name, error), "") for error in errors)] for name in names]
    if best:
        by_error = {
            step["error"]: f"{step['verdict']}: {step['before']:.2%} to {step['after']:.2%},"
            f" {len(step['networks'])} networks"
            for step in best
        }
        rows.append(["the best ensemble instead of the best network", *(by_error.get(error, "") for error in errors)])
    told = [table([["does this lower the error?", *errors], *rows])]
    if best:
        told.append(
            "For the last row, the best network and the best ensemble were chosen on every second image and compared on"
            " the other images."
        )
    return told


def _images(result: Result) -> str:
    data = result["data"]
    return f"{data['train']:,} images of {data['classes']} classes"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def pages(root: Path) -> dict[Path, str]:
    """Return every page that has markers, with the text between its markers updated."""
    results = root / "results"
    contents = {
        "README.md": [alternatives(results), networks(results), speeds(results), paper(results), figures(results)]
    }
    for name in ("fig2", "fig4"):
        written = results / name / f"{name}.md"
        # Leave out the long table of each run's hardware and versions, and everything after it.
        tables = written.read_text().partition("\n## The runs\n")[0] if written.exists() else NOT_RUN
        contents[f"docs/{name}.md"] = [_beneath(tables)]
    tuned = read(results, "fine-tuning.json")
    contents["docs/fine-tuning.md"] = [_fine_tuning(tuned) if tuned else NOT_RUN]
    return {root / page: _between_markers((root / page).read_text(), texts) for page, texts in contents.items()}


def _fine_tuning(r: Result) -> str:
    """Tabulate accuracies by batch size, kind of statistics and rate; each row's best accuracy is bold."""
    options, best = r["options"], {(row["batch"], row["statistics"]): row["rate"] for row in r["rows"]}
    rows = [["batch", "statistics", *(f"rate {rate:g}" for rate in options["rates"])]]
    for batch, kind in best:
        row = [one for one in r["tried"] if (one["batch"], one["statistics"]) == (batch, kind)]
        cells = [f"{100 * one['mean']:.1f} ± {100 * one['spread']:.1f}" for one in row]
        bold = [
            f"**{cell}**" if one["rate"] == best[batch, kind] else cell for one, cell in zip(row, cells, strict=True)
        ]
        rows.append([str(batch), kind, *bold])
    first = options["classes"] // 2
    return (
        "Validation accuracy in percent (mean ± standard deviation over seeds) of a network with four convolutions, on"
        f" images of {options['size']} px. The network was trained on {first} classes, to an accuracy of"
        f" {r['first']:.1%}, and then fine-tuned for {options['epochs']:g} epochs on {options['images']} images of each"
        f" of {options['classes'] - first} other classes ([numbers](../results/fine-tuning.json), {machine(r)}).\n\n"
        f"{table(rows)}"
    )


def _beneath(text: str) -> str:
    """Return a page as a section of another page: without its title, and with its headings one level lower."""
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    return "\n".join(f"#{line}" if line.startswith("#") else line for line in lines).strip()


def _between_markers(page: str, texts: list[str]) -> str:
    """Return the page with the text between its pairs of markers replaced by ``texts``, in order."""
    before, *rest = page.split(MARKERS[0])
    return before + "".join(
        f"{MARKERS[0]}\n{text}\n{MARKERS[1]}{part.partition(MARKERS[1])[2]}"
        for text, part in zip(texts, rest, strict=True)
    )


if __name__ == "__main__":
    for path, page in pages(Path(sys.argv[1] if len(sys.argv) > 1 else ".")).items():
        write_atomically(path, page.encode())
