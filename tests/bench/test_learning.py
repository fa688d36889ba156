"""Test the benchmark that trains a stock network and its converted form by the same recipe."""

import json
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from batchnorm.bench.learning import learning
from batchnorm.cli import main

Image = pytest.importorskip("PIL.Image")


def tiny():
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 49, 4))


@pytest.fixture
def images(tmp_path, monkeypatch):
    """Save images of three classes that differ in color."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    rng = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for label in range(3):
            folder = tmp_path / "images" / split / f"class{label}"
            folder.mkdir(parents=True)
            for k in range(count):
                pixels = rng.integers(0, 100, (16, 16, 3), dtype=np.uint8)
                pixels[..., label] += 120
                Image.fromarray(pixels).save(folder / f"{k}.png")
    return tmp_path / "images"


def test_both_forms_train_by_the_same_recipe(images, tmp_path, capsys):
    out = tmp_path / "learning.json"
    settings = {"size": 16, "batch": 8, "epochs": 3, "rate": 0.1, "device": "cpu", "workers": 0, "jobs": 0}
    runs = learning(images, "test_learning:tiny", (0, 1), out=out, **settings)
    written = json.loads(out.read_text())
    assert [(run["form"], run["seed"]) for run in written["runs"]] == [
        ("stock", 0), ("stock", 1), ("converted", 0), ("converted", 1),
    ]  # fmt: skip
    assert written["data"] == {"train": {"images": 24, "classes": 3}, "val": {"images": 12, "classes": 3}}
    assert written["options"]["seeds"] == 2
    for stock, converted in zip(runs[:2], runs[2:], strict=True):
        # The runs have the same initial weights, crops and order, so their losses differ only by rounding.
        assert converted.losses == pytest.approx(stock.losses, rel=1e-3)
        assert len(stock.accuracies) == 3
    assert runs[0].losses != runs[1].losses
    assert runs[0].losses[-1] < runs[0].losses[0]
    assert written["same"] is (abs(written["difference of means"]) <= written["wider range"])
    assert "range over seeds" in capsys.readouterr().out


def test_options_that_cannot_be_used(images, capsys):
    assert main(["bench", "learning", "--data", str(images), "--seeds", "1", "1"]) == 2
    assert "seeds contains duplicates" in capsys.readouterr().err
    assert main(["bench", "learning", "--data", str(images), "--network", "torch.nn:Identity"]) == 2
    assert "torch.nn:Identity has no batch normalization layers" in capsys.readouterr().err


def test_one_seed_gives_no_verdict(images, tmp_path, capsys):
    out = tmp_path / "learning.json"
    options = {"size": 16, "batch": 8, "epochs": 1, "device": "cpu", "workers": 0, "jobs": 0}
    learning(images, "test_learning:tiny", (3,), out=out, **options)
    assert "one seed is not enough" in capsys.readouterr().out
    assert "same" not in json.loads(out.read_text())
