"""Test ``batchnorm evaluate`` on small trained runs."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tyro
from training import small, stripes, train_small

from batchnorm.layers import BatchNorm
from batchnorm.train import RECIPES
from batchnorm.train.evaluate_command import evaluate
from batchnorm.train.recipe import BN_X30, MEMBERS
from batchnorm.train.saved_runs import check_classes, open_run


def one_of_each(root, *classes):
    for label, name in enumerate(classes):
        (root / "val" / name).mkdir(parents=True)
        stripes(np.random.default_rng(0), label % 3).save(root / "val" / name / "0.png")
    return root


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """Train three small members of an ensemble: plain, with dropout, and with per-activation normalization."""
    root = tmp_path_factory.mktemp("runs")
    for name, fields in (("plain", {}), ("dropout", {"dropout": 0.1}), ("per-activation", {"per_activation": ("5b",)})):
        train_small(data, root / name, small(name=name, seed=len(name), **fields), evaluate_every=0)
    return root


def test_one_crop_gives_the_run_its_own_accuracy(data, runs):
    for name in ("plain", "dropout", "per-activation"):
        report = evaluate((runs / name,), data=data, device="cpu", workers=0)
        result = json.loads((runs / name / "result.json").read_text())
        assert 1 - report.score.top1_error == pytest.approx(result["top1"])
        assert report.score.examples == 12


def test_the_networks_are_folded(data, runs):
    net = open_run(runs / "per-activation").load(["class0", "class1", "class2"])
    assert not any(isinstance(module, BatchNorm) for module in net.modules())


@pytest.mark.parametrize("crops", ["10", "144"])
def test_the_command(data, runs, tmp_path, capsys, crops):
    words = [str(runs / "plain"), str(runs / "dropout"), "--data", str(data), "--crops", crops, "--device", "cpu"]
    tyro.cli(evaluate, args=[*words, "--workers", "0", "--out", str(tmp_path / "result.json")])
    text = capsys.readouterr().out
    assert f"12 images, {crops} crops of each" in text
    assert "mean of all" in text
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result["members"]) == {"plain", "dropout"}
    assert result["crops"] == int(crops)
    assert {"torch", "commit", "hardware"} <= set(result["environment"])


def copy(runs, tmp_path, name="plain"):
    return shutil.copytree(runs / name, tmp_path / "copy")


def check(message, data, *folders):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        evaluate(folders, data=data, device="cpu", workers=0)


def test_a_checkpoint_of_another_architecture(data, runs, tmp_path):
    run = copy(runs, tmp_path)
    recipe = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps({**recipe, "width": 0.08}))
    check("do not fit .*recipe.json: [0-9]+ entries with a different shape", data, run)
    (run / "recipe.json").write_text(json.dumps({**recipe, "batch_norm": False}))
    check(r"do not fit .*recipe.json: \d+ entries not in the file .*; \d+ entries not in the network", data, run)


def test_other_classes(runs, tmp_path):
    check("plain was trained on 3 classes, but the data has 4", one_of_each(tmp_path / "a", *"wxyz"), runs / "plain")
    check(
        "class 2 is 'class2' in the run, but 'zebra' in the data",
        one_of_each(tmp_path / "b", "class0", "class1", "zebra"),
        runs / "plain",
    )


def test_numbers_as_names_must_be_in_the_same_order():
    labels = [str(k) for k in range(11)]  # the names of classes in shards without classes.txt
    check_classes(Path("run"), labels, labels)
    check_classes(Path("run"), [f"class{k}" for k in range(11)], labels)
    folders = sorted(labels)
    check_classes(Path("run"), folders, folders)
    for trained, found in ((folders, labels), (labels, folders)):
        with pytest.raises(ValueError, match=r"class 2 is '\d+' in the run, but '\d+' in the data"):
            check_classes(Path("run"), trained, found)


def test_not_a_run(data, runs, tmp_path):
    check("no does not exist", data, tmp_path / "no")
    check("is not the folder of a run: it holds dropout, per-activation, plain, but", data, runs)
    check("give at least one run", data)
    check("a run is given twice", data, runs / "plain", runs / "plain")
    check("a run is given twice", data, runs / "plain", runs / ".." / runs.name / "plain")


def test_an_unfinished_or_diverged_run(data, runs, tmp_path):
    run = copy(runs, tmp_path)
    shutil.rmtree(run / "final")
    result = json.loads((run / "result.json").read_text())
    check("has no final network: its training has not finished", data, run)
    (run / "result.json").write_text(json.dumps({**result, "diverged": True}))
    check("has no final network: its training diverged", data, run)


def test_a_damaged_checkpoint(data, runs, tmp_path):
    run = copy(runs, tmp_path)
    weights = next((run / "final").rglob("model.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    check("no checkpoint in .* can be used: .*model.safetensors has", data, run)


def test_runs_of_different_sizes(data, runs, tmp_path):
    run = copy(runs, tmp_path)
    recipe = json.loads((run / "recipe.json").read_text())
    (run / "recipe.json").write_text(json.dumps({**recipe, "size": 48}))
    check("takes images of 32 px, but .*copy takes images of 48 px", data, runs / "plain", run)


def test_the_six_members_are_bn_x30_modified():
    assert len(MEMBERS) == 6
    allowed = {"init_scale", "dropout", "per_activation", "name", "seed"}
    changes = []
    for name, member in MEMBERS.items():
        assert RECIPES[name] is member
        changed = {key: value for key, value in vars(member).items() if value != getattr(BN_X30, key)}
        assert set(changed) <= allowed
        changes.append(tuple(sorted((k, v) for k, v in changed.items() if k not in ("name", "seed"))))
    assert len(set(changes)) == 6
    assert {dict(c).get("dropout") for c in changes} == {None, 0.05, 0.1}
    assert sum(len(c) > 1 for c in changes) == 2
    assert len({member.seed for member in MEMBERS.values()} | {BN_X30.seed}) == 7
