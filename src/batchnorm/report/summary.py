"""The tables of results in README and docs, written from the files under results/, never by hand.

python -m batchnorm.report.summary          rewrites README.md and docs/ between their two markers
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..results import write_atomically

Result = dict[str, Any]
MARKERS = ("<!-- results: written by python -m batchnorm.report.summary -->", "<!-- end of results -->")


class Row(NamedTuple):
    """Hold one line: the claim or question, the command that answers it, and how to read its result file."""

    what: str
    command: str
    paper: str
    file: str
    measured: Callable[[Result], str]


def _fig1(r: Result) -> str:
    runs = r["runs"]
    plain, folded = runs["without-bn"]["accuracy"]["running"], runs["with-bn"]["accuracy"]["folded"]
    return f"{plain:.1%} without, {folded:.1%} with BN (folded) at rate {r['options']['rate']}"


def _comparison(r: Result) -> str:
    def ends(name: str) -> str:
        plain, normalized = r[name]
        first, last = (
            f"{plain['mean'][i]:.1%} / {normalized['mean'][i]:.1%} at step {plain['steps'][i]:,}" for i in (0, -1)
        )
        return f"{first}, {last}"

    best = r["best rate"]
    return f"best rates ({best['without BN']:g} / {best['with BN']:g}): {ends('best against best')}; " + (
        f"equal rate {r['options']['equal_rate']}: {ends('equal rate')}"
    )


def _fig2(r: Result) -> str:
    def one(name: str, n: Result) -> str:
        seeds = f" (seeds {', '.join(f'{top:.1%}' for top in n['maxima'])})" if n["seeds"] > 1 else ""
        fewer = n["times fewer steps"]
        steps = "never at Inception's best" if fewer is None else f"{fewer:.1f} times fewer steps"
        if tuned := n["times fewer than best-tuned"]:
            steps += f" ({tuned:.1f} against the best unnormalized)"
        return f"{name} {n['maximum']:.1%}{seeds}" + (f", {steps}" if name != "inception" else "")

    networks = "; ".join(one(name, n) for name, n in r["networks"].items() if n["maxima"])
    missing = len(r["not yet run"])
    return networks + (f"; {missing} runs of the plan not yet run" if missing else "")


def _fig4(r: Result) -> str:
    kinds = {
        ("single crop, mean over networks", "1"): "single crop",
        ("multicrop, mean over networks", "144"): "144 crops",
        ("ensemble", "144"): f"{len(r['members'])} networks and 144 crops",
    }
    rows = [(kinds.get((x["model"], x["crops"])), x) for x in r["rows"]]
    errors = ", ".join(f"{kind} {x['top1']:.1%} / {x['top5']:.1%}" for kind, x in rows if kind)
    return f"top-1 / top-5 error: {errors} ({r['data']['classes']} classes)"


def _section2(r: Result) -> str:
    b = r["b alone"]["ignored"]
    return f"norm of b grows to {b['norm of b'][-1]:.3g}; loss {b['loss'][0]:.4f} to {b['loss'][-1]:.4f}"


def _init(r: Result) -> str:
    def trained(network: str) -> str:
        widths = [row["std"] for row in r["final test accuracy"] if row["network"] == network and row["mean"] > 0.9]
        return f"{min(widths):g} to {max(widths):g}" if widths else "none"

    return f"widths that train past 90%: {trained('without BN')} without, {trained('with BN')} with BN"


def _jacobian(r: Result) -> str:
    last = max(pair["step"] for pair in r["pairs"])
    near = "fraction between 1/2 and 2"
    rows = [p for p in r["pairs"] if p["step"] == last]
    return "between 1/2 and 2 (random matrices): " + "; ".join(
        f"{p['network']}, layers {p['layers']}: {p['J'][near]:.0%} ({p['random'][near]:.0%})" for p in rows
    )


def _scale(r: Result) -> str:
    far = r["largest"]
    return (
        f"output within {far['output']:.0%} of the bound that eps sets; Jacobians differ by at most"
        f" {far['du']:.1%} (du) and {far['dW']:.1%} (dW), n = {len(r['identities'])}"
    )


def _saturation(r: Result) -> str:
    def last(row: Result) -> str:
        return f"{row['network']}, width {row['std']:g}: {max(row['saturated'][-1].values()):.0%}"

    return "most saturated layer at the end: " + "; ".join(map(last, r["runs"]))


def _placement(r: Result) -> str:
    return "; ".join(f"{x['nonlinearity']}, BN {x['batch normalization']}: {x['mean']:.1%}" for x in r["runs"])


def _optimizers(r: Result) -> str:
    rows = [x for x in r["runs"] if x["network"] == "with BN"]
    return "with BN: " + "; ".join(f"{x['optimizer']} {x['accuracy'][-1]:.1%}" for x in rows)


FIGURES = [
    Row("Figure 1", "reproduce fig1", "BN trains faster, ends higher", "fig1.json", _fig1),
    Row("Figure 1, fairly", "reproduce comparison", "not in the paper", "comparison.json", _comparison),
    Row("Figures 2, 3", "reproduce fig2 --data DIR", "14 times fewer steps; 74.8% against 72.2%", "fig2.json", _fig2),
    Row("Figure 4", "reproduce fig4 --data DIR", "4.9% top-5 error", "fig4.json", _fig4),
    Row("Section 2", "reproduce section2", "b grows, the loss stays", "section2.json", _section2),
    Row("Section 3.1", "reproduce optimizers", "any gradient method", "optimizers.json", _optimizers),
    Row("Sections 3.2, 5", "reproduce placement", "before the nonlinearity", "placement.json", _placement),
    Row("Section 3.3", "reproduce scale", "BN((aW)u) = BN(Wu)", "scale.json", _scale),
    Row("Section 3.3", "reproduce jacobian", "singular values near 1 (conjecture)", "jacobian.json", _jacobian),
    Row("Section 1", "reproduce saturation", "saturated modes are avoided", "saturation.json", _saturation),
    Row("Abstract", "reproduce init", "less careful about initialization", "init.json", _init),
]


def _cpu(r: Result) -> str:
    def worst(test: Callable[[Result], bool]) -> str:
        ratios = [max(row["ratios"].values()) for row in r["rows"] if row["level"] == "layers" and test(row)]
        return f"{statistics.geometric_mean(ratios):.2f} (worst {max(ratios):.2f}, n = {len(ratios)})"

    few = worst(lambda row: row["case"]["layout"] == "channels_last" and 1 < row["case"]["shape"][1] < 8)
    relu, alone = worst(lambda row: row["activation"] == "relu"), worst(lambda row: row["activation"] == "none")
    return f"time over torch.nn's: BN+ReLU {relu}, BN alone {alone}, few channels channels_last {few}"


def _kernels(r: Result) -> str:
    return "; ".join(
        f"{s['op']} {s['layout']}: {s['compile']['geometric_mean']:.2f} times torch.compile"
        f" (worst {s['compile']['worst']:.2f}), {s['eager']['geometric_mean']:.2f} times eager"
        for s in r["summary"]
        if s["dtype"] == "bfloat16"
    )


def _memory(r: Result) -> str:
    return "of stock eager's: " + ", ".join(
        f"{x['name']} {x['over_stock']:.2f}" for x in r["rows"] if x["name"] != "stock"
    )


def _train(r: Result) -> str:
    ours = [x for x in r["rows"] if not x["name"].startswith("stock")]
    return "; ".join(f"{x['name']}, batch {x['batch']}: {x['over_stock']:.2f} times stock" for x in ours)


def _input(r: Result) -> str:
    return f"{r['ours']:,.0f} images/s, {r['ratio']:.2f} times a plain Pillow loader"


def _crops(r: Result) -> str:
    share = r["share of forward"]
    return f"{share['crops']:.2f} of the bare forward pass from decoded images, {share['files']:.2f} from JPEG files"


def _bench_fig1(r: Result) -> str:
    faster = r["times faster than eager"]
    return f"one process {faster['one process']:.2f}, as `make run` {faster['make run']:.2f} times faster"


def _monitor(r: Result) -> str:
    return ", ".join(f"{name} {value:+.1%}" for name, value in r["added"].items() if name != "no monitor")


def _algorithm2(r: Result) -> str:
    rows = r["rows"]
    pass_, fold = rows["estimate_, layers of batchnorm"], rows["fold"]
    return (
        f"estimate_ {pass_['estimate_ / training']:.2f} of a training-mode forward pass;"
        f" folded network {fold['fold / torch.fx']:.2f} of torch.fx's folded one"
    )


def _learning(r: Result) -> str:
    told = [f"{form} {r[form]['mean']:.1%} ({r[form]['lowest']:.1%} to {r[form]['highest']:.1%})" for form in _FORMS]
    return f"{', '.join(told)}: {'the same within' if r['same'] else 'apart by more than'} the seeds' range"


_FORMS = ("stock", "converted")
_MODES = {
    "eager": "eager",
    "graph": "CUDA graph",
    "compiled": "torch.compile",
    "backend": '`backend="batchnorm"`',
}


def networks(results: Path) -> str:
    """Return the table of training steps of real networks as Markdown; empty if they are not yet measured.

    Beyond the paper: speed.
    """
    path = results / "networks-h200.json"
    if not path.exists():
        return ""
    result = json.loads(path.read_text())
    cells = {(row["network"], row["mode"], row["batch"]): _speedup(row) for row in result["rows"]}
    names, batches = (dict.fromkeys(row[key] for row in result["rows"]) for key in ("network", "batch"))
    columns = [(mode, b) for mode in _MODES for b in batches if any((name, mode, b) in cells for name in names)]
    rows = [["training step, times as fast as stock", *(f"{_MODES[mode]}, batch {b}" for mode, b in columns)]]
    rows += [[name, *(cells.get((name, *column), "") for column in columns)] for name in names]
    judged = [bar for bar in result["bars"] if bar["reached"] is not None]
    missed = [
        f"{bar['what']} {bar['measured']:.2f} (to be at {'least' if bar['at_least'] else 'most'} {bar['wanted']:g})"
        for bar in judged
        if not bar["reached"]
    ]
    told = f"; missed: {'; '.join(missed)}" if missed else ""
    return (
        f"`batchnorm bench networks`: whole training steps of `bn.convert(net, example)` against the stock network, and"
        f" in brackets the 95% interval; {result['machine']['steps']}, {_where(result)}"
        f" ([numbers](results/{path.name}), [picture](results/{path.stem}.png)).\n\n{_table(rows)}\n\n"
        f"{len(judged) - len(missed)} of {len(judged)} bars are reached{told}."
    )


def _speedup(row: Result) -> str:
    if "failed" in row:
        return f"failed: {row['failed']}".replace("|", " ")
    low, high = row["interval"]
    fits = "" if row["examples"] == row["batch"] else f", batch {row['examples']}"
    return f"{row['speedup']:.2f} ({low:.2f} to {high:.2f}){fits}"


SPEED = [
    Row("CPU layers against torch", "bench cpu", "", "cpu.json", _cpu),
    Row("CUDA kernels, bf16, forward + backward", "bench kernels", "", "kernels-h200.json", _kernels),
    Row("peak memory of a training step", "bench memory", "", "memory-h200.json", _memory),
    Row("the training step against stock parts", "bench train", "", "bench-train-h200.json", _train),
    Row(
        "converted and stock ResNet-18, accuracy after training",
        "bench learning --data DIR",
        "",
        "same-learning-h200.json",
        _learning,
    ),
    Row("images decoded and cropped per core", "bench input DIR", "", "bench-input.json", _input),
    Row("144 crops of an image", "bench crops", "", "bench-crops-h200.json", _crops),
    Row("Figure 1 against plain eager", "bench fig1", "", "bench-fig1.json", _bench_fig1),
    Row("Monitor's price", "bench monitor", "", "bench-monitor.json", _monitor),
    Row("estimate_ and fold", "bench algorithm2", "", "algorithm2.json", _algorithm2),
]


def tables(results: Path) -> str:
    """Return both tables as Markdown; commands without a result file are listed as not yet run.

    Beyond the paper: the paper's tables beside ours.
    """
    lines = ["| part of the paper | command | paper | measured here | on |", "|---|---|---|---|---|"]
    for row in FIGURES:
        lines.append(f"| {row.what} | `batchnorm {row.command}` | {row.paper} | {' | '.join(_read(row, results))} |")
    lines += ["", text] if (text := networks(results)) else []
    lines += ["", "| speed | command | measured here | on |", "|---|---|---|---|"]
    for row in SPEED:
        lines.append(f"| {row.what} | `batchnorm {row.command}` | {' | '.join(_read(row, results))} |")
    return "\n".join(lines)


def _read(row: Row, results: Path) -> tuple[str, str]:
    path = results / row.file
    if not path.exists():
        return "not yet run", ""
    result = json.loads(path.read_text())
    return f"[{row.measured(result)}](results/{row.file})", _where(result)


def _where(result: Result) -> str:
    env = result.get("environment") or result["hardware"]
    machine = env.get("gpu") or env.get("device") or f"{env['hardware']}, {env['cores']} cores"
    seeds = result.get("options", {}).get("seeds")
    return f"{machine}, torch {env['torch']}" + (f", {seeds} seeds" if seeds else "")


def figures(results: Path) -> str:
    """Return README's Figures 3 and 4 as Markdown, with their pictures, as far as they have been run.

    Paper: Figs. 2, 3, 4
    """
    blocks = []
    if (results / "fig2.json").exists():
        fig2 = json.loads((results / "fig2.json").read_text())
        part, seeds = fig2["figure 3"], max(n["seeds"] for n in fig2["networks"].values())
        caption = f"Figures 2 and 3: {_images(fig2)} at {fig2['size']} px, {fig2['epochs']:g} epochs, {_where(fig2)}"
        caption += f", up to {seeds} seeds"
        blocks += ["![Figure 2: validation accuracy against training steps](results/fig2.png)"]
        blocks += [f"{caption}. {part['text']}", _table(part["rows"])]
    if (results / "fig4.json").exists():
        fig4 = json.loads((results / "fig4.json").read_text())
        rows = [["network", "crops", "networks", "top-1 error", "top-5 error"]]
        ours = [
            {**row, "model": f"here: {row['model']}"} for row in fig4["rows"] if row["model"] not in fig4["members"]
        ]
        shown = [*(row for row in fig4["paper"] if row["model"].startswith("BN-Inception")), *ours]
        rows += [[r["model"], r["crops"], r["models"], *(_error(r[k]) for k in ("top1", "top5"))] for r in shown]
        recipe = next(iter(fig4["members"].values()))["recipe"]
        blocks += [
            f"Figure 4: {_images(fig4)} at {recipe['size']} px, {recipe['epochs']:g} epochs, {_where(fig4)}.",
            _table(rows),
        ]
        blocks += ["\n".join(f"- {step['says']}" for step in fig4["steps"])]
    return "\n\n".join(blocks)


def _images(result: Result) -> str:
    data = result["data"]
    return f"{data['train']:,} images of {data['classes']} classes"


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"


def _table(rows: list[list[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def pages(root: Path) -> dict[Path, str]:
    """Return the text of every page with markers, updated between them."""
    results = root / "results"
    contents = {"README.md": f"{tables(results)}\n\n{figures(results)}"}
    for name in ("fig2", "fig4"):
        table = results / name / f"{name}.md"
        contents[f"docs/{name}.md"] = _beneath(table.read_text()) if table.exists() else "Not yet run."
    tuned = results / "fine-tuning.json"
    contents["docs/fine-tuning.md"] = _fine_tuning(json.loads(tuned.read_text())) if tuned.exists() else "Not yet run."
    return {root / page: _between_markers((root / page).read_text(), text) for page, text in contents.items()}


def _fine_tuning(r: Result) -> str:
    """Tabulate accuracies by batch size, kind of statistics and rate, the best rate of each row in bold."""
    options, best = r["options"], {(row["batch"], row["statistics"]): row["rate"] for row in r["rows"]}
    rows = [["batch", "statistics", *(f"rate {rate:g}" for rate in options["rates"])]]
    for batch, kind in best:
        row = [one for one in r["tried"] if (one["batch"], one["statistics"]) == (batch, kind)]
        cells = [f"{100 * one['mean']:.1f} ± {100 * one['spread']:.1f}" for one in row]
        bold = [
            f"**{cell}**" if one["rate"] == best[batch, kind] else cell for one, cell in zip(row, cells, strict=True)
        ]
        rows.append([str(batch), kind, *bold])
    half = options["classes"] // 2
    return (
        "Validation accuracy in percent, mean and standard deviation over the seeds, of a network of four convolutions"
        f" at {options['size']} px. It was trained on {half} classes ({r['first']:.1%}) and fine-tuned on"
        f" {options['images']} images of each of {half} others for {options['epochs']:g} epochs"
        f" ([numbers](../results/fine-tuning.json), {_where(r)}).\n\n{_table(rows)}"
    )


def _beneath(text: str) -> str:
    """Return a page as a section of another: without its title, its headings one level lower."""
    lines = [line for line in text.splitlines() if not line.startswith("# ")]
    return "\n".join(f"#{line}" if line.startswith("#") else line for line in lines).strip()


def _between_markers(page: str, text: str) -> str:
    before, _, rest = page.partition(MARKERS[0])
    _, _, after = rest.partition(MARKERS[1])
    return f"{before}{MARKERS[0]}\n{text}\n{MARKERS[1]}{after}"


if __name__ == "__main__":
    for path, page in pages(Path(sys.argv[1] if len(sys.argv) > 1 else ".")).items():
        write_atomically(path, page.encode())
