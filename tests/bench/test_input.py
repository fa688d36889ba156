"""Test that the input benchmark runs; the measured values are not checked."""

import json

import pytest
from pictures import real_jpegs

from batchnorm.bench import input as bench
from batchnorm.bench.input import input_rate


def test_it_measures_and_says_how_many_cores_feed_a_gpu(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    for name, data in real_jpegs(60):
        (folder / name).write_bytes(data)
    monkeypatch.setattr(bench._workers_rate, "__defaults__", (0.1,))
    out = tmp_path / "result.json"
    rate = input_rate(tmp_path, images=60, rounds=1, workers=1, size=32, gpu_rate=1000, out=out)
    assert json.loads(out.read_text())["ratio"] == rate.ratio
    assert rate.images == 60
    assert min(rate.plain, rate.ours, rate.together) > 0
    lines = capsys.readouterr().out
    assert "images/s per core" in lines
    assert "a GPU that trains on 1000 images/s needs" in lines


def test_it_makes_its_own_pictures(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.photographs, "__defaults__", (20,))
    monkeypatch.setattr(bench._workers_rate, "__defaults__", (0.1,))
    assert input_rate(images=10, rounds=1, workers=1, size=64, out=tmp_path / "r.json").data.startswith(
        "generated images"
    )


def test_it_times_nothing_where_the_loaders_differ(monkeypatch):
    monkeypatch.setattr(bench.photographs, "__defaults__", (4,))
    right = bench._plain
    monkeypatch.setattr(bench, "_plain", lambda *arguments: 255 - right(*arguments))
    with pytest.raises(RuntimeError, match="nothing was timed"):
        input_rate(images=4, rounds=1, workers=1)
