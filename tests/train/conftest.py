import pytest
from training import striped_folder, train_small

import batchnorm as bn
from batchnorm.cli import main


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Save generated images of three classes: 30 for training and 12 for validation."""
    return striped_folder(tmp_path_factory.mktemp("stripes"))


@pytest.fixture(scope="session")
def files(data):
    """Return the validation images, in the order of validation."""
    return sorted((data / "val").rglob("*.png"))


@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    """Return the folder of a finished run; tests share it, so they must copy it before they change it."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    train_small(data, folder, evaluate_every=0)
    return folder


@pytest.fixture(scope="session")
def run(finished):
    return bn.load(finished)


@pytest.fixture
def refusal(capsys):
    """Return a function that runs a command, which must fail, and returns the one line of its error message."""

    def refusal(*words):
        assert main([*map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.count("\n") == 1
        return err.rstrip("\n")

    return refusal
