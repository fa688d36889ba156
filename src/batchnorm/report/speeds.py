"""README's tables of speeds, from the files that ``batchnorm bench`` wrote."""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from .tables import Result, Row, cells, machine, read, table

NETWORKS = "networks-h200.json"
MODES = {
    "eager": "the converted network, `bn.convert(net, example)`, against the stock network",
    "graph": "as *eager*, but each step is one CUDA graph",
    "compiled": "as *eager*, but both networks are under `torch.compile`",
    "backend": 'the stock network under `torch.compile(backend="batchnorm")`, against `torch.compile(net)`',
}
OTHER_USES = {
    "evaluation": "evaluation instead of training",
    "nchw": "NCHW instead of channels_last",
    "float32": "float32 instead of bf16 autocast",
    "fp16": "fp16 autocast with a GradScaler",
    "bf16-weights": "bf16 weights instead of autocast",
    "checkpoint": "activation checkpointing",
    "accumulate": "gradients of two half batches, added",
    "ddp": "DistributedDataParallel in one process",
    "fsdp2": "FSDP2 in one process",
    "dynamic": "`torch.compile(dynamic=True)`",
    "reduce-overhead": '`torch.compile(mode="reduce-overhead")`',
    "max-autotune": '`torch.compile(mode="max-autotune")`',
}
HALVED = "*"


def alternatives(results: Path) -> str:
    """Return a table of what the usual tools cannot do, with tests or results as evidence, and what to use instead."""
    result = read(results, NETWORKS) or {"rows": []}
    faster = {
        row["mode"]: f"ResNet-50 trains [{row['speedup']:.2f} times as fast](results/{NETWORKS})"
        for row in result["rows"]
        if (row["network"], row["batch"]) == ("torchvision:resnet50", 256) and "failed" not in row
    }
    eager = f": an eager {faster['eager']} (bf16, batch 256, H200)" if "eager" in faster else ""
    compiled = f": with these, a compiled {faster['backend']}" if "backend" in faster else ""
    tests = "tests/known_problems"
    rows = [
        ["you use", "what it cannot do", "use instead"],
        [
            "`torch.nn.BatchNorm2d`",
            "fuse with the residual sum and the ReLU that follow it",
            f"`bn.convert(net, example)`{eager}",
        ],
        [
            "`torch.nn.BatchNorm2d`",
            "evaluate with up-to-date statistics: its running averages [lag behind the weights]"
            f"({tests}/test_stale_averages.py)",
            "`bn.estimate_(net, batches)`: statistics computed with the final weights, with standard errors",
        ],
        [
            "`torch.nn.BatchNorm2d`",
            f"keep its statistics frozen: `net.train()` [updates them again]({tests}/test_frozen_layers_thaw.py)",
            "`net = bn.convert(net, example)`, then `bn.freeze_(net)`: `train()` does not undo it",
        ],
        [
            "`torch.compile`",
            f"match this library's kernels in bf16{compiled}",
            '`torch.compile(net, backend="batchnorm")` on the stock network',
        ],
        [
            "`torch.fx` fusion",
            f"check that outputs stay the same: some fused networks are [silently wrong]({tests}/test_folding.py)",
            "`bn.fold(net, example)`, which compares its result with the original",
        ],
        [
            "fvcore's `update_bn_stats`",
            f"turn Dropout off, or [compute an accurate variance if the mean is large]({tests}/test_fvcore.py)",
            "`bn.estimate_(net, batches)`, also over several ranks",
        ],
    ]  # fmt: skip
    return table(rows)


def networks(results: Path) -> str:
    """Return the speedups of real networks as Markdown, or an empty string if they are not measured yet."""
    result = read(results, NETWORKS)
    if result is None:
        return ""
    rows = {(row["network"], row["mode"], row["batch"]): row for row in result["rows"]}
    names, batches = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 2))
    batches.sort(reverse=True)
    measured = [mode for mode in MODES if any(key[1] == mode for key in rows)]
    names.sort(key=lambda name: -rows.get((name, "eager", batches[0]), {}).get("speedup", 0))
    columns = [(mode, batch) for mode in measured for batch in batches if any(key[1:] == (mode, batch) for key in rows)]
    shown = [["network", *(f"{mode}, {batch}" for mode, batch in columns)]]
    shown += [
        [short_name(name, names), *(_speedup(rows.get((name, *column))) for column in columns)]
        for name in names
        if any((name, *column) in rows for column in columns)
    ]
    return "\n\n".join(
        [
            "Speedup of a training step over the stock network, at batch"
            f" {' and '.join(map(str, batches))} ({result['machine']['steps']}, {machine(result)};"
            f" [all numbers, with 95% intervals and memory](results/{NETWORKS}); `batchnorm bench networks`):",
            "\n".join(f"- *{mode}*: {MODES[mode]}" for mode in measured),
            *_notes(result, measured),
            table(shown),
            *_other_uses(result["rows"], names),
        ]
    )


