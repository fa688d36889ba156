"""Test the benchmark of fine-tuning, with batch statistics and with frozen statistics, on a few generated images."""

import json
import shutil

from training import striped_folder

from batchnorm.cli import main


def test_every_cell_is_trained_and_the_best_rate_counts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    data = striped_folder(tmp_path / "images")
    for split in ("train", "val"):
        shutil.copytree(data / split / "class0", data / split / "class3")
    words = "--classes 4 --images 3 --batches 2 --rates 0.01 0.1 --seeds 2 --size 16 --first-epochs 1 --epochs 1"
    out = tmp_path / "fine-tuning.json"
    given = ["bench", "fine-tuning", "--data", "~/images", *words.split(), "--processes", "1", "--out", str(out)]
    assert main(given) == 0
    found = json.loads(out.read_text())
    assert [(row["batch"], row["statistics"]) for row in found["rows"]] == [
        (batch, f"{kind} statistics") for batch in (2,) for kind in ("batch", "frozen")
    ]
    assert len(found["tried"]) == 4
    for row in found["rows"]:
        cell = [one for one in found["tried"] if (one["batch"], one["statistics"]) == (row["batch"], row["statistics"])]
        assert row["mean"] == max(one["mean"] for one in cell)
        assert len(row["accuracies"]) == 2
    assert "batch size 2, frozen statistics: " in capsys.readouterr().out
    assert main([*given, "--data", str(tmp_path / "absent")]) == 2
    assert "absent is not a folder: give one with train/CLASS/*.jpg" in capsys.readouterr().err
    assert main([*given, "--classes", "10"]) == 2
    assert "has only 4 classes, but --classes=10: choose a smaller --classes" in capsys.readouterr().err
