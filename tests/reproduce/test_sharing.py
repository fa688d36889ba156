"""Test GPU sharing on a CPU: the MPS service, the shares, and the check of a network's convolutions."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from batchnorm.reproduce.imagenet.sharing import (
    CONTROL,
    CONVOLUTIONS,
    FOLDERS,
    SHARE,
    SHARES,
    check_share,
    share_of,
    shared_gpu,
    wrong_convolution,
)
from batchnorm.train import RECIPES

SMALL = replace(RECIPES["inception"], size=32, width=0.04, batch_size=4)


@pytest.fixture
def service(tmp_path, monkeypatch):
    """Put a fake control program first on the PATH; it logs how it is called."""
    log, program = tmp_path / "log", tmp_path / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$@ $(cat)" >> {log}\ntest -d "$CUDA_MPS_PIPE_DIRECTORY" && exit ${{REFUSES:-0}}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    for name in (FOLDERS[0], SHARE):
        monkeypatch.delenv(name, raising=False)
    return log


def seen_by_a_child():
    names = (FOLDERS[0], "BATCHNORM_LAUNCHES_AT_ONCE", SHARE)
    code = f"import os; print(*(os.environ.get(name) for name in {names}))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split()


def test_processes_meanwhile_share_and_everything_is_as_before_afterwards(service):
    before = dict(os.environ)
    with shared_gpu(8) as shared:
        assert shared
        folder, launches, share = seen_by_a_child()
        assert os.path.isdir(folder)
        assert (launches, share) == ("0", "25")
    assert service.read_text().split() == ["-d", "quit"]
    assert not os.path.exists(folder)
    assert dict(os.environ) == before


def test_it_ends_after_an_error_too(service):
    with pytest.raises(KeyboardInterrupt), shared_gpu(2):
        raise KeyboardInterrupt
    assert "quit" in service.read_text()


def test_a_service_that_does_not_start_is_done_without(service, monkeypatch):
    monkeypatch.setenv("REFUSES", "1")
    with shared_gpu(4) as shared:
        assert not shared
        assert seen_by_a_child() == ["None", "0", "50"]
    assert "quit" not in service.read_text()


def test_a_service_that_is_there_is_left_alone(service, monkeypatch):
    monkeypatch.setenv(FOLDERS[0], "/somewhere")
    with shared_gpu(4) as shared:
        assert shared
    assert not service.exists()


def test_one_process_needs_nothing(service):
    with shared_gpu(1) as shared:
        assert not shared
        assert seen_by_a_child() == ["None", "None", "None"]
    assert not service.exists()


def test_every_number_of_processes_gets_a_share_that_was_checked():
    # Each of six processes needs 2/6 of the multiprocessors, or 33 percent. At 33 percent, bfloat16 convolutions return
    # NaN, so each process gets 50.
    assert {share_of(processes) for processes in range(2, 100)} == set(SHARES)
    assert share_of(6) == 50


def test_a_share_that_was_not_checked_is_refused(service, monkeypatch):
    monkeypatch.setenv(SHARE, "33")
    with (
        pytest.raises(ValueError, match=f"{SHARE}=33: torch's convolutions may be wrong .* set it to 25, 50 or 100"),
        shared_gpu(6),
    ):
        pass
    assert not service.exists()
    monkeypatch.setenv(SHARE, "50")
    with shared_gpu(8):
        assert seen_by_a_child()[2] == "50"


class Broken(TorchDispatchMode):
    """Make the results of bfloat16 convolutions wrong after a number of calls, as they are at some shares of a GPU."""

    def __init__(self, operator, change, after=0):
        super().__init__()
        self.operator, self.change, self.left = operator, change, after

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is not self.operator or args[0].dtype != torch.bfloat16:
            return found
        self.left -= 1
        if self.left >= 0:
            return found
        return self.change(found) if isinstance(found, torch.Tensor) else (found[0], self.change(found[1]), found[2])


@pytest.mark.parametrize("name", ["inception", "bn-baseline"])
def test_right_convolutions_pass(name):
    recipe = replace(SMALL, batch_norm=RECIPES[name].batch_norm)
    assert wrong_convolution(recipe, 6, "cpu") is None


@pytest.mark.parametrize("operator", CONVOLUTIONS)
def test_wrong_convolutions_are_found(operator):
    with Broken(operator, lambda t: t * float("nan"), after=3):
        assert "has a relative error of nan" in wrong_convolution(SMALL, 6, "cpu")
    with Broken(operator, lambda t: 1.1 * t, after=3):
        assert "has a relative error of 0.1, more than the 0.05 allowed for rounding" in wrong_convolution(
            SMALL, 6, "cpu"
        )


def test_wrong_convolutions_of_a_validation_batch_are_found():
    class LargeBatches(Broken):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            wide = func is self.operator and len(args[0]) == 6
            return super().__torch_dispatch__(func, types, args, kwargs) if wide else func(*args, **(kwargs or {}))

    with LargeBatches(CONVOLUTIONS[0], lambda t: t * float("nan")):
        assert "convolution of tensors with shapes (6, " in wrong_convolution(SMALL, 6, "cpu")


@pytest.mark.slow
def test_the_check_runs_in_a_process_of_its_own():
    check_share([SMALL, replace(SMALL, seed=1)], 6, "cpu")
    with pytest.raises(ValueError, match="32 px or more"):
        check_share([replace(SMALL, size=16)], 6, "cpu")
