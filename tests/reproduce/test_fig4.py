"""Test Figure 4 with members that are trained for a few steps, in parallel and over several sessions."""

import json
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from training import environment, lines_in, run_without_tyro_or_rich, striped_folder, train_small

from batchnorm.cli import main
from batchnorm.evaluate import Predictions
from batchnorm.report.summary import paper
from batchnorm.reproduce.imagenet.fig4 import Fig4, fig4
from batchnorm.reproduce.imagenet.fig4_table import PAPER, Gain, figure4
from batchnorm.reproduce.imagenet.plan import read_plan
from batchnorm.reproduce.imagenet.result_files import MemberFiles
from batchnorm.train.recipe import MEMBERS, Recipe

PLAN = """
[recipe]
size = 32
width = 0.04
batch_size = 8
[train]
end_rate = 0.01
log_every = 1
evaluate_every = 3
checkpoint_every = 1000
evaluate_batch = 24
[[group]]
name = "members"
horizon = 2
runs = [
  { name = "five", recipe = "bn-x30-dropout-5" },
  { name = "apart", recipe = "bn-x30-per-activation" },
  { name = "ten", recipe = "bn-x30-dropout-10" },
  { name = "far", recipe = "bn-x30-large-init", rate = 1e30 },
]
"""
TWO = ("five", "apart")


def run(data, plan, out, **options):
    # Two jobs get half of the threads each. Other tests use the same cores, so more threads would only wait.
    return fig4(Fig4(data, out, plan=plan, device="cpu", workers=0, jobs=2, **options))


@pytest.fixture(scope="module")
def session(data, plan, tmp_path_factory):
    """Train two members in parallel."""
    out = tmp_path_factory.mktemp("fig4")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BATCHNORM_COMMIT", "1234abc")
        run(data, plan, out, only=TWO)
    return out


def read(out, name="fig4"):
    return json.loads((out / ("" if name == "fig4" else "results") / f"{name}.json").read_text())


PAPER_RATES = Path("fig4-paper-rates")


def test_the_committed_plan_is_the_six_members_for_as_long_as_the_ablation():
    runs = read_plan("fig4", PAPER_RATES).runs
    assert [run.name for run in runs] == list(MEMBERS)
    x30 = next(run.recipe for run in read_plan("fig2", Path("paper-rates")).runs if run.name == "bn-x30-seed0")
    x5 = next(run.recipe for run in read_plan("fig2", Path("paper-rates")).runs if run.name == "ablation-seed0")
    for run in runs:
        member = MEMBERS[run.name]
        assert (run.recipe.epochs, run.recipe.decay_epochs) == (x5.epochs, x5.decay_epochs)
        assert (run.recipe.size, run.recipe.batch_size, run.recipe.rate) == (64, 32, x30.rate)
        for field in ("seed", "dropout", "init_scale", "per_activation"):
            assert getattr(run.recipe, field) == getattr(member, field)
    assert len({run.recipe.seed for run in runs}) == 6


def test_the_default_plan_changes_the_rates_of_the_swept_members_alone(tmp_path):
    plan = read_plan("fig4")
    assert {*plan.waiting} == {name for name in MEMBERS if "large" in name or "per" in name}
    swept = [run for run in plan.runs if run.group == "rates"]
    assert {(run.variant, run.recipe.rate / 0.045) for run in swept} == {
        *(("bn-x30-large-init", times) for times in (1.0, 2.0, 4.0)),
        *(("bn-x30-per-activation", times) for times in (0.25, 0.5, 1.0)),
    }
    for run in swept:
        best = run.recipe.rate == {"bn-x30-large-init": 0.18, "bn-x30-per-activation": 0.0225}[run.variant]
        (tmp_path / f"{run.name}.json").write_text(json.dumps({"result": {"top1": 0.2 + 0.1 * best}}))
    tuned = {run.name: run.recipe for run in read_plan("fig4", None, tmp_path).runs}
    for run in read_plan("fig4", PAPER_RATES).runs:
        rate = 0.18 if "large" in run.name else 0.0225 if "per" in run.name else 0.045
        assert tuned[run.name] == replace(run.recipe, rate=rate)


