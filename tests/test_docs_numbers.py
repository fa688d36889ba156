"""Test that numbers written by hand in the documentation are those of the result files."""

import json
import math
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def result(name):
    return json.loads((ROOT / f"results/{name}.json").read_text())


def between(values, form=".2f"):
    return f"{min(values):{form}} to {max(values):{form}}"


def networks():
    rows = {(row["network"], row["mode"], row["batch"]): row for row in result("networks-h200")["rows"]}
    resnet50 = {mode: row for (name, mode, n), row in rows.items() if (name, n) == ("torchvision:resnet50", 32)}
    uses = ("nchw", "float32", "fp16", "bf16-weights", "checkpoint", "accumulate", "ddp", "fsdp2")
    yield "networks", f"ResNet-50 trains {between([resnet50[use]['speedup'] for use in uses])} times as fast as stock"
    low, high = resnet50["float32"]["interval"]
    yield "networks", f"the 95% interval of the speedup, {low:.2f} to {high:.2f}, includes 1"
    evaluation = resnet50["evaluation"]
    low, high = evaluation["interval"]
    yield "networks", f"(speedup {evaluation['speedup']:.2f}, interval {low:.2f} to {high:.2f})"
    eager = [row["ours_peak_bytes"] / row["stock_peak_bytes"] for key, row in rows.items() if key[1] == "eager"]
    yield "networks", f"in eager mode is at most {max(eager):.2f} times the stock network's"
    yield "networks", f"({min(eager):.2f} times for EfficientNet)"
    yield "networks", f"a network took {between([row['convert_seconds'] for row in rows.values()], '.0f')} s"
    ddp, fsdp2 = (resnet50[mode]["speedup"] for mode in ("ddp", "fsdp2"))
    yield "gpus", f"{ddp:.2f} times as fast as stock under `DistributedDataParallel`, and {fsdp2:.2f} times"
    for network, name in (
        ("torchvision:resnet50", "resnet50 (torchvision)"),
        ("timm:resnet50", "resnet50 (timm)"),
        *((f"torchvision:{name}", name) for name in ("resnet18", "densenet121", "efficientnet_b0", "googlenet")),
        *((f"torchvision:{name}", name) for name in ("mobilenet_v3_large", "regnet_y_400mf")),
    ):
        found = (rows[network, mode, 256] for mode in ("compiled", "backend"))
        times = (f"{row['stock_ms']:.1f} to {row['ours_ms']:.1f} ms" for row in found)
        yield "compile", f"| {name} | {' | '.join(times)} |"
    small = [row for (_, mode, n), row in rows.items() if mode in ("compiled", "backend") and n == 32]
    yield "compile", f"take {between([1 / row['speedup'] for row in small])} of the stock time"


