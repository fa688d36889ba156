"""Figure 4 from members that are really trained, a few steps each, over several sittings."""

import json
import shutil

import numpy as np
import pytest
import torch
import tyro
from training import OPTIONS, striped_folder, train_small

from batchnorm.reproduce.fig4 import MemberName, fig4
from batchnorm.reproduce.fig4_table import PAPER, Step, figure4
from batchnorm.reproduce.member_files import MemberFiles
from batchnorm.train.recipe import MEMBERS, Recipe

SMALL = {"width": 0.04, "size": 32, "batch_size": 8, "epochs": 1}
TWO = ("bn-x30-dropout-5", "bn-x30-per-activation")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return striped_folder(tmp_path_factory.mktemp("stripes"))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    # Small tensors on shared cores: threads would only wait for each other.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(data, out, *words, **fields):
    options = {**OPTIONS, **SMALL, **fields, "data": data, "out": out}
    return tyro.cli(fig4, args=[f"--{k.replace('_', '-')}={v}" for k, v in options.items()] + list(words))


@pytest.fixture(scope="module")
def sitting(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("fig4")
    run(data, out, "--only", *TWO)
    return out


def test_names():
    assert set(MemberName.__args__) == set(MEMBERS)


def test_a_first_sitting(sitting):
    table, result = (sitting / "fig4.md").read_text(), json.loads((sitting / "fig4.json").read_text())
    for row in PAPER:
        assert row.model in table
    for context in ("He et al. (2015), test set | - | - | - | - | 4.94%", "human raters", "4.82%"):
        assert context in table
    assert set(result["members"]) == set(TWO)
    assert result["missing"] == {name: "not yet run" for name in MEMBERS if name not in TWO}
    assert "- bn-x30-large-init: not yet run" in table
    assert [(row["model"], row["crops"], row["models"]) for row in result["rows"][-4:]] == [
        ("single crop, mean over networks", "1", "1"),
        ("multicrop, mean over networks", "144", "1"),
        ("ensemble", "1", "2"),
        ("ensemble", "144", "2"),
    ]
    assert {step["verdict"] for step in result["steps"]} <= {"confirmed", "refuted", "not resolved"}
    member = json.loads((sitting / f"{TWO[0]}.json").read_text())
    assert member["recipe"]["dropout"] == 0.05
    assert member["crops"]["1"]["examples"] == member["crops"]["144"]["examples"] == 12
    assert 1 - member["crops"]["1"]["top1_error"] == pytest.approx(member["training"]["top1"])


def test_a_later_sitting_goes_on_from_the_files_alone(data, sitting, tmp_path):
    out = shutil.copytree(sitting, tmp_path / "out")
    before = {name: (out / f"{name}.json").stat().st_mtime_ns for name in TWO}
    for name in TWO:
        for path in (out / "runs" / name).iterdir():
            if not path.name.startswith("probabilities"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    run(data, out, "--only", "bn-x30-dropout-10")
    result = json.loads((out / "fig4.json").read_text())
    assert set(result["members"]) == {*TWO, "bn-x30-dropout-10"}
    assert before == {name: (out / f"{name}.json").stat().st_mtime_ns for name in TWO}
    with pytest.raises(ValueError, match=r"dropout-5.json is of another recipe"):
        run(data, out, "--only", "bn-x30-dropout-10", rate=1.0)


def test_finished_runs_are_taken(data, sitting, tmp_path):
    runs = [str(sitting / "runs" / name) for name in TWO]
    run(data, tmp_path / "out", "--runs", *runs)
    ours, theirs = (json.loads((out / "fig4.json").read_text()) for out in (tmp_path / "out", sitting))
    assert ours["rows"] == theirs["rows"]
    assert ours["missing"] == {}


def test_other_weights_are_evaluated_again(data, sitting, tmp_path):
    out = shutil.copytree(sitting, tmp_path / "out")
    files = MemberFiles(out, TWO[0])
    recipe = Recipe.from_json((files.run / "recipe.json").read_text())
    shutil.rmtree(files.run / "final")
    shutil.rmtree(files.run / "checkpoints")
    (files.run / "metrics.jsonl").unlink()
    train_small(data, files.run, recipe, max_steps=2)
    old = files.read()["weights"]
    run(data, out, "--only", TWO[0])
    assert files.read()["weights"] != old


def test_a_diverged_member_is_named(data, sitting, tmp_path):
    out = shutil.copytree(sitting, tmp_path / "out")
    files = MemberFiles(out, TWO[0])
    shutil.rmtree(files.run / "final")
    files.result.unlink()
    result = json.loads((files.run / "result.json").read_text())
    (files.run / "result.json").write_text(json.dumps({**result, "diverged": True}))
    assert f"- {TWO[0]}: diverged in training" in run(data, out, "--only", TWO[0]).read_text()


@pytest.mark.parametrize("field", ["--dropout=0.2", "--seed=3", "--init-scale=2.0"])
def test_what_would_make_the_members_alike(data, tmp_path, field):
    with pytest.raises(ValueError, match="the six members differ in it"):
        run(data, tmp_path, field)


def test_one_process(data, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="fig4 is one process"):
        run(data, tmp_path)


def test_steps_are_paired_over_images(tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 7, 300)
    members = [MemberFiles(tmp_path, name) for name in "abc"]
    for member in members:
        member.run.mkdir(parents=True)
        for crops, signal in ((1, 1.0), (144, 1.5)):
            scores = rng.normal(size=(300, 7)) + signal * np.eye(7)[labels]
            probabilities = torch.from_numpy(scores).softmax(1).float().numpy()
            np.savez(member.run / f"probabilities-{crops}.npz", probabilities=probabilities, labels=labels)
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


def test_verdicts():
    assert Step("a", "top-1", 0.5, 0.4, 0.01).verdict == "confirmed"
    assert Step("a", "top-1", 0.4, 0.5, 0.01).verdict == "refuted"
    assert Step("a", "top-1", 0.5, 0.49, 0.01).verdict == "not resolved"
