"""Test parallel jobs: how each ends, what is shown while they run, and how they are stopped."""

import errno
import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest

from batchnorm.errors import JobsFailedError
from batchnorm.jobs import Stopped, _own, _Running, run_side_by_side, stop_signal
from batchnorm.progress import Display


@dataclass(frozen=True)
class Sum:
    """A job that writes one line to metrics.jsonl, and then adds up its numbers."""

    name: str
    folder: Path
    numbers: tuple
    steps: int = 2

    def finished(self):
        return (self.folder / "sum").exists()

    def __call__(self):
        print(f"{self.name} begins")
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": 2, "val_top1": 0.25}) + "\n")
        if self.numbers == ("stop",):
            raise Stopped("stopped at step 2")
        (self.folder / "sum").write_text(str(sum(map(int, self.numbers))))


def test_how_jobs_end(tmp_path, capfd):
    numbers = {"good": (1, 2), "stopped": ("stop",), "wrong": ("one",)}
    jobs = [Sum(name, tmp_path / name, given) for name, given in numbers.items()]
    with pytest.raises(JobsFailedError) as failed:
        run_side_by_side(jobs, jobs=3)
    assert (tmp_path / "good/sum").read_text() == "3"
    assert str(failed.value).startswith("wrong failed: exit status 1")
    assert str(failed.value).endswith("wrong begins\ninvalid literal for int() with base 10: 'one'")
    assert (tmp_path / "stopped/log.txt").read_text().endswith("stopped at step 2\n")
    shown = capfd.readouterr().err
    assert "good: started, 2 steps\n" in shown
    assert "good: finished at step 2 of 2, validation 25.00%\n" in shown
    assert "stopped: stopped at step 2 of 2" in shown
    assert "wrong: failed at step 2 of 2" in shown


def test_a_resumed_job_may_replace_lines_of_a_killed_one(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1, "l')
    with Display() as display:
        running = _Running(Sum("one", tmp_path, ()), display)
        metrics.write_text('{"step": 1, "loss": 0.5}\n')  # the display continues in the middle of this line
        running.show()
        metrics.write_text(metrics.read_text() + '{"step": 2, "loss": 0.4}\n')
        running.show()
    assert running.step == 2


def refuse_locks(monkeypatch, code):
    def fail(file):
        raise OSError(code, "why")

    monkeypatch.setattr("batchnorm.jobs.lock_file", fail)


def test_a_folder_that_another_process_has_locked_is_left_alone(tmp_path, monkeypatch, capsys):
    refuse_locks(monkeypatch, errno.EAGAIN)
    with pytest.raises(SystemExit) as stop, _own(tmp_path):
        pytest.fail("the job was run")
    assert stop.value.code == 1
    assert capsys.readouterr().err == f"another process is using {tmp_path}: wait for it to end\n"


def test_jobs_run_on_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    refuse_locks(monkeypatch, errno.ENOLCK)
    with _own(tmp_path) as log:
        os.write(log, b"begins")
    assert (tmp_path / "log.txt").read_text() == "begins"
    assert capsys.readouterr().err == f"cannot lock {tmp_path} (why): make sure that no other process uses it\n"


def test_without_time_nothing_starts(tmp_path):
    assert not run_side_by_side([Sum("good", tmp_path / "good", (1,))], jobs=1, minutes=-1.0)
    assert not list(tmp_path.iterdir())


def test_only_the_main_thread_catches_signals():
    requested = []

    def work():
        with stop_signal() as stop:
            requested.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert requested == [False]