def other_benchmarks():
    cpu = result("networks-cpu")
    mean, worst = (bar["measured"] for bar in cpu["bars"])
    yield "networks", f"converted networks train {1 / mean:.2f} times as fast as stock networks"
    yield "networks", f"A step takes {mean:.2f} times as long"
    yield "networks", f"ResNet-18 gains the least ({worst:.3f})"
    (seconds,) = (row["convert_seconds"] for row in cpu["rows"] if row["network"] == "torchvision:resnet50")
    yield "README", f"converting a ResNet-50 took [{seconds:.0f} s](results/networks-cpu.json)"
    without = [row["without_bn"] for row in cpu["rows"]]
    yield "networks", f"train only {math.prod(without) ** (-1 / len(without)):.2f} times as fast"
    host = result("host-h200")["rows"]
    training, evaluation = ([row["ratio"] for row in host if ("eval" in row["call"]) is kind] for kind in (False, True))
    yield "networks", f"need {between(training)} times the host time"
    yield "networks", f"{between(evaluation)} times in evaluation"
    for row in result("kernels-h200")["summary"]:
        if row["dtype"] == "bfloat16":
            stock, tuned, eager = (row[over] for over in ("compile", "compile-max", "eager"))
            told = f"{stock['worst']:.2f} | {tuned['geometric_mean']:.2f}, {tuned['worst']:.2f}"
            yield "kernels", f"{told} | {eager['geometric_mean']:.2f} |"
    speeds = {(row["name"], row["batch"]): row["images_per_second"] for row in result("bench-train-h200")["rows"]}
    for name, told in (("ours", "ours"), ("stock", "torch.nn's layers and torch.compile")):
        yield "kernels", f"| {told} | {speeds[name, 32]:,.0f} images/s | {speeds[name, 256]:,.0f} images/s |"
    decoded = result("bench-input")
    yield "imagenet", f"{decoded['ours']:,.0f} images per second"
    yield "imagenet", f"two workers together decoded only {decoded['together']:.0f} images per second"
    cores = [
        [math.ceil(speeds["ours", n] / rate) for n in (32, 256)] for rate in (decoded["ours"], decoded["together"] / 2)
    ]
    yield "imagenet", f"{cores[0][0]} cores would keep an H200 busy at batch 32, and {cores[0][1]} cores at batch 256"
    yield "imagenet", f"{cores[1][0]} cores at batch 32 and {cores[1][1]} at batch 256"
    added = result("bench-monitor")["added"]
    yield "monitor", f"adds {added['on the batch']:.1%} to the training time"
    yield "monitor", f"instead of the batch, it adds {added['on a probe of 250']:.1%}"
    rows = result("algorithm2")["rows"]
    stock, ours = (rows[f"estimate_, layers of {name}"]["estimate_ / training"] for name in ("torch.nn", "batchnorm"))
    yield "statistics", f"takes {stock:.2f} times as long as a forward pass"
    yield "statistics", f"and {ours:.2f} times as long with this library's"
    whole, fx = (rows["fold"][f"fold / {other}"] for other in ("not folded", "torch.fx"))
    yield (
        "ship",
        f"takes {whole:.2f} times as long as the original, and {fx:.2f} times as long as one folded by torch.fx",
    )
    for figure, runs in (
        ("fig2", {"": "the longest took"}),
        ("fig4", {"rate": "sweep took up to", "bn": "member up to"}),
    ):
        for start, told in runs.items():
            files = (ROOT / "results" / figure).glob(f"{start}*.json")
            yield figure, f"{told} {max(json.loads(path.read_text())['seconds'] for path in files) / 60:.1f} minutes"


