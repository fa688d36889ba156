import pytest
import torch
from training import striped_folder, train_small

import batchnorm as bn
from batchnorm.cli import main


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Generated images: 30 to train on, 12 to validate on, of three classes."""
    return striped_folder(tmp_path_factory.mktemp("stripes"))


@pytest.fixture(scope="session")
def files(data):
    """The images to validate on, in validation's order."""
    return sorted((data / "val").rglob("*.png"))


@pytest.fixture(scope="session")
def finished(data, tmp_path_factory):
    """The folder of a run that was trained to its end; copy it to change it."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    train_small(data, folder, evaluate_every=0)
    return folder


@pytest.fixture(scope="session")
def run(finished):
    return bn.load(finished)


@pytest.fixture
def refusal(capsys):
    """Run a command that must refuse, and return the one line that it prints."""

    def refusal(*words):
        assert main([*map(str, words)]) == 2
        out, err = capsys.readouterr()
        assert not out
        assert err.count("\n") == 1
        return err.rstrip("\n")

    return refusal


@pytest.fixture(autouse=True)
def _one_thread():
    # Small tensors on shared cores: threads would only wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
