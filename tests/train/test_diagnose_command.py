"""Test ``batchnorm diagnose`` on a run."""

import pytest
from training import small, striped_folder, train_small

from batchnorm.cli import main


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
    assert "not checked: whether running averages are stale (pass at least 5 batches)\n" in out
    assert "optimizer" not in out  # the command makes the run's optimizer


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
