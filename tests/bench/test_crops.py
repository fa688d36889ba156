"""Test that the benchmark runs, on a network with few filters, and reports what it measured."""

import json

from batchnorm.bench.crops import crops
from batchnorm.bench.input import photographs
from batchnorm.evaluate import Crops, open_squares


def test_it_runs_and_leaves_a_result(tmp_path):
    options = {"size": 32, "width": 0.04, "images": 3, "batch_size": 24, "workers": 0, "rounds": 1, "device": "cpu"}
    result = crops(**options, out=tmp_path / "result.json")
    assert set(result["share of forward"]) == {"crops", "files"}
    assert all(rate > 0 for rates in result["crops per second"].values() for rate in rates)
    assert json.loads((tmp_path / "result.json").read_text())["options"]["images"] == 3


def test_its_images_have_all_crops(tmp_path):
    (squares,) = open_squares(photographs(tmp_path, "val", 3), crops=Crops.of(144, 32), batch_size=36)
    assert [len(level) for level in squares.pixels] == [9, 9, 9, 9]
    # Photographs of this size and quality take 30 to 150 kB, so the generated images must be about as large.
    assert all(20_000 < path.stat().st_size < 200_000 for path in tmp_path.rglob("*.jpg"))