def mnist():
    steps = {level: values for level, *values in result("fig1")["steps to"]}
    plain, normalized = (result("fig1")["runs"][f"{kind}-bn"]["accuracy"]["running"] for kind in ("without", "with"))
    yield "reproduce", f"reaches 95% at step {steps['95%'][1]} and ends at {normalized:.1%}"
    yield "reproduce", f"reaches 95% at step {steps['95%'][0]} and ends at {plain:.1%}"
    (rate, accuracy), (best, higher) = (
        (row["rate"], [f"{row['mean'][i]:.1%}" for i in (0, -1)]) for row in result("comparison")["best against best"]
    )
    yield "reproduce", f"{rate:g} without BN and {best:g} with BN"
    yield "reproduce", f"is {higher[0]} at step 1,000 and {higher[1]} at step 50,000"
    yield "reproduce", f"Without BN, it is {accuracy[0]} and {accuracy[1]}"
    yield "insert", f"is {best:g} with batch normalization and {rate:g} without"
    yield "insert", f"{higher[0]} with batch normalization and {accuracy[0]} without"
    yield "insert", f"at step 50,000, it is {higher[1]} and {accuracy[1]}"
    section2 = result("section2")
    ignored = section2["b alone"]["ignored"]
    steps = len(ignored["loss"])
    yield (
        "reproduce",
        f"to {ignored['norm of b'][-1]:.2f} in {steps:,} steps, while the loss stays at {ignored['loss'][-1]:.4f}",
    )
    ends = {(run["variant"], run["rate"]): run["rows"][-1]["accuracy"] for run in section2["whole network"]}
    centered, whole = (ends[name, 1] for name in ("centering outside the gradient", "batch normalization"))
    yield "reproduce", f"at an accuracy of {centered:.1%}, and a network with batch normalization at {whole:.1%}"
    ends = {(run["optimizer"], run["network"]): run["accuracy"][-1] for run in result("optimizers")["runs"]}
    descent, adagrad = (ends[name, "with BN"] for name in ("batch gradient descent", "Adagrad"))
    yield "reproduce", f"{descent:.1%} (batch gradient descent) to {adagrad:.1%} (Adagrad)"
    yield "reproduce", f"they reach {between([end for (_, kind), end in ends.items() if kind == 'without BN'], '.1%')}"
    runs = {(run["nonlinearity"], run["batch normalization"]): run for run in result("placement")["runs"]}
    means = {key: f"{run['mean']:.1%}" for key, run in runs.items()}
    yield "reproduce", f"{means['sigmoid', 'after it']}, against {means['sigmoid', 'before it']} before it"
    after, before = (means["relu", f"{where} it"] for where in ("after", "before"))
    yield "reproduce", f"{after} with BN after the nonlinearity, and {before} before it"
    shapes = [shape for (name, _), run in runs.items() if name == "relu" for shape in run["shapes"]["3000"].items()]
    wu, u = ([shape["skewness"] for name, shape in shapes if name.startswith(start)] for start in ("Wu", "u"))
    yield "reproduce", f"skewness is {between(wu)}, and that of $u$ is {between(u)}"
    largest = result("scale")["largest"]
    yield "reproduce", f"at most {largest['output']:.0%} of what eps allows"
    yield "reproduce", f"at most {max(largest['du'], largest['dW']):.1%} of their norm"
    grown = {
        run["network"]: [n[-1] / n[0] for n in list(run["norms"].values())[:3]]
        for run in result("scale")["growth"]
        if run["rate"] == 1
    }
    yield "reproduce", f"by factors of {between(grown['with BN'])} instead of {between(grown['without BN'])}"
    near = {
        (name, matrix): between(
            [
                pair[matrix]["fraction between 1/2 and 2"]
                for pair in result("jacobian")["pairs"]
                if (pair["network"], pair["step"]) == (name, 5000)
            ],
            ".0%",
        )
        for name in ("with BN", "without BN")
        for matrix in ("J", "random")
    }
    yield "reproduce", f"{near['with BN', 'J']} of the singular values"
    yield "reproduce", f"with BN, and {near['without BN', 'J']} without BN"
    yield "reproduce", f"in this range: {near['with BN', 'random']} for matrices like the Jacobians with BN"
    yield "reproduce", f"and {near['without BN', 'random']} for matrices like those without BN"
    last = {
        (run["network"], run["std"]): f"{max(run['saturated'][-1].values()):.0%}"
        for run in result("saturation")["runs"]
    }
    yield "reproduce", f"{last['without BN', 1]} of the worst layer's outputs are saturated"
    yield "reproduce", f"without BN, and {last['with BN', 1]} with BN"
    yield "reproduce", f"{last['without BN', 0.1]} are saturated without BN, and {last['with BN', 0.1]} with BN"
    rows = {(row["network"], row["std"]): row["mean"] for row in result("init")["final test accuracy"]}
    good = {
        kind: [std for (name, std), mean in rows.items() if name == kind and mean > 0.9]
        for kind in ("with BN", "without BN")
    }
    yield (
        "reproduce",
        f"exceeds 90% from {between(good['with BN'], 'g')}, and without BN from {between(good['without BN'], 'g')}",
    )
    yield "reproduce", f"the accuracy is {rows['with BN', 10]:.1%} with BN and {rows['without BN', 10]:.1%} without"


@pytest.mark.parametrize("texts", [networks, other_benchmarks, mnist], ids=lambda function: function.__name__)
def test_pages_have_the_numbers_of_the_result_files(texts):
    paths = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
    pages = {path.stem: " ".join(path.read_text().replace("**", "").split()) for path in paths}
    missing = [(page, text) for page, text in texts() if text not in pages[page]]
    assert not missing
