"""Test ``batchnorm diagnose`` on a run."""

import shutil
from dataclasses import replace

import pytest
from training import small, striped_folder, train_small

from batchnorm.cli import main
from batchnorm.train import diagnose_command
from batchnorm.train.recipe import Recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("diagnose")
    data = striped_folder(root / "images")
    train_small(data, root / "run", small(epochs=1))
    return root / "run", data


def test_a_run(run, capsys):
    folder, data = run
    assert main(["diagnose", str(folder), "--data", str(data), "--batches", "2", "--workers", "0"]) == 0
    out = capsys.readouterr().out
    assert "in 69 batch normalization layers, on 2 batches" in out
    assert "not checked\n  whether running averages are stale or mix different inputs (5 or more batches" in out
    assert "instead of" not in out
    assert "optimizer" not in out  # the optimizer's checks ran, because the command makes the run's optimizer


def test_fewer_batches_than_asked_for(run, capsys):
    folder, data = run
    assert main(["diagnose", str(folder), "--data", str(data), "--workers", "0"]) == 0
    note, summary, *_ = capsys.readouterr().out.splitlines()
    assert note == "batches: 4 instead of 20, because an epoch of this run has no more"
    assert summary.endswith("on 4 batches")


@pytest.mark.parametrize(
    ("held_out", "missing", "split"),
    [(0.0, "val", "train"), (0.2, "nothing", "train"), (0.2, "val", "train[0.2:]")],
    ids=["no validation set", "a validation set that the run did not have", "a held-out share"],
)
def test_the_images_are_those_that_the_run_trained_on(run, tmp_path, monkeypatch, held_out, missing, split):
    folder, data = (shutil.copytree(path, tmp_path / path.name, ignore=shutil.ignore_patterns(missing)) for path in run)
    recipe = replace(Recipe.read(folder / "recipe.json"), validate=held_out)
    (folder / "recipe.json").write_text(recipe.to_json())
    opened = []
    real = diagnose_command.open_images
    monkeypatch.setattr(
        diagnose_command, "open_images", lambda path, name, **given: opened.append(name) or real(path, name, **given)
    )
    assert main(["diagnose", str(folder), "--data", str(data), "--batches", "1", "--workers", "0"]) == 0
    assert opened == [split]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["nowhere"], "nowhere does not exist: give the folder of a run"),
        (["RUN", "--batches", "0"], "batches=0: must be 1 or more"),
    ],
)
def test_errors(run, capsys, words, error):
    folder, data = run
    given = [str(folder) if word == "RUN" else word for word in words]
    assert main(["diagnose", *given, "--data", str(data), "--workers", "0"]) == 2
    assert error in capsys.readouterr().err