def short_name(name: str, names: list[str]) -> str:
    """Return a network's name, with its library only if two libraries have a network of that name."""
    library, _, short = name.rpartition(":")
    return f"{short} ({library})" if sum(n.endswith(f":{short}") for n in names) > 1 else short


def _speedup(row: Result | None) -> str:
    if row is None:
        return ""
    if "failed" in row:
        return "stock failed" if row["failed"].startswith("stock: ") else "failed"
    text = f"{row['speedup']:.2f}{'' if row['examples'] == row['batch'] else HALVED}"
    low, high = row.get("interval", (math.inf, math.inf))
    return f"*{text}*" if low <= 1 <= high else text


def _notes(result: Result, measured: list[str]) -> list[str]:
    """Return a paragraph that explains italics, and names missed goals, unmeasured modes and reduced batches."""
    told = []
    if any(_speedup(row).startswith("*") for row in result["rows"]):
        told.append("A speedup in italics is within the noise: its 95% interval includes 1.")
    if missed := [
        f"{bar['what']} {bar['measured']:.2f} (goal: at {'least' if bar['at_least'] else 'most'} {bar['wanted']:g})"
        for bar in result["bars"]
        if bar["reached"] is False
    ]:
        told.append(f"Missed goals: {'; '.join(missed)}.")
    if left := [mode for mode in MODES if mode not in measured]:
        told.append(f"Not measured yet: {', '.join(left)}.")
    if any(row["mode"] in MODES and row.get("examples", row["batch"]) != row["batch"] for row in result["rows"]):
        told.append(f"{HALVED} Measured with a smaller batch, because the full batch does not fit into memory.")
    return [" ".join(told)] if told else []


def _other_uses(rows: list[Result], names: list[str]) -> list[str]:
    """Return a table of the speedups in modes outside ``MODES``, with a column for each network and batch size."""
    found = {(row["mode"], (row["network"], row["batch"])): row for row in rows if row["mode"] in OTHER_USES}
    columns = list(dict.fromkeys(column for _, column in found))
    shown = [["other uses", *(f"{short_name(name, names)}, {batch}" for name, batch in columns)]]
    shown += [
        [text, *(_speedup(found.get((mode, column))) for column in columns)]
        for mode, text in OTHER_USES.items()
        if any((mode, column) in found for column in columns)
    ]
    note = (
        "Speedups of converted networks in other uses, over the stock network in the same use (eager unless the row"
        " says `torch.compile`):"
    )
    return [note, table(shown)] if found else []


def _cpu(r: Result) -> str:
    def over_torch(activation: str) -> str:
        ratios = [
            max(row["ratios"].values())
            for row in r["rows"]
            if row["level"] == "layers" and row["activation"] == activation
        ]
        return f"{1 / statistics.geometric_mean(ratios):.2f} (worst {1 / max(ratios):.2f})"

    return f"times as fast as torch.nn: BN+ReLU {over_torch('relu')}, BN {over_torch('none')}"


def _kernels(r: Result) -> str:
    rows = [row for row in r["summary"] if row["dtype"] == "bfloat16"]

    def least(over: str, key: str) -> float:
        return min(float(row[over][key]) for row in rows)

    means = sorted((row["compile"]["geometric_mean"], f"{row['op']}, {row['layout']}") for row in rows)
    lowest, highest = (f"{mean:.2f} ({case})" for mean, case in (means[0], means[-1]))
    return (
        f"over torch.compile {lowest} to {highest}, worst {least('compile', 'worst'):.2f}; over eager"
        f" {least('eager', 'geometric_mean'):.2f} or more"
    )


def _host(r: Result) -> str:
    ratios = {
        name: [row["ratio"] for row in r["rows"] if row["call"] == name] for name in ("BN", "BN+ReLU", "BN+add+ReLU")
    }
    means = (f"{name} {1 / statistics.geometric_mean(found):.2f}" for name, found in ratios.items())
    return f"times as fast as torch.nn: {', '.join(means)} (worst {1 / max(map(max, ratios.values())):.2f})"