def test_a_first_session(session):
    table, result = (session / "fig4.md").read_text(), read(session)
    for row in PAPER:
        assert row.model in table
    for context in (f"He et al. (2015), test set{4 * ' | not in the paper'} | 4.94%", "human raters", "4.82%"):
        assert context in table
    assert set(result["members"]) == set(TWO)
    assert result["missing"] == {"ten": "not yet run", "far": "not yet run"}
    assert "- ten: not yet run" in table
    assert [(row["model"], row["crops"], row["models"]) for row in result["rows"][-4:]] == [
        ("single crop, mean over networks", "1", "1"),
        ("multicrop, mean over networks", "144", "1"),
        ("ensemble", "1", "2"),
        ("ensemble", "144", "2"),
    ]
    assert {step["verdict"] for step in result["steps"]} <= {"confirmed", "refuted", "not resolved"}
    (row,) = [line for line in paper(session).splitlines() if "| Figure 4 |" in line]
    assert "% with 2 networks and 144 crops, " in row
    assert "% with one network and one crop (" in row


def test_what_a_member_leaves(data, session):
    member = read(session, "five")
    assert member["recipe"]["dropout"] == 0.05
    assert member["result"]["steps"] == 8
    assert [point[0] for point in member["curve"]] == [3, 6, 8]
    assert member["environment"]["commit"] == "1234abc"
    assert member["data"]["val"] == member["crops"]["1"]["examples"] == member["crops"]["144"]["examples"] == 12
    assert 1 - member["crops"]["1"]["top1_error"] == pytest.approx(member["result"]["top1"])
    probabilities, labels = MemberFiles("five", session / "results").predictions(144)
    assert (probabilities.dtype, probabilities.shape) == (torch.float32, (12, 3))
    assert sorted(labels.tolist()) == [0] * 4 + [1] * 4 + [2] * 4


def test_the_table_is_made_of_the_files_alone(plan, session, tmp_path):
    shutil.copytree(session / "results", tmp_path / "results")
    words = ["--plan", plan, "--results", tmp_path / "results", "--out", tmp_path / "out"]
    run_without_tyro_or_rich("reproduce", "fig4", *words)
    for name in ("fig4.md", "fig4.json"):
        assert (tmp_path / "out" / name).read_text() == (session / name).read_text()


def test_result_files_without_probabilities_do_not_count(plan, session, tmp_path):
    shutil.copytree(session / "results", tmp_path / "results")
    (tmp_path / "results/five.npz").unlink()
    fig4(Fig4(out=tmp_path / "out", results=tmp_path / "results", plan=plan))
    result = read(tmp_path / "out")
    assert set(result["members"]) == {"apart"}
    assert result["missing"]["five"].startswith("left out of the ensemble: five.npz is missing; to compute")
    assert [row["model"] for row in result["rows"][:4]] == ["five", "five", "apart", "apart"]  # five is still listed


def test_a_later_session_goes_on_from_the_files_alone(data, plan, session, tmp_path):
    shutil.copytree(session / "results", tmp_path / "results")
    before = {name: (tmp_path / f"results/{name}.json").stat().st_mtime_ns for name in TWO}
    run(data, plan, tmp_path, only=("ten", "far"))
    result = read(tmp_path)
    assert set(result["members"]) == {*TWO, "ten"}
    assert before == {name: (tmp_path / f"results/{name}.json").stat().st_mtime_ns for name in TWO}
    assert result["missing"] == {"far": "diverged in training"}
    assert read(tmp_path, "far")["result"]["diverged"] is True
    run(data, plan, tmp_path, minutes=0.0)  # nothing is left to do


@pytest.mark.slow
def test_it_goes_on_where_it_was_stopped(data, plan, session, tmp_path):
    words = ["--data", str(data), "--plan", str(plan), "--out", str(tmp_path), "--device", "cpu", "--workers", "0"]
    command = [sys.executable, "-m", "batchnorm", "reproduce", "fig4", *words, "--jobs", "2", "--only", *TWO]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    while process.poll() is None and max(lines_in(tmp_path / "runs" / name) for name in TWO) <= 1:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code, missing = process.wait(), set(read(tmp_path)["missing"])
    assert missing >= {"ten", "far"}
    assert code == 130 or not missing & set(TWO)  # they may finish before the signal
    # `run`, the stopped command and `session` all use --jobs 2. So they use the same number of threads, and the results
    # are equal bit for bit.
    run(data, plan, tmp_path, only=TWO)
    assert read(tmp_path)["rows"] == read(session)["rows"]
    for name in TWO:
        assert read(tmp_path, name)["weights"] == read(session, name)["weights"]


