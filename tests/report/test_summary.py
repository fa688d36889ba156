"""The tables of README, from result files."""

import json

from batchnorm.report.summary import networks, tables


def write(folder, **changed):
    row = {
        "network": "timm/resnet50", "mode": "eager", "batch": 256, "examples": 256, "speedup": 1.304,
        "interval": [1.29, 1.31],
    }  # fmt: skip
    rows = [
        row,
        {**row, "mode": "graph", "examples": 128, "speedup": 1.5, "interval": [1.45, 1.55]},
        {"network": "torchvision/resnet18", "mode": "eager", "batch": 256, "failed": "the loss | differs"},
    ]
    bar = {"what": "eager", "wanted": 1.3, "measured": 1.304, "at_least": True, "reached": True}
    missed = {"what": "memory", "wanted": 1.02, "measured": 1.27, "at_least": False, "reached": False}
    result = {
        "environment": {"gpu": "NVIDIA H200", "torch": "2.11"}, "machine": {"steps": "bf16"},
        "bars": [bar, missed, {**bar, "measured": None, "reached": None}], "rows": rows, **changed,
    }  # fmt: skip
    (folder / "networks-h200.json").write_text(json.dumps(result))


def test_networks_are_the_first_speed_table_once_they_are_measured(tmp_path):
    assert networks(tmp_path) == ""
    assert "bench networks" not in tables(tmp_path)
    write(tmp_path)
    lines = networks(tmp_path).splitlines()
    assert lines[2:6] == [
        "| training step, times as fast as stock | eager, batch 256 | CUDA graph, batch 256 |",
        "|---|---|---|",
        "| timm/resnet50 | 1.30 (1.29 to 1.31) | 1.50 (1.45 to 1.55), batch 128 |",
        "| torchvision/resnet18 | failed: the loss   differs |  |",
    ]
    assert lines[-1] == "1 of 2 bars are reached; missed: memory 1.27 (to be at most 1.02)."
    whole = tables(tmp_path)
    assert whole.index("bench networks") < whole.index("| speed | command |")


def test_learning(tmp_path):
    form = {"mean": 0.5, "lowest": 0.49, "highest": 0.51}
    env = {"gpu": "NVIDIA H200", "torch": "2.11"}
    result = {"environment": env, "options": {"seeds": 3}, "stock": form, "converted": form, "same": True}
    (tmp_path / "same-learning-h200.json").write_text(json.dumps(result))
    told = "stock 50.0% (49.0% to 51.0%), converted 50.0% (49.0% to 51.0%): the same within the seeds' range"
    assert f"[{told}](results/same-learning-h200.json) | NVIDIA H200, torch 2.11, 3 seeds" in tables(tmp_path)
