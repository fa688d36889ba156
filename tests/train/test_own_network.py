"""Test that users' own networks are trained, resumed and evaluated like the paper's network."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from training import assert_same_outcome, environment, small, start_and_kill, train_small

import batchnorm as bn
from batchnorm.cli import main
from batchnorm.network_factory import UserCodeError, make_network
from batchnorm.processes import _portable
from batchnorm.train import Recipe
from batchnorm.train.evaluate_command import evaluate
from batchnorm.train.own_network import without_batch_norm
from batchnorm.train.recipe import BN_X5
from batchnorm.train.saved_runs import open_run

SOURCE = """
from itertools import count

from torch import nn

CALLS = count()


def build(classes):
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(6, 8, 3),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes),
    )


class PairOutsideTraining(nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return y if self.training else (y, y)


def steady(classes):
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, classes)
    )


class CallsFunctions(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.fc, self.unused = nn.Linear(48, classes), nn.ReLU()

    def forward(self, x):
        return self.fc(nn.functional.avg_pool2d(x, 8).flatten(1)).relu()


def plain(classes):
    return nn.Sequential(nn.AvgPool2d(8), nn.Flatten(), nn.Linear(48, classes))


def ten():
    return build(10)


def nothing(classes):
    return [nn.Identity()]


def pair(classes):
    class Two(nn.Module):
        def forward(self, x):
            return x, x
    return Two()


def probable(classes):
    return nn.Sequential(build(classes), nn.Softmax(1))


def counting(classes):
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = build(classes)
        def forward(self, x):
            return self.net(x) + next(CALLS)
    return Counting()
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "own.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def words(source, data, tmp_path):
    options = "--size 32 --batch-size 8 --epochs 1 --device cpu --workers 0 --estimate-batches 2"
    given = ["--network", f"{source}:build", "--data", str(data), "--out", str(tmp_path / "run")]
    return ["train", *given, *options.split()]


@pytest.mark.parametrize("change", ["as-is", "insert", "convert", "remove"])
def test_a_resumed_run_is_the_same_and_is_evaluated_as_it_was(data, source, tmp_path, change):
    recipe = small(factory=f"{source}:build", normalize=change, rate=0.05)
    result = train_small(data, tmp_path / "whole", recipe, monitor_every=5)
    for steps in (5, 12):
        train_small(data, tmp_path / "parts", recipe, max_steps=steps, monitor_every=5)
    assert_same_outcome(tmp_path / "whole", tmp_path / "parts")
    report = evaluate((tmp_path / "parts",), data=data, device="cpu", workers=0, trust=True)
    assert 1 - report.score.top1_error == pytest.approx(result.top1)
    assert (tmp_path / "whole" / "monitor.jsonl").read_text().count("\n") == 2
    net = open_run(tmp_path / "whole", trust=True).load(["class0", "class1", "class2"])
    assert not any(isinstance(layer, _BatchNorm) for layer in net.modules())


def test_a_killed_run_goes_on(data, source, tmp_path):
    recipe = small(factory=f"{source}:build", normalize="insert", rate=0.05)
    train_small(data, tmp_path / "whole", recipe)
    start_and_kill(4, data, tmp_path / "killed", recipe)
    train_small(data, tmp_path / "killed", recipe)
    assert_same_outcome(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.dist
def test_two_ranks_learn_what_one_process_learns(data, source, tmp_path):
    data = shutil.copytree(data, tmp_path / "data")
    # The first rank reads the broken training image, in step 0; the second rank reads the broken validation image.
    broken = [sorted(data.joinpath(split).rglob("*.png"))[-1] for split in ("train", "val")]
    for file in broken:
        file.write_bytes(b"no image")
    recipe = small(factory=f"{source}:steady", normalize="insert", statistics="sync", rate=0.05, epochs=1)
    alone = train_small(data, tmp_path / "one", recipe, evaluate_every=0)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "batchnorm"]
    fields = "--normalize insert --statistics sync --rate 0.05 --epochs 1 --size 32 --batch-size 8 --name bn-x5"
    options = f"--out {tmp_path / 'two'} --device cpu --workers 0 --log-every 1 --estimate-batches 3"
    words = ["train", "--network", recipe.factory, "--data", str(data), *fields.split(), *options.split()]
    done = subprocess.run([*launcher, *words], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "on 2 x cpu" in done.stdout
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    assert (result["steps"], result["hardware"]["ranks"]) == (alone.steps, 2)
    assert result["corrupt_files"] == list(alone.corrupt_files)
    assert [Path(file.split(" (")[0]) for file in result["corrupt_files"]] == broken
    one, two = (open_run(tmp_path / name, trust=True).trained()[0] for name in ("one", "two"))
    torch.testing.assert_close(list(two.parameters()), list(one.parameters()), rtol=1e-3, atol=1e-4)


def test_code_that_computes_something_else_than_in_training_is_refused(data, tmp_path):
    code = tmp_path / "edited.py"
    code.write_text(SOURCE)
    recipe = small(factory=f"{code}:build", rate=0.05)
    train_small(data, tmp_path / "run", recipe, max_steps=5)
    code.write_text(SOURCE.replace("nn.Dropout(0.2)", "nn.Dropout(0.3)"))
    bn.load(tmp_path / "run", trust=True)  # computes the same in evaluation mode
    code.write_text(SOURCE.replace("nn.ReLU(), nn.Ada", "nn.Tanh(), nn.Ada"))
    for use in (
        lambda: bn.load(tmp_path / "run", trust=True),
        lambda: evaluate((tmp_path / "run",), data=data, device="cpu", workers=0, trust=True),
        lambda: train_small(data, tmp_path / "run", recipe),
    ):
        with pytest.raises(ValueError, match=r"edited.py:build no longer computes what it did.* differ by \d+%"):
            use()
    code.write_text(
        SOURCE.replace(
            "return nn.Sequential(\n        nn.Conv2d(3, 6, 3, stride=2, b",
            "return PairOutsideTraining(\n        nn.Conv2d(3, 6, 3, stride=2, b",
        )
    )
    with pytest.raises(ValueError, match=r"its output has another form"):
        bn.load(tmp_path / "run", trust=True)
    code.write_text(SOURCE)
    assert train_small(data, tmp_path / "run", recipe).steps == 12


def test_a_run_is_loaded_predicts_and_is_folded(data, source, files, tmp_path):
    train_small(data, tmp_path / "run", small(factory=f"{source}:build", rate=0.05))
    run = bn.load(tmp_path / "run", trust=True)
    said = run.predict(files).probabilities
    with torch.no_grad():
        torch.testing.assert_close(said, run.trained(run.preprocessing(files)).softmax(1))
    assert main(["fold", str(tmp_path / "run"), "-o", str(tmp_path / "net.pt2"), "--trust"]) == 0


def test_a_run_calls_the_function_that_it_names_only_if_trusted(data, source, files, tmp_path, refusal, capsys):
    recipe = small(factory=f"{source}:plain", epochs=0.25)
    train_small(data, tmp_path / "theirs", recipe)
    (tmp_path / "trap.py").write_text("raise AssertionError('this ran')")
    path = tmp_path / "theirs" / "recipe.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "factory": f"{tmp_path}/trap.py:build"}))
    says = rf"loading .*theirs calls {tmp_path}/trap\.py:build, the function named in its recipe\.json, .* add --trust"
    with pytest.raises(ValueError, match=says):
        bn.load(tmp_path / "theirs")
    capsys.readouterr()
    for words in (
        ["predict", tmp_path / "theirs", files[0]],
        ["fold", tmp_path / "theirs", "-o", tmp_path / "net.pt2"],
        ["evaluate", tmp_path / "theirs", "--data", data, "--device", "cpu", "--workers", 0],
    ):
        assert re.search(says, refusal(*words))
    path.write_text(recipe.to_json())
    assert main(["predict", str(tmp_path / "theirs"), str(files[0]), "--device", "cpu", "--trust"]) == 0


def test_a_run_whose_last_step_explodes_has_diverged(words, source, tmp_path, capsys):
    words[2] = f"{source}:steady"
    with pytest.raises(SystemExit, match="1"):
        main([*words, "--rate", "3e38", "--max-steps", "1"])
    assert "diverged by step 1" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "result.json").read_text())["diverged"]
    assert not (tmp_path / "run" / "final").exists()


