"""The tables of README, from result files."""

import json

from batchnorm.report.speeds import alternatives, networks, speeds
from batchnorm.report.summary import MARKERS, _between_markers


def write(folder, *more):
    row = {
        "network": "torchvision:resnet50", "mode": "eager", "batch": 256, "examples": 256, "speedup": 1.304,
        "interval": [1.29, 1.31],
    }  # fmt: skip
    rows = [
        row,
        {**row, "batch": 32, "examples": 32, "speedup": 0.9},
        {**row, "mode": "graph", "examples": 128, "speedup": 1.5},
        {**row, "network": "timm:resnet50", "speedup": 1.4, "interval": [0.9, 1.8]},
        {"network": "torchvision:resnet18", "mode": "eager", "batch": 256, "failed": "the loss | differs"},
        *({**row, **one} for one in more),
    ]
    bar = {"what": "eager", "wanted": 1.3, "measured": 1.304, "at_least": True, "reached": True}
    missed = {"what": "memory", "wanted": 1.02, "measured": 1.27, "at_least": False, "reached": False}
    result = {
        "environment": {"gpu": "NVIDIA H200", "torch": "2.11"}, "machine": {"steps": "bf16"},
        "bars": [bar, missed, {**bar, "measured": None, "reached": None}], "rows": rows,
    }  # fmt: skip
    (folder / "networks-h200.json").write_text(json.dumps(result))


def test_networks(tmp_path):
    assert networks(tmp_path) == ""
    write(tmp_path)
    lines = networks(tmp_path).splitlines()
    assert lines[2].startswith("- *eager*: ")
    assert lines[7:12] == [
        "| network | eager, 256 | eager, 32 | graph, 256 |",
        "|---|---|---|---|",
        "| resnet50 (timm) | *1.40* |  |  |",
        "| resnet50 (torchvision) | 1.30 | 0.90 | 1.50* |",
        "| resnet18 | failed |  |  |",
    ]
    assert lines[5] == (
        "A speedup in italics is within the noise: its 95% interval includes 1."
        " Missed goals: memory 1.27 (goal: at most 1.02). Not measured yet: compiled, backend."
        " * Measured with a smaller batch, because the full batch does not fit into memory."
    )


def test_all_modes_and_other_uses_of_a_network(tmp_path):
    write(tmp_path, {"mode": "compiled"}, {"mode": "backend"}, {"mode": "nchw"}, {"mode": "ddp", "speedup": 1.2})
    lines = networks(tmp_path).splitlines()
    assert lines[9] == "| network | eager, 256 | eager, 32 | graph, 256 | compiled, 256 | backend, 256 |"
    assert not any("Not measured yet" in line for line in lines)
    assert lines[-4:] == [
        "| other uses | resnet50 (torchvision), 256 |",
        "|---|---|",
        "| NCHW instead of channels_last | 1.30 |",
        "| DistributedDataParallel in one process | 1.20 |",
    ]


def test_alternatives_have_their_numbers_from_files(tmp_path):
    assert "times as" not in alternatives(tmp_path)
    write(tmp_path, {"mode": "backend", "speedup": 1.1})
    lines = alternatives(tmp_path).splitlines()
    assert len(lines) == 2 + 6
    assert "an eager ResNet-50 trains [1.30 times as fast](results/networks-h200.json)" in lines[2]
    assert "a compiled ResNet-50 trains [1.10 times as fast](results/networks-h200.json)" in lines[5]


def test_the_table_says_which_kernels_it_compares(tmp_path):
    def row(op, layout, over_compile, worst):
        over = {"compile": {"geometric_mean": over_compile, "worst": worst}, "eager": {"geometric_mean": 2.5}}
        return {"op": op, "layout": layout, "dtype": "bfloat16", **over}

    rows = [row("BN+ReLU", "NHWC", 1.52, 1.1), row("BN+add+ReLU", "NCHW", 1.31, 0.98)]
    result = {"environment": {"gpu": "NVIDIA H200", "torch": "2.11"}, "summary": rows}
    (tmp_path / "kernels-h200.json").write_text(json.dumps(result))
    over_compile = "over torch.compile 1.31 (BN+add+ReLU, NCHW) to 1.52 (BN+ReLU, NHWC), worst 0.98"
    told = f"{over_compile}; over eager 2.50 or more"
    assert told in speeds(tmp_path)


def test_learning(tmp_path):
    form = {"mean": 0.5, "lowest": 0.49, "highest": 0.51}
    env = {"gpu": "NVIDIA H200", "torch": "2.11"}
    result = {"environment": env, "options": {"seeds": 3}, "stock": form, "converted": form, "same": True}
    (tmp_path / "same-learning-h200.json").write_text(json.dumps(result))
    told = "stock 50.0%, converted 50.0%: the difference is within the range over seeds"
    assert f"[{told}](results/same-learning-h200.json) | NVIDIA H200, torch 2.11, 3 seeds" in speeds(tmp_path)
    del result["same"]
    (tmp_path / "same-learning-h200.json").write_text(json.dumps(result))
    assert "converted 50.0%: one seed cannot tell whether they differ" in speeds(tmp_path)


def test_several_places_of_a_page():
    begin, end = MARKERS
    page = f"a {begin} old {end} b {begin}{end} c"
    assert _between_markers(page, ["1", "2"]) == f"a {begin}\n1\n{end} b {begin}\n2\n{end} c"