def _cpu_networks(r: Result) -> str:
    rows = [row for row in r["rows"] if "failed" not in row]
    speedups = [row["speedup"] for row in rows]
    mean = statistics.geometric_mean(speedups)
    limits = [1 / row["without_bn"] for row in rows if "without_bn" in row]
    limit = f"; without any BN, they would be {statistics.geometric_mean(limits):.2f} times as fast" if limits else ""
    return f"{len(speedups)} networks are {mean:.2f} times as fast (worst {min(speedups):.2f}){limit}"


def _memory(r: Result) -> str:
    over = {row["name"]: row["over_stock"] for row in r["rows"]}
    return f"{over['ours']:.2f} of the stock network's, {over['ours, recompute']:.2f} with `bn.recompute()`"


def _train(r: Result) -> str:
    ours = [x for x in r["rows"] if not x["name"].startswith("stock")]
    return ", ".join(
        f"{x['over_composed']:.2f} times at batch {x['batch']} ({x['images_per_second']:,.0f} images/s)" for x in ours
    )


def _learning(r: Result) -> str:
    told = ", ".join(f"{form} {r[form]['mean']:.1%}" for form in ("stock", "converted"))
    if "same" not in r:
        return f"{told}: one seed cannot tell whether they differ"
    return f"{told}: the difference is {'within' if r['same'] else 'above'} the range over seeds"


def _input(r: Result) -> str:
    return f"{r['ours']:,.0f} images/s, {r['ratio']:.2f} times as many as a plain Pillow loader"


def _crops(r: Result) -> str:
    share = r["share of forward"]
    return f"{share['crops']:.0%} of the speed of the forward pass alone; with JPEG decoding, {share['files']:.0%}"


def _bench_fig1(r: Result) -> str:
    faster = r["times faster than eager"]
    one, whole = faster["one process"], faster["make run"]
    return f"{one:.2f} times as fast; {whole:.2f} times with `make run`, which trains two networks at once"


def _monitor(r: Result) -> str:
    return ", ".join(
        f"{value:+.1%} with percentiles recorded {name}" for name, value in r["added"].items() if name != "no monitor"
    )


def _algorithm2(r: Result) -> str:
    estimating = r["rows"]["estimate_, layers of batchnorm"]["estimate_ / training"]
    folded = r["rows"]["fold"]["fold / torch.fx"]
    return (
        f"`estimate_`: {estimating:.2f}x the time of a training-mode forward pass; a folded network: {folded:.2f}x that"
        " of torch.fx's"
    )


SPEED = [
    Row("CPU layers", "bench cpu", "", "cpu.json", _cpu),
    Row("networks on a CPU: a training step", "bench networks --device cpu", "", "networks-cpu.json", _cpu_networks),
    Row("CUDA kernels, bf16, forward and backward: speedup", "bench kernels", "", "kernels-h200.json", _kernels),
    Row("host time of an eager CUDA layer, forward and backward", "bench host", "", "host-h200.json", _host),
    Row(
        "BN-Inception: speedup of a training step over torch.compile",
        "bench train",
        "",
        "bench-train-h200.json",
        _train,
    ),
    Row("BN-Inception: peak memory of a training step", "bench memory", "", "memory-h200.json", _memory),
    Row("ResNet-18: accuracy after training", "bench learning --data DIR", "", "same-learning-h200.json", _learning),
    Row("images decoded and cropped, per core", "bench input DIR", "", "bench-input.json", _input),
    Row("evaluation with 144 crops", "bench crops", "", "bench-crops-h200.json", _crops),
    Row("Figure 1's training against eager PyTorch", "bench fig1", "", "bench-fig1.json", _bench_fig1),
    Row("training time that `bn.Monitor` adds", "bench monitor", "", "bench-monitor.json", _monitor),
    Row("`estimate_` and `fold`", "bench algorithm2", "", "algorithm2.json", _algorithm2),
]


def speeds(results: Path) -> str:
    """Return the table of the benchmarks in SPEED as Markdown; rows without a result file say "not yet run"."""
    header = ["what", "command", "measured", "on"]
    return table([header, *([row.what, f"`batchnorm {row.command}`", *cells(row, results)] for row in SPEED)])