def test_the_changes(source):
    def kinds(change):
        net = small(factory=f"{source}:build", normalize=change).network(3)
        assert net.training
        return [type(layer) for layer in net.modules() if isinstance(layer, _BatchNorm)]

    assert kinds("as-is") == [nn.BatchNorm2d]
    assert kinds("convert") == [bn.BatchNorm2d]
    assert kinds("remove") == []
    assert sorted(map(str, kinds("insert"))) == sorted(map(str, [nn.BatchNorm2d, bn.BatchNorm2d]))


def test_the_seed_decides_the_initial_weights(source):
    state = torch.get_rng_state()
    a, b, other = (small(factory=f"{source}:build", seed=seed).network(3)[0].weight for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_fused_activations_stay_when_batch_normalization_goes():
    net = nn.Sequential(nn.Linear(2, 3), bn.BatchNorm1d(3, activation="relu"))
    x = torch.randn(4, 2)
    torch.testing.assert_close(without_batch_norm(net)(x), net[0](x).relu())


def test_statistics_of_all_ranks_need_layers_of_this_library(source):
    with pytest.raises(ValueError, match=r"statistics=sync needs .*but layer 1 is not one: add --normalize convert"):
        small(factory=f"{source}:build", statistics="sync").network(3)
    net = small(factory=f"{source}:build", statistics="sync", normalize="convert").network(3)
    assert isinstance(net[1].statistics, bn.Sync)


def test_the_command_says_what_it_will_do_and_records_it(words, data, tmp_path, source, capsys):
    shutil.copytree(data / "train", tmp_path / "images" / "train")
    words[words.index("--data") + 1] = str(tmp_path / "images")
    assert main(words) == 2
    assert "has no validation set" in capsys.readouterr().err
    assert main([*words, "--normalize", "insert", "--validate", "0.2"]) == 0
    assert capsys.readouterr().out.startswith(
        f"own-build-insert: {source}:build (insert) on 24 images of 3 classes, validated on 6;"
        f" 3 steps of 8 images on cpu, in {tmp_path / 'run'}\n"
    )
    recipe = Recipe.read(tmp_path / "run" / "recipe.json")
    assert (recipe.factory, recipe.normalize, recipe.validate) == (f"{source}:build", "insert", 0.2)
    assert recipe.rate == BN_X5.rate
    data_there = json.loads((tmp_path / "run" / "data.json").read_text())
    assert (data_there["train[0.2:]"], data_there["train[:0.2]"]) == (24, 6)
    assert main([*words, "--normalize", "insert", "--validate", "0.3"]) == 2
    assert "validate is 0.2 instead of 0.3" in capsys.readouterr().err
    report = evaluate((tmp_path / "run",), data=tmp_path / "images", device="cpu", workers=0, trust=True)
    assert report.score.examples == 6
    assert 1 - report.score.top1_error == pytest.approx(
        json.loads((tmp_path / "run" / "result.json").read_text())["top1"]
    )


@pytest.mark.parametrize(
    ("function", "more", "says"),
    [
        ("plain", "--size 64", "cannot take images of 3x64x64: mat1 and mat2 shapes cannot be multiplied"),
        ("nothing", "", "returned list, not a torch.nn.Module"),
        ("ten", "", "has 10 outputs, but the data has 3 classes: give the function a parameter"),
        ("pair", "", "returns tuple in training, not one tensor of class scores"),
        ("probable", "", "returns probabilities, but the loss needs the class scores before softmax: remove"),
        ("counting", "", "the folded network computes different results"),
        ("plain", "--normalize convert", "has no batch normalization, so --normalize=convert does nothing"),
        ("plain", "--normalize insert", "has no layer to normalize, so --normalize=insert does nothing"),
        ("build", "--dropout 0.5", "--network cannot be combined with options of the paper's network: remove dropout"),
        ("build", "--validate 0.1", "has a validation set, val, so --validate is not needed"),
    ],
)
def test_what_a_user_can_put_right_gets_one_sentence(words, source, tmp_path, capsys, function, more, says):
    words[2] = f"{source}:{function}"
    assert main([*words, *more.split()]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_a_single_class(data, words, source, tmp_path, capsys):
    for split in ("train", "val"):
        shutil.copytree(data / split / "class0", tmp_path / "one" / split / "class0")
    words[2], words[words.index("--data") + 1] = f"{source}:build", str(tmp_path / "one")
    assert main(words) == 2
    assert "has a single class, class0, so there is nothing to learn" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "says"),
    [("failing", "{0}:failing raised IndexError"), ("build", "importing {0} raised ZeroDivisionError")],
)
def test_an_exception_in_the_users_code_keeps_its_traceback(words, source, tmp_path, capsys, function, says):
    broken = tmp_path / "broken.py"
    broken.write_text("def failing():\n    return [][1]\n" + ("1 / 0\n" if function == "build" else ""))
    words[2] = f"{broken}:{function}"
    assert main(words) == 2
    *trace, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"batchnorm train: {says.format(broken)}")
    assert last.endswith("; no results were written")
    assert trace[0] == "Traceback (most recent call last):"
    assert [line.split(", line")[0] for line in trace if "File" in line] == [f'  File "{broken}"']
    assert not (tmp_path / "run").exists()


