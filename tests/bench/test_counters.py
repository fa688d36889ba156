import json

import pytest

from batchnorm.bench import counters as bench
from batchnorm.bench.counters import METRICS, READY, CountedPass, line, matched
from batchnorm.errors import JobsFailedError

STREAMED = CountedPass(("resnet50", 256, 256, 56), "NHWC", "BN+ReLU", "forward", "stream", 400)
RESIDENT = CountedPass(("resnet50", 64, 1024, 14), "NHWC", "BN+ReLU", "backward", "resident", 100)


def told(*passes):
    return [READY + json.dumps(one._asdict()) for one in passes]


def table(*values):
    """Return a CSV file as ncu writes it: a row of names, a row of units, and one row per kernel launch."""
    rows = [["ID", "Kernel Name", *METRICS], ["", "", *["unit"] * len(METRICS)]]
    rows += [[str(i), "forward", *[value] * len(METRICS)] for i, value in enumerate(values)]
    rows.insert(2, ["9", "fill(int)", *["0"] * len(METRICS)])  # a kernel of torch
    return [",".join(f'"{cell}"' for cell in row) for row in rows]


def test_launches_belong_to_passes_in_order():
    output = "\n".join(["==PROF== Connected", *told(STREAMED, RESIDENT), "==PROF== done", *table("1,200", "3", "7.5")])
    rows = list(matched(output))
    assert [(row["direction"], row["read"]) for row in rows] == [("forward", 1200), ("forward", 3), ("backward", 7.5)]
    assert "read 3.00 and wrote 3.00 times" in line(rows[0])


def test_a_counter_that_is_missing_is_no_number():
    (row,) = matched("\n".join([*told(RESIDENT), *table("n/a")]))
    assert row["read"] is None
    assert "read ? and wrote" in line(row)


def test_a_launch_too_many_is_an_error():
    with pytest.raises(RuntimeError, match="ncu listed 2 launches of our kernels, but 1 were expected"):
        list(matched("\n".join([*told(RESIDENT), *table("1", "2")])))


def test_without_ncu_a_sentence(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="ncu was not found on PATH"):
        bench.counters()


def test_what_ncu_says_is_passed_on(monkeypatch, tmp_path):
    (tmp_path / "ncu").write_text("#!/bin/sh\necho ERR_NVGPUCTRPERM; exit 3\n")
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bench, "require_gpu", lambda: None)
    with pytest.raises(JobsFailedError, match="ncu failed: ERR_NVGPUCTRPERM"):
        bench.counters()
