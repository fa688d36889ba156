"""The benchmark of the kernels goes on where an earlier sitting stopped."""

import json

import pytest
import torch

from batchnorm.bench.kernels import earlier_rows, key_of, provenance, write
from batchnorm.bench.layers import all_layers, short_list

MACHINE = {"device": "some GPU", "torch": "2.11"}
LAYER = short_list()[0]


def row(kernels, layout="NHWC", op="BN+ReLU"):
    us = {"batchnorm": [1.0, 2.0], "eager": [3.0, 4.0], "compile": [2.0, 3.0]}
    form = {"layout": layout, "dtype": "bfloat16", "op": op, "megabytes": 51.0, "limit_us": [0.5, 1.0]}
    return {**LAYER._asdict(), **form, "us": us, "kernels": kernels}


def test_rows_of_the_same_kernels_are_kept_by_what_they_measure(tmp_path):
    path = tmp_path / "results" / "kernels.json"
    key = key_of(LAYER, True, torch.bfloat16, False)
    other = key_of(LAYER, False, torch.bfloat16, True)
    assert len({key, other, key_of(LAYER, True, torch.float32, False)}) == 3
    assert earlier_rows(path, MACHINE, "new") == {}
    write({"hardware": MACHINE, "rows": {key: row("new"), other: row("old", "NCHW", "BN+add+ReLU")}}, path)
    assert list(earlier_rows(path, MACHINE, "new")) == [key]
    assert list(earlier_rows(path, MACHINE, "old")) == [other]
    report = json.loads(path.read_text())
    assert [entry["layers"] for entry in report["summary"]] == [1, 1]
    assert report["bars"]


def test_results_of_another_machine_are_not_overwritten(tmp_path):
    path = tmp_path / "kernels.json"
    write({"hardware": {"device": "another GPU"}, "rows": {}}, path)
    with pytest.raises(ValueError, match=r"another GPU.*give another --out"):
        earlier_rows(path, MACHINE, "new")


def test_provenance_knows_the_kernels(monkeypatch, tmp_path):
    from batchnorm import ops

    found = provenance("abc")
    assert found["commit"] == "abc"
    assert found == provenance("abc")
    (tmp_path / "one.py").write_text("x = 1")
    monkeypatch.setattr(ops, "__file__", str(tmp_path / "__init__.py"))
    first = provenance(None)["kernels"]
    (tmp_path / "one.py").write_text("x = 2")
    assert len({found["kernels"], first, provenance(None)["kernels"]}) == 3


def test_layers_are_distinct():
    assert len(set(all_layers())) == len(all_layers()) == 66
    assert set(short_list()) <= set(all_layers())
