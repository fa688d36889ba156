"""Test processes that share a device: they run in parallel, but only one at a time measures."""

import os
import signal
import subprocess
import sys
import time
from itertools import count, pairwise
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch

from batchnorm import processes as module
from batchnorm.processes import ChildProcess, Remote, device_turn, map_on_cores, torch_threads, workers


def measured(number, path):
    if number < 2:  # the first two wait for each other, so that both processes have work
        (path.parent / str(number)).touch()
        while not all((path.parent / str(other)).exists() for other in (0, 1)):
            time.sleep(0.01)
    with device_turn(), device_turn():  # the lock is reentrant
        begin = time.monotonic()
        time.sleep(0.05)
        with open(path, "a") as file:
            file.write(f"{begin} {time.monotonic()}\n")
    return number, os.getpid()


def test_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    path = tmp_path / "times"
    with workers(2, device_turns=True) as run:
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
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with workers(processes) as run:
        assert len(list(run(int, [("1",)] * 5, 1.5))) == 1  # job 1 may start at time 1, job 2 may not start at 2


def write_handler(path):
    path.write_text(repr(signal.getsignal(signal.SIGINT)))


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has other signals")
def test_a_child_ignores_ctrl_c_until_it_sets_a_handler(tmp_path):
    before = signal.getsignal(signal.SIGINT)
    child = ChildProcess(write_handler, tmp_path / "handler")
    assert signal.getsignal(signal.SIGINT) is before
    while child.alive:
        time.sleep(0.01)
    assert "SIG_IGN" in (tmp_path / "handler").read_text()


def test_without_processes_the_work_is_done_here():
    with workers(0) as run:
        done = list(run(measured, [(2, os.devnull), (3, os.devnull)], 60.0))
        assert not list(run(int, [("1",)], 0.0))
        bad, good = run(int, [("x",), ("1",)], 60.0)
    assert isinstance(bad.error, ValueError)
    assert (good.result, good.error) == (1, None)
    assert [d.result for d in done] == [(2, os.getpid()), (3, os.getpid())]


def test_elsewhere_nobody_waits():
    assert module._lock is None
    with device_turn(), device_turn():
        pass


class Counter:
    def __init__(self, start):
        self.count = int(start)

    def add(self, number):
        self.count += number
        return self.count

    def exit_status_of_a_child(self):
        child = get_context("fork").Process(target=os._exit, args=(self.count,))
        child.start()
        child.join()
        return child.exitcode

    def die(self):
        os._exit(3)


def test_an_object_lives_in_another_process_and_keeps_its_state():
    counter, broken = Remote(Counter, "1"), Remote(Counter, "x")
    assert counter.result() is None  # the object exists
    assert [counter.call("add", 2), counter.call("add", 3)] == [3, 6]
    with pytest.raises(TypeError, match="unsupported operand"):
        counter.call("add", None)
    assert counter.call("add", 1) == 7  # it survives a failed call
    assert counter.call("exit_status_of_a_child") == 7  # a worker can start processes, as data loaders do
    with pytest.raises(RuntimeError, match="died with exit status 3"):
        counter.call("die")
    with pytest.raises(ValueError, match="invalid literal"):
        broken.result()
    for remote in (counter, broken):
        remote.close()
        assert not remote.alive


@pytest.mark.slow
def test_python_ends_without_waiting_for_a_process_that_nobody_closed():
    code = "from batchnorm.processes import Remote; import time; remote = Remote(time.sleep, 600)"
    assert not subprocess.run([sys.executable, "-c", code], timeout=120).returncode


def leave_a_process_behind():
    Remote(time.sleep, 600)


@pytest.mark.slow
def test_a_child_process_ends_without_waiting_for_one_of_its_own():
    child = ChildProcess(leave_a_process_behind)
    child._process.join(120)
    status = child.exit_status
    child.signal("SIGKILL")
    assert status == 0


def die_if_asked(number):
    if number == 1:
        os._exit(3)
    return number


def test_a_worker_that_dies_leaves_the_rest_to_the_others():
    with workers(2) as run:
        outcomes = list(run(die_if_asked, [(i,) for i in range(4)], 60.0))
        with pytest.raises(RuntimeError, match="all worker processes died; jobs that were not started: 1"):
            list(run(die_if_asked, [(1,), (2,)], 60.0))
    assert sorted(o.result for o in outcomes if o.error is None) == [0, 2, 3]
    (dead,) = (o for o in outcomes if o.error is not None)
    assert "died with exit status 3" in str(dead.error)


def threads_of(number):
    return number, torch.get_num_threads(), os.getpid()


@pytest.mark.parametrize("processes", [1, 2])
def test_map_on_cores_keeps_the_order_and_uses_one_thread_each(processes):
    torch.set_num_threads(2)
    found = map_on_cores(threads_of, range(4), processes)
    assert [number for number, *_ in found] == list(range(4))
    assert {threads for _, threads, _ in found} == {1}
    assert ({pid for *_, pid in found} == {os.getpid()}) == (processes == 1)
    assert torch.get_num_threads() == 2


def test_map_on_cores_raises_what_the_work_raises():
    with pytest.raises(ValueError, match="invalid literal"):
        map_on_cores(int, ["1", "x"], 1)


def test_the_threads_of_the_caller_are_left_alone():
    torch.set_num_threads(2)
    with torch_threads(1):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
