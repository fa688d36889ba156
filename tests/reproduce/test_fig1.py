"""Test a short run of Figure 1's experiment: its files, stopping and resuming, and the accuracy that BN gains."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch

from batchnorm.cli import main
from batchnorm.report.runs import read_runs
from batchnorm.reproduce.mnist.fig1 import Fig1, fig1
from batchnorm.reproduce.mnist.network_run import NetworkRun, save
from batchnorm.reproduce.mnist.training import Setting

HOLDER = """
import sys
from pathlib import Path
from batchnorm.train.lock import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "short"
    fig1(Fig1(steps=600, out=out, processes=1))
    return out


def test_a_run_leaves_its_files(finished):
    files = {"fig1.png", "fig1.svg", "report.html", "result.json"}
    assert {p.name for p in finished.iterdir()} == {"with-bn", "without-bn", *files}
    result = json.loads((finished / "result.json").read_text())
    assert result["runs"]["with-bn"]["steps"] == 600
    for name in ("with-bn", "without-bn"):
        files = {p.name for p in (finished / name).iterdir()}
        assert files == {"config.json", "metrics.jsonl", "checkpoint.pt", "summary.json"}


def test_the_configuration_is_complete(finished):
    config = json.loads((finished / "with-bn" / "config.json").read_text())
    expected = {"batch_norm": True, "steps": 600, "rate": 0.1, "std": 0.1, "batch_size": 60, "seed": 0}
    assert expected.items() <= config.items()
    assert {"hardware", "torch", "commit", "threads"} <= config["environment"].keys()


def test_batch_normalization_trains_faster_at_an_equal_rate(finished):
    plain, normalized = read_runs([finished])
    assert normalized.accuracy[-1][1] > 0.8
    assert plain.accuracy[-1][1] < 0.5  # 0.20 at this rate and width; the sigmoids have not left their plateau


def test_the_folded_network_is_the_unfolded_one(finished):
    summary = json.loads((finished / "with-bn" / "summary.json").read_text())["accuracy"]
    assert summary["folded"] == pytest.approx(summary["population"], abs=1.5e-4)  # rounding may change one answer
    assert summary["population"] == pytest.approx(summary["running"], abs=0.03)


def test_every_measure_is_recorded(finished):
    for r in read_runs([finished]):
        assert r.layers == ["sigmoid1", "sigmoid2", "sigmoid3"]
        assert [record.step for record in r.percentiles] == list(range(0, 601, 10))
        assert r.percentiles[-1].percentiles["sigmoid3"].z.shape == (3, 100)
        assert list(r.gradient_changes[0].gradient_change) == ["linear2", "linear3", "output"]
        assert (r.percentiles[0].percentiles["sigmoid1"].x is not r.percentiles[0].percentiles["sigmoid1"].z) == (
            r.name == "with-bn"
        )


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_resumed_run_ends_bit_for_bit_the_same(tmp_path, batch_norm):
    setting = Setting(batch_norm, steps=260)
    assert NetworkRun(tmp_path / "whole", setting).train()
    asked = iter([False, True])
    assert not NetworkRun(tmp_path / "halves", setting).train(lambda: next(asked))
    with (tmp_path / "halves" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 999, "loss": 1.0}\n{"step": 10')  # as if a killed run had gone past its checkpoint
    assert NetworkRun(tmp_path / "halves", setting).train()
    one, other = (tmp_path / name / "metrics.jsonl" for name in ("whole", "halves"))
    assert one.read_bytes() == other.read_bytes()
    a, b = (torch.load(p.parent / "checkpoint.pt", weights_only=True) for p in (one, other))
    assert a["step"] == b["step"] == 260
    assert b["seconds"] > 0
    assert all(torch.equal(a["net"][key], b["net"][key]) for key in a["net"])


def test_resuming_with_other_options_is_refused(tmp_path):
    NetworkRun(tmp_path, Setting(steps=100)).train(lambda: True)
    with pytest.raises(ValueError, match=r"rate is 0\.1 instead of 0\.5.*use its options, or another --out"):
        NetworkRun(tmp_path, Setting(steps=100, rate=0.5)).train()


def test_a_checkpoint_is_replaced_or_left_alone(tmp_path, monkeypatch):
    net, path = Setting().network(), tmp_path / "checkpoint.pt"
    save(tmp_path, net, 1, 0.0, 0)
    before = path.read_bytes()
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path, net, 2, 0.0, 0)
    assert path.read_bytes() == before


def test_a_folder_in_use_is_refused(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match="another process is training in"):
            NetworkRun(tmp_path, Setting(steps=1)).train()
        holder.stdin.close()
    assert not (tmp_path / "config.json").exists()


