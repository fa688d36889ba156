import os
import subprocess
import sys

import pytest

from batchnorm.reproduce.imagenet.session import CONTROL, FOLDERS, SHARE, shared_gpu


@pytest.fixture
def service(tmp_path, monkeypatch):
    """A control program that writes down how it is called, first of all on the path."""
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
