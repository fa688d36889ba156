"""Test that the benchmark runs; the measured values are not checked."""

import json

from batchnorm.bench.algorithm2 import algorithm2


def test_algorithm2(tmp_path):
    algorithm2(rounds=1, batch=2, size=32, batches=2, out=tmp_path / "a.json")
    assert set(json.loads((tmp_path / "a.json").read_text())["rows"]["fold"]) >= {"fold / torch.fx", "fold"}
