"""Fine-tuning: training that starts from existing weights."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from training import OPTIONS, assert_same_outcome, small, train_small

import batchnorm as bn
from batchnorm.cli import main
from batchnorm.train.checkpoint import load_latest
from batchnorm.train.state_dicts import read_state_dict, start_from_, unwrapped

SOURCE = """
from torch import nn

def build(classes):
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(6, classes),
    )
"""
STATISTICS = ("1.running_mean", "1.running_var")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "own.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module")
def pretrained(data, source, tmp_path_factory):
    """Train on three classes, and return the folder of the run."""
    folder = tmp_path_factory.mktemp("runs") / "pretrained"
    train_small(data, folder, small(factory=f"{source}:build", rate=0.05))
    return folder


@pytest.fixture(scope="module")
def two_classes(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two") / "images"
    return shutil.copytree(data, folder, ignore=shutil.ignore_patterns("class2"))


@pytest.fixture
def words(source, data, tmp_path):
    options = "--size 32 --batch-size 8 --device cpu --workers 0"
    given = ["--network", f"{source}:build", "--data", str(data), "--out", str(tmp_path / "run")]
    return ["train", *given, *options.split()]


def network(source, **fields):
    return small(factory=f"{source}:build", **fields).network(3)


@pytest.mark.parametrize("freeze", [True, False])
def test_a_run_on_other_classes_goes_on_from_a_run(source, pretrained, two_classes, tmp_path, capsys, freeze):
    kept = shutil.copytree(pretrained, tmp_path / "kept")
    fields = {"normalize": "convert", "start": str(kept), "freeze_statistics": freeze}
    recipe = small(factory=f"{source}:build", epochs=2, **fields)
    train_small(two_classes, tmp_path / "whole", recipe)
    said = capsys.readouterr().out.splitlines()[1]
    assert said == (
        f"starting from {kept}: 7 of 9 tensors loaded; 5.weight, 5.bias initialized for 2 classes instead of 3"
    )
    train_small(two_classes, tmp_path / "parts", recipe, max_steps=5)
    shutil.rmtree(kept)  # a resumed run does not need it
    train_small(two_classes, tmp_path / "parts", recipe)
    assert_same_outcome(tmp_path / "whole", tmp_path / "parts")
    before, after = (load_latest(folder / "final").model for folder in (pretrained, tmp_path / "whole"))
    assert all(torch.equal(before[name], after[name]) == freeze for name in STATISTICS)
    assert not torch.equal(before["1.weight"], after["1.weight"])  # gamma trains
    run = bn.load(tmp_path / "whole", trust=True)
    assert run.trained[1].frozen_statistics == freeze
    assert run.classes == ("class0", "class1")
    assert not any(isinstance(m, nn.BatchNorm2d) for m in run.network.modules())


def test_the_command_resumes_a_run_whose_start_is_gone(source, words, tmp_path, capsys):
    start = tmp_path / "start.pt"
    torch.save(network(source).state_dict(), start)
    command = [*words, "--from", str(start), "--batch-size", "10", "--epochs", "2"]
    assert main([*command, "--max-steps", "2"]) == 0
    start.unlink()
    assert main(command) == 0
    assert "resuming" in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_a_state_dict_of_a_file(source, tmp_path, ending):
    state = {f"module.{name}": value for name, value in network(source, seed=1).state_dict().items()}
    path = tmp_path / f"weights.{ending}"
    save_file(state, path) if ending == "safetensors" else torch.save(state, path)
    net = network(source, seed=2)
    assert start_from_(net, str(path), 3) == f"starting from {path}: 9 of 9 tensors loaded"
    torch.testing.assert_close({f"module.{k}": v for k, v in net.state_dict().items()}, state, rtol=0, atol=0)


@pytest.mark.parametrize("prefixes", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
@pytest.mark.parametrize("net", [nn.Linear(2, 1), nn.ModuleDict({"module": nn.Linear(2, 1)})])
def test_prefixes_of_wrappers_are_dropped(net, prefixes):
    own = net.state_dict()
    assert unwrapped({prefixes + name: value for name, value in own.items()}, net) == own


def test_an_empty_file_is_no_state_dict(tmp_path):
    (tmp_path / "empty.pt").touch()
    with pytest.raises(ValueError, match=r"empty\.pt cannot be read as a state dict: EOFError$"):
        read_state_dict(tmp_path / "empty.pt")


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (
            {"epoch": 3, "state_dict": {"w": torch.zeros(2)}},
            r"holds dicts \(state_dict\) instead of tensors: save",
        ),
        ({0: torch.zeros(2)}, "is not a state dict, because its key 0 is not a string: save net.state_dict"),
        ({"w": torch.zeros(2, device="meta")}, "w is a meta tensor"),
        ({"w": torch.eye(2).to_sparse()}, "w is a sparse tensor"),
    ],
)
def test_entries_that_no_network_can_load(tmp_path, state, says):
    torch.save(state, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=rf"odd\.pt.*{says}"):
        read_state_dict(tmp_path / "odd.pt")


def test_the_statistics_of_a_frozen_source_move_again(source, tmp_path):
    frozen = network(source, normalize="convert")
    bn.freeze_(frozen)
    torch.save(frozen.state_dict(), tmp_path / "frozen.pt")
    net = network(source, normalize="convert")
    start_from_(net, str(tmp_path / "frozen.pt"), 3)
    assert not net[1].frozen_statistics
    assert net[1].weight.requires_grad


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--from {folder}/other.pt", "other.pt does not fit the network: 8 entries not in the file (0.weight, "),
        (
            "--from {folder}/wide.pt",
            "1 entry with a different shape (0.weight); use the options that it was trained with",
        ),
        ("--from {folder}/absent.pt", "absent.pt: there is no such run or file"),
        ("--from {folder}", "is not the folder of a run: it holds "),
        ("--from {folder}/unfinished", "unfinished has no final network: its training has not finished"),
        ("--freeze-statistics", "--freeze-statistics needs the statistics of a trained network: add --from"),
        ("--from {pretrained} --freeze-statistics", "but layer 1 is not one: add --normalize convert"),
        ("--from {pretrained} --freeze-statistics --normalize remove", "nothing to freeze: the network has no"),
    ],
)
def test_what_cannot_be_the_start(source, words, pretrained, tmp_path, capsys, more, says):
    folder = tmp_path / "files"
    shutil.copytree(pretrained, folder / "unfinished", ignore=shutil.ignore_patterns("final"))
    torch.save({"fc": torch.zeros(1)}, folder / "other.pt")
    torch.save({**network(source).state_dict(), "0.weight": torch.zeros(5, 3, 3, 3)}, folder / "wide.pt")
    assert main([*words, "--epochs", "1", *more.format(folder=folder, pretrained=pretrained).split()]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_run_with_frozen_statistics_says_so(words, pretrained, capsys):
    more = ["--max-steps", "1", "--normalize", "convert", "--from", str(pretrained), "--freeze-statistics"]
    assert main([*words, *more]) == 0
    printed = capsys.readouterr().out
    assert "after 1 steps (folded, frozen statistics)\nbest top-1 accuracy with frozen statistics: " in printed


def test_a_run_that_was_finetuned_records_it(source, data, pretrained, tmp_path):
    recipe = small(factory=f"{source}:build", start=str(pretrained), epochs=0.25)
    train_small(data, tmp_path, recipe, **{**OPTIONS, "evaluate_every": 0})
    assert json.loads((tmp_path / "recipe.json").read_text())["start"] == str(pretrained)
    with pytest.raises(ValueError, match=r"start is .*pretrained' instead of ''"):
        train_small(data, tmp_path, small(factory=f"{source}:build", epochs=0.25))
