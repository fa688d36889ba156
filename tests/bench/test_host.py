"""Test the benchmark of host time: how much CPU time eager CUDA layers take, this library's and torch's."""

import pytest
import torch

from batchnorm.bench.host import host
from batchnorm.results import read_json


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_it_needs_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="needs a CUDA device"):
        host(out=tmp_path / "host.json")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_every_call_is_timed(tmp_path):
    rows = host(rounds=1, out=tmp_path / "host.json")
    assert len(rows) == 24
    assert all(row["torch_us"] > 0 and row["ours_us"] > 0 for row in rows)
    assert read_json(tmp_path / "host.json")["extension"] == "in use"
