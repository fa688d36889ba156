"""The benchmarks run; what they measure is for result files, not for tests."""

import json

from batchnorm.bench.algorithm2 import algorithm2


def test_algorithm2(tmp_path, capsys):
    algorithm2(rounds=1, batch=2, size=32, batches=2, out=tmp_path / "a.json")
    assert set(json.loads((tmp_path / "a.json").read_text())["fold"]) >= {"fold / torch.fx", "fold"}