def test_an_exception_in_another_process_keeps_its_traceback_too(words, tmp_path, capsys, monkeypatch):
    broken = tmp_path / "broken.py"
    broken.write_text("def failing():\n    return [][1]\n")

    def from_a_worker(*_):
        try:
            make_network(f"{broken}:failing")
        except UserCodeError as error:
            raise _portable(error) from None

    monkeypatch.setattr("batchnorm.train.train_command.check_before_training", from_a_worker)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "    return [][1]\n" in error
    assert error.endswith(f"{broken}:failing raised IndexError; no results were written\n")


def test_a_class_without_images(words, data, tmp_path, capsys):
    shutil.copytree(data, tmp_path / "images")
    shutil.rmtree(tmp_path / "images" / "train" / "class1")
    (tmp_path / "images" / "train" / "class1").mkdir()
    words[words.index("--data") + 1] = str(tmp_path / "images")
    assert main(words) == 2
    assert "has no images for 1 of 3 classes in split 'train' (class1)" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "images" / "val")
    assert main([*words, "--validate", "0.1"]) == 2
    assert "has no images for 1 of 3 classes" in capsys.readouterr().err


def test_a_run_needs_a_recipe_or_a_network(data, capsys):
    assert main(["train", "--data", str(data)]) == 2
    assert "nothing to train: add --recipe, such as bn-x30" in capsys.readouterr().err
    assert main(["train", "--recipe", "bn-x5", "--normalize", "insert", "--data", str(data)]) == 2
    assert "normalize=insert applies only to a network of your own: add --network" in capsys.readouterr().err