@pytest.mark.slow
def test_a_member_that_was_stopped_in_its_evaluation_is_evaluated_again(data, plan, session, tmp_path):
    out = shutil.copytree(session, tmp_path / "out")
    lines = (out / "runs/five/metrics.jsonl").read_text()
    for name in ("five.npz", "five.json"):
        (out / "results" / name).unlink()
    run(data, plan, out, only=("five",))
    assert read(out)["rows"] == read(session)["rows"]
    steps = [json.loads(line)["step"] for line in (out / "runs/five/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == len(lines.splitlines())  # nothing was trained again


def test_finished_runs_are_taken(data, plan, session, tmp_path):
    runs = tuple(session / "runs" / name for name in TWO)
    run(data, plan, tmp_path, runs=runs)
    ours, theirs = read(tmp_path), read(session)
    assert ours["rows"] == theirs["rows"]
    assert ours["missing"] == {}
    fig4(Fig4(out=tmp_path, plan=plan))  # lists the given runs, not the plan's members
    assert sorted(map(str, read(tmp_path)["rows"])) == sorted(map(str, theirs["rows"]))
    before = (tmp_path / "results/five.json").stat().st_mtime_ns
    run(data, plan, tmp_path, runs=runs)
    assert (tmp_path / "results/five.json").stat().st_mtime_ns == before


def test_runs_of_a_users_network_need_trust(data, plan, session, tmp_path):
    taken = shutil.copytree(session / "runs/five", tmp_path / "five")
    recipe = replace(Recipe.from_json((taken / "recipe.json").read_text()), factory="no_such_module:build")
    (taken / "recipe.json").write_text(recipe.to_json())
    with pytest.raises(ValueError, match="add --trust"):
        run(data, plan, tmp_path / "out", runs=(taken,))
    with pytest.raises(ValueError, match="no_such_module"):
        run(data, plan, tmp_path / "out", runs=(taken,), trust=True)


@pytest.mark.slow
def test_taken_runs_of_the_same_name(data, plan, session, tmp_path, monkeypatch):
    for folder in "ab":
        shutil.copytree(session / "runs/five", tmp_path / folder / "five")
    monkeypatch.chdir(tmp_path)
    run(data, plan, tmp_path / "out", runs=tuple(tmp_path.relative_to(tmp_path) / f / "five" for f in "ab"))
    assert set(read(tmp_path / "out")["members"]) == {"a-five", "b-five"}


@pytest.mark.slow
def test_other_weights_are_evaluated_again(data, plan, session, tmp_path):
    taken = shutil.copytree(session / "runs/five", tmp_path / "five")
    run(data, plan, tmp_path, runs=(taken,))
    old = read(tmp_path, "five")["weights"]
    recipe = Recipe.from_json((taken / "recipe.json").read_text())
    shutil.rmtree(taken / "final")
    shutil.rmtree(taken / "checkpoints")
    (taken / "metrics.jsonl").unlink()
    train_small(data, taken, recipe, max_steps=2)
    run(data, plan, tmp_path, runs=(taken,))
    assert read(tmp_path, "five")["weights"] != old


def test_a_run_that_has_not_ended_says_so(data, plan, session, tmp_path):
    taken = shutil.copytree(session / "runs/five", tmp_path / "five")
    shutil.rmtree(taken / "final")
    with pytest.raises(ValueError, match="has no final network: its training has not finished"):
        run(data, plan, tmp_path / "out", runs=(taken,))


def test_runs_and_data_that_do_not_fit(plan, data, session, tmp_path, capsys):
    words = ["--runs", str(session / "runs/five"), "--plan", str(plan), "--out", str(tmp_path / "out")]
    assert main(["reproduce", "fig4", *words]) == 2
    assert "--runs needs --data DIR, the images" in capsys.readouterr().err
    assert main(["reproduce", "fig4", *words, "--data", str(data), "--only", "five"]) == 2
    assert "cannot be combined" in capsys.readouterr().err
    other = striped_folder(tmp_path / "other")
    for split in ("train", "val"):
        shutil.rmtree(other / split / "class2")
    assert main(["reproduce", "fig4", *words, "--data", str(other)]) == 2
    assert "was trained on 3 classes, but the data has 2" in capsys.readouterr().err
    assert (
        main(["reproduce", "fig4", "--runs", str(tmp_path), "--data", str(data), "--out", str(tmp_path / "out")]) == 2
    )
    assert "is not the folder of a run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_does_not_fit_is_told_before_any_work(plan, data, session, tmp_path, capsys):
    empty = shutil.copytree(data, tmp_path / "empty")
    for path in (empty / "val/class1").iterdir():
        path.unlink()
    words = ["--plan", str(plan), "--out", str(tmp_path / "out")]
    for more in ([], ["--runs", str(session / "runs/five")]):
        assert main(["reproduce", "fig4", *words, "--data", str(empty), *more]) == 2
        assert "has no images for 1 of 3 classes in split 'val' (class1)" in capsys.readouterr().err
    other = shutil.copytree(session / "runs/five", tmp_path / "other")
    for before, after, says in (("0.04", "0.08", "do not fit the network"), ('"relu"', '"sigmoid"', "activation relu")):
        recipe = (session / "runs/five/recipe.json").read_text()
        (other / "recipe.json").write_text(recipe.replace(before, after))
        assert main(["reproduce", "fig4", *words, "--data", str(data), "--runs", str(other)]) == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_images_that_were_not_evaluated_as_they_are_are_told(plan, data, session, tmp_path):
    tiny = tmp_path / "tiny"
    for label in range(3):
        (tiny / f"val/class{label}").mkdir(parents=True)
        Image.new("RGB", (9, 7)).save(tiny / f"val/class{label}/0.png")
    (tiny / "val/class0/junk.png").write_bytes(b"no image")
    run(tiny, plan, tmp_path / "out", runs=(session / "runs/five",))  # a finished run needs no training images
    table = (tmp_path / "out/fig4.md").read_text()
    assert "- 3 images are smaller than the crop and were enlarged" in table
    assert "- 1 files could not be read and were left out: " in table
    assert "junk.png" in table


def test_other_plans_and_other_data_are_refused(data, plan, session, tmp_path):
    other = tmp_path / "plan.toml"
    other.write_text(PLAN.replace("horizon = 2", "horizon = 3"))
    for path in (data, None):
        with pytest.raises(
            ValueError, match=r"five.json belongs to another plan \(decay_epochs is .* instead of .*\): choose"
        ):
            run(path, other, session)
    images = shutil.copytree(data, tmp_path / "data")
    (images / "train/class0/0.png").unlink()
    with pytest.raises(ValueError, match="use different data"):
        run(images, plan, session)
    with pytest.raises(ValueError, match="no run named nobody; its runs are five, apart"):
        run(data, plan, tmp_path, only=("nobody",))
    other.write_text(PLAN.replace('"members"', '"figures"'))
    with pytest.raises(ValueError, match="unknown group 'figures'; choose from rates, members"):
        run(data, other, tmp_path)


def test_one_process(data, plan, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="fig4 does not run under torchrun"):
        run(data, plan, tmp_path)


def test_steps_are_paired_over_images(tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 7, 300)
    members = [MemberFiles(name, tmp_path) for name in "abc"]
    for member in members:
        found = {}
        for crops, strength in ((1, 1.0), (144, 1.5)):
            scores = torch.from_numpy(rng.normal(size=(300, 7)) + strength * np.eye(7)[labels])
            found[crops] = Predictions(scores.softmax(1).float(), torch.from_numpy(labels), torch.arange(300), 0, ())
        member.write_probabilities(found)
    figure = figure4(members, 32)
    wrong = {
        c: np.stack([m.predictions(c)[0].argmax(1).numpy() != labels for m in members]).astype(float) for c in (1, 144)
    }
    gain = wrong[1].mean(0) - wrong[144].mean(0)
    step = figure.steps[0]
    assert step.error == "top-1"
    assert step.before - step.after == pytest.approx(gain.mean())
    assert step.standard_error == pytest.approx(gain.std(ddof=1) / 300**0.5)
    mean = torch.stack([m.predictions(144)[0] for m in members]).mean(0).argmax(1).numpy() != labels
    assert figure.steps[1].after == pytest.approx(mean.mean())
    assert [s.verdict for s in figure.steps[:2]] == ["confirmed", "confirmed"]
    best = wrong[144].mean(1).argmin()
    against_best = figure.steps[2]
    assert f"the best of them, {'abc'[best]}," in against_best.name
    assert (against_best.before, against_best.after) == pytest.approx((wrong[144][best].mean(), mean.mean()))
    assert against_best.standard_error == pytest.approx((wrong[144][best] - mean).std(ddof=1) / 300**0.5)


def predictions(folder, name, *right):
    """Write predictions: 60% for the right class if ``right`` is true for an image, else 90% for the next class."""
    labels, asked = torch.arange(40) % 4, torch.tensor(right * (40 // len(right)))
    answers = torch.nn.functional.one_hot(torch.where(asked, labels, (labels + 1) % 4), 4)
    certain = torch.where(asked, 0.6, 0.9)[:, None]
    scores = torch.where(answers == 1, certain, (1 - certain) / 3)
    member = MemberFiles(name, folder)
    member.write_probabilities({c: Predictions(scores, labels, torch.arange(40), 0, ()) for c in (1, 144)})
    return member


def test_the_best_ensemble_is_chosen_by_other_images_than_it_is_judged_by(tmp_path):
    # Each of three networks is wrong on a different fifth of the images, so the mean of all three is always right.
    a = predictions(tmp_path, "a", False, True, True, True, True)
    b = predictions(tmp_path, "b", True, False, True, True, True)
    c = predictions(tmp_path, "c", True, True, False, True, True)
    figure = figure4([a, b, c], 32)
    assert figure.statement == "The ensemble is better than its best member (by top-1 error)."
    (chosen, _) = figure.chosen
    assert "(a, b, c)" in chosen.name
    assert chosen.networks == ("a", "b", "c")
    assert (chosen.before, chosen.after) == (0.2, 0.0)
    # Two networks that are always wrong spoil the mean of all five, but not that of the three.
    bad = [predictions(tmp_path, name, False) for name in "de"]
    figure = figure4([a, b, c, *bad], 32)
    assert figure.statement.startswith("The ensemble of all networks is not measurably better than its best member")
    assert (
        figure4([a, *bad], 32).statement
        == "At this scale, no ensemble of these networks is measurably better than the best network."
    )
    assert figure4([a], 32).statement is None


def test_verdicts():
    assert Gain("a", "top-1", 0.5, 0.4, 0.01).verdict == "confirmed"
    assert Gain("a", "top-1", 0.4, 0.5, 0.01).verdict == "refuted"
    assert Gain("a", "top-1", 0.5, 0.49, 0.01).verdict == "not resolved"


def test_the_rows_of_single_networks_are_those_of_the_published_result_files(tmp_path, capsys):
    results = Path(__file__).parents[2] / "results"
    for plan, files, published in (
        ("fig4", results / "fig4", results / "fig4.json"),
        ("fig4-paper-rates", results / "fig4/paper-rates", results / "fig4/paper-rates/fig4.json"),
    ):
        assert main(["reproduce", "fig4", "--plan", plan, "--results", str(files), "--out", str(tmp_path / plan)]) == 0
        table = (tmp_path / plan / "fig4.md").read_text()
        lines = [line for line in table.splitlines() if line.startswith("| bn-x30")]
        assert len(lines) == 12 + 6 * (plan == "fig4")
        assert {*lines} <= {
            *(published.parent / ("fig4/fig4.md" if plan == "fig4" else "fig4.md")).read_text().splitlines()
        }
        contents = json.loads(published.read_text())
        assert contents["missing"] == {}
        for name, member in contents["members"].items():
            assert member["crops"] == json.loads((files / f"{name}.json").read_text())["crops"]
