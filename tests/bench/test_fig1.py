"""Test that the benchmarks of Figure 1 run and report what they measured; speed is not checked."""

import json

from batchnorm.bench.fig1 import fig1
from batchnorm.bench.monitor import monitor


def test_bench_fig1(tmp_path):
    fig1(steps=20, out=tmp_path / "b.json")
    result = json.loads((tmp_path / "b.json").read_text())
    names = {"eager", "one process", "make run"}
    assert result["seconds"].keys() == result["accuracy"].keys() == result["times faster than eager"].keys() == names
    assert result["accuracy"]["one process"] == result["accuracy"]["make run"]
    assert "load average before" in result["environment"]


def test_bench_monitor(tmp_path):
    monitor(steps=2, rounds=1, out=tmp_path / "b.json")
    result = json.loads((tmp_path / "b.json").read_text())
    assert set(result["added"]) == {"no monitor", "on the batch", "on a probe of 250"}