def test_a_recipe_of_before_networks_of_ones_own():
    fields = json.loads(BN_X5.to_json())
    for name in ("factory", "normalize", "validate"):
        del fields[name]
    assert Recipe.from_json(json.dumps(fields)) == BN_X5


def test_how_long_it_will_take_is_said_after_a_hundred_steps(data, source, tmp_path, capsys):
    recipe = small(factory=f"{source}:plain", epochs=30)
    train_small(data, tmp_path, recipe, log_every=50, checkpoint_every=1000, evaluate_every=1000)
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("about ")]
    assert len(said) == 1
    assert said[0].endswith("left for 20 steps")


def test_a_monitor_without_layers_stops_before_the_run_begins(words, source, tmp_path, capsys):
    out = tmp_path / "run"
    command = [*words, "--network", f"{source}:CallsFunctions", "--normalize", "as-is", "--out", str(out)]
    assert main([*command, "--monitor-every", "2"]) == 2
    assert "--monitor-every found nothing to record" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--network", "mynte.py:build"], "mynte.py is not a file"),
        (["--network", "SOURCE:biuld"], "own.py has no function biuld"),
        (["--network", "SOURCE:build", "--from", "runs/mnie"], "--from runs/mnie: there is no such run or file"),
    ],
)
def test_what_is_missing_is_reported_before_the_images_are_listed(source, tmp_path, capsys, words, says):
    given = [word.replace("SOURCE", str(source)) for word in words]
    assert main(["train", *given, "--data", str(tmp_path / "absent")]) == 2
    assert says in capsys.readouterr().err
