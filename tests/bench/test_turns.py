"""Processes that share a device: side by side but one at a time where they measure."""

import os
import time
from itertools import count, pairwise
from types import SimpleNamespace

import pytest

from batchnorm.bench import turns
from batchnorm.bench.turns import alone, workers


def measured(number, path):
    if number < 2:  # the first two wait for each other, so that both processes have work
        (path.parent / str(number)).touch()
        while not all((path.parent / str(other)).exists() for other in (0, 1)):
            time.sleep(0.01)
    with alone(), alone():  # who has the device may ask again
        begin = time.monotonic()
        time.sleep(0.05)
        with open(path, "a") as file:
            file.write(f"{begin} {time.monotonic()}\n")
    return number, os.getpid()


def test_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    path = tmp_path / "times"
    with workers(2) as run:
        done = list(run(measured, [(i, path) for i in range(6)], 60.0))
        problems = list(run(int, [("1",), ("x",), ("2",)], 60.0))
    assert sorted(d.result[0] for d in done) == list(range(6))
    assert len({d.result[1] for d in done}) == 2
    spans = sorted(tuple(map(float, line.split())) for line in path.read_text().splitlines())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert sorted(d.result for d in problems if d.error is None) == [1, 2]
    (bad,) = (d for d in problems if d.error is not None)
    assert bad.job == ("x",)
    assert isinstance(bad.error, ValueError)
    assert "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ


@pytest.mark.parametrize("processes", [0, 1])
def test_none_begins_after_the_time_is_up(monkeypatch, processes):
    clock = count()
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with workers(processes) as run:
        assert len(list(run(int, [("1",)] * 5, 1.5))) == 1  # asked at 1 and at 2


def test_without_processes_the_work_is_done_here():
    with workers(0) as run:
        done = list(run(measured, [(2, os.devnull), (3, os.devnull)], 60.0))
        assert not list(run(int, [("1",)], 0.0))
        bad, good = run(int, [("x",), ("1",)], 60.0)
    assert isinstance(bad.error, ValueError)
    assert (good.result, good.error) == (1, None)
    assert [d.result for d in done] == [(2, os.getpid()), (3, os.getpid())]


def test_elsewhere_nobody_waits():
    assert turns._lock is None
    with alone(), alone():
        pass
