import pytest
import torch

from batchnorm.report.page import write_report
from batchnorm.report.runs import read_runs
from batchnorm.reproduce.network_run import run
from batchnorm.reproduce.training import Setting


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A real pair of runs, short."""
    out = tmp_path_factory.mktemp("runs")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, batch_norm in (("with-bn", True), ("without-bn", False)):
        run(Setting(batch_norm, steps=200), out / name)
    torch.set_num_threads(threads)
    return out


@pytest.fixture(scope="session")
def page(folder):
    return write_report(read_runs([folder]), folder / "report.html")