def test_the_summary_of_an_earlier_run_does_not_count(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    job = NetworkRun(tmp_path, Setting(steps=10))
    job.prepare()
    assert not job.finished()


def test_metrics_that_were_cut_are_refused(tmp_path):
    assert not NetworkRun(tmp_path, Setting(steps=200)).train(lambda: True)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is shorter than when the checkpoint was written"):
        NetworkRun(tmp_path, Setting(steps=200)).train()


def test_ctrl_c_leaves_a_checkpoint_and_a_report(tmp_path):
    out = tmp_path / "a run"
    command = [sys.executable, "-m", "batchnorm", "reproduce", "fig1", "--steps", "1000000", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    names = ("with-bn", "without-bn")
    while not all((out / n / "metrics.jsonl").exists() and _steps(out / n) >= 200 for n in names):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate()
    assert process.returncode == 130, text
    *_, last = text.splitlines()
    assert last.startswith("stopped before the end")
    assert last.endswith(f"to resume: batchnorm reproduce fig1 --steps 1000000 --out '{out}'")
    assert "the paper:" not in text  # an unfinished run allows no comparison with the paper
    assert (out / "report.html").exists()
    assert not (out / "result.json").exists()
    for name in names:
        state = torch.load(out / name / "checkpoint.pt", weights_only=True)
        assert state["step"] // 100 * 100 == _steps(out / name) >= 200  # it may stop between two records
        assert not (out / name / "summary.json").exists()


def test_the_same_command_resumes_a_stopped_run(tmp_path, capfd):
    words = ["reproduce", "fig1", "--steps", "200", "--out", str(tmp_path), "--processes", "1"]
    assert NetworkRun(tmp_path / "without-bn", Setting(False, steps=200)).train()
    NetworkRun(tmp_path / "with-bn", Setting(True, steps=200)).train(lambda: True)
    stopped = torch.load(tmp_path / "with-bn" / "checkpoint.pt", weights_only=True)["step"]
    done = (tmp_path / "without-bn" / "checkpoint.pt").read_bytes()
    assert main(words) == 0
    printed = capfd.readouterr().out
    assert f"with-bn: resuming from step {stopped}\n" in printed
    assert "without-bn: resuming" not in printed
    assert " with BN; not in the paper; BN does not keep this distribution fixed\n" in printed
    assert (tmp_path / "without-bn" / "checkpoint.pt").read_bytes() == done


def test_a_finished_run_is_only_drawn_again(tmp_path, capfd):
    words = ["reproduce", "fig1", "--steps", "10", "--out", str(tmp_path), "--processes", "1"]
    assert main(words) == 0
    (tmp_path / "fig1.png").unlink()
    summaries = [(tmp_path / name / "summary.json") for name in ("with-bn", "without-bn")]
    before = [path.read_bytes() for path in summaries]
    capfd.readouterr()
    assert main(words) == 0
    printed = capfd.readouterr().out
    assert "this run is finished, so only its results are written again" in printed
    assert f"to start over, choose another --out or remove {tmp_path}" in printed
    assert [path.read_bytes() for path in summaries] == before
    assert (tmp_path / "fig1.png").exists()


def test_resume_accepts_another_number_of_steps(tmp_path, capfd):
    words = ["reproduce", "fig1", "--out", str(tmp_path), "--processes", "1", "--steps"]
    assert main([*words, "10"]) == 0
    assert main([*words, "20"]) == 2
    assert "steps is 10 instead of 20" in capfd.readouterr().err
    assert main([*words, "20", "--resume"]) == 0
    assert "with-bn: resuming from step 10\n" in capfd.readouterr().out
    assert json.loads((tmp_path / "with-bn" / "summary.json").read_text())["steps"] == 20
    assert main([*words, "10", "--resume"]) == 2
    assert "is already at step 20: increase --steps, or use another --out" in capfd.readouterr().err
    assert (tmp_path / "with-bn" / "summary.json").exists()
    (tmp_path / "with-bn" / "checkpoint.pt").write_text("no checkpoint")
    assert main([*words, "30", "--resume"]) == 2
    assert (tmp_path / "without-bn" / "summary.json").exists()  # nothing changes before both runs are checked


def _steps(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines if line.endswith("}") and '"loss"' in line]
    return max(steps, default=0)


def test_a_file_in_the_way_is_found_before_the_training(tmp_path):
    (tmp_path / "with-bn").write_text("a file, not a folder")
    with pytest.raises(FileExistsError, match="with-bn"):
        fig1(Fig1(steps=100, out=tmp_path))
    assert not (tmp_path / "without-bn" / "metrics.jsonl").exists()


def test_a_damaged_checkpoint_is_named(tmp_path, capfd):
    words = ["reproduce", "fig1", "--steps", "200", "--out", str(tmp_path)]
    for name in ("with-bn", "without-bn"):
        NetworkRun(tmp_path / name, Setting(name == "with-bn", steps=200)).train(lambda: True)
        (tmp_path / name / "checkpoint.pt").write_text("no checkpoint")
    assert main(words) == 2
    error = capfd.readouterr().err
    assert "checkpoint.pt cannot be read" in error
    assert "Traceback" not in error


def test_a_run_of_other_options_is_not_overwritten(tmp_path):
    metrics, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "checkpoint.pt"
    NetworkRun(tmp_path, Setting(steps=200)).train(lambda: True)
    before = metrics.read_bytes(), checkpoint.read_bytes()
    with pytest.raises(ValueError, match=r"holds another run .steps is 200 instead of 100.*--resume.*another --out"):
        NetworkRun(tmp_path, Setting(steps=100)).train()
    assert (metrics.read_bytes(), checkpoint.read_bytes()) == before
