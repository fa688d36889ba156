"""Test that only one process at a time can use a run's folder."""

import json
import multiprocessing
import os
import signal

import pytest
from training import assert_same_outcome, start, start_and_kill, train_small

from batchnorm.train.lock import locked


def try_to_lock(folder, answers):
    try:
        with locked(folder):
            answers.put("locked")
    except ValueError as error:
        answers.put(str(error))


def in_another_process(folder):
    context = multiprocessing.get_context("spawn" if os.name == "nt" else "fork")
    answers = context.SimpleQueue()
    process = context.Process(target=try_to_lock, args=(folder, answers))
    process.start()
    process.join()
    return answers.get()


def test_a_second_process_is_refused_until_the_first_has_ended(tmp_path):
    folder = tmp_path / "runs" / "a"
    with locked(folder):
        assert in_another_process(folder) == (
            f"another process is training in {folder}: wait for it to end, or choose another --out"
        )
        (folder / "recipe.json").write_text("{}")
    assert [path.name for path in folder.iterdir()] == ["recipe.json"]
    assert in_another_process(folder) == "locked"


def test_a_lock_file_that_was_left_behind_locks_nothing(tmp_path):
    (tmp_path / "train.lock").touch()
    assert in_another_process(tmp_path) == "locked"


def test_a_second_training_touches_nothing(data, tmp_path):
    with locked(tmp_path / "run"):
        process = start(data, tmp_path / "run")
        process.join()
        assert process.exitcode == 1
        assert [path.name for path in (tmp_path / "run").iterdir()] == ["train.lock"]
    train_small(data, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == 12
    assert not (tmp_path / "run" / "train.lock").exists()


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL")
def test_a_killed_run_resumes_at_once_though_its_workers_live_on(data, tmp_path):
    start_and_kill(3, data, tmp_path / "parts", workers=1)
    train_small(data, tmp_path / "parts")
    train_small(data, tmp_path / "whole")
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")
