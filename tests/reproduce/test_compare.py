"""Test ``batchnorm compare`` on a small user network that is actually trained."""

import json
import math
import statistics

import pytest
from training import striped_folder

from batchnorm.cli import main
from batchnorm.reproduce.compare import _steps, difference, interval, verdict
from batchnorm.train import RECIPES, Options, train
from batchnorm.train.train_command import Overrides, resolve

SOURCE = """
from torch import nn

def plain(classes):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, classes)
    )

def normalized(classes):
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, classes),
    )
"""
FIELDS = {"size": 32, "batch_size": 8, "epochs": 0.75}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare")
    striped_folder(root / "images")
    (root / "own.py").write_text(SOURCE)
    return root


@pytest.fixture
def words(folder):
    options = "--size 32 --batch-size 8 --epochs 0.75 --rates 0.01 --seeds 2 --device cpu --workers 0"
    return ["compare", "--network", f"{folder}/own.py:plain", "--data", str(folder / "images"), *options.split()]


def trained(folder, out, function, change, name, seed):
    """Train one run of the comparison in this process."""
    base = resolve(RECIPES["bn-x5"], Overrides(factory=f"{folder}/own.py:{function}", **FIELDS))
    recipe = resolve(base, Overrides(name=f"{name}-rate-0.01-seed-{seed}", normalize=change, rate=0.01, seed=seed))
    train(recipe, Options(folder / "images", out / recipe.name, device="cpu", workers=0))


@pytest.mark.parametrize(("function", "changes"), [("plain", ("as-is", "insert")), ("normalized", ("remove", "as-is"))])
def test_what_is_missing_is_trained_and_all_of_it_is_compared(folder, tmp_path, words, capsys, function, changes):
    words[2] = words[2].replace("plain", function)
    for name, change in zip(("without-bn", "with-bn"), changes, strict=True):
        for seed in range(2):
            if (function, name, seed) != ("plain", "with-bn", 1):  # the command trains that one
                trained(folder, tmp_path, function, change, name, seed)
    capsys.readouterr()
    assert main([*words, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    left = 1 if function == "plain" else 0
    kinds = f"without batch normalization (--normalize {changes[0]}) and with it (--normalize {changes[1]})"
    assert f"{kinds}: 30 training images of 3" in said
    assert f"4 runs of 3 steps in {tmp_path}, {left} of them unfinished" in said
    found = json.loads((tmp_path / "compare.json").read_text())
    ends = {
        name: [json.loads((tmp_path / f"{name}-rate-0.01-seed-{k}/result.json").read_text())["top1"] for k in range(2)]
        for name in ("without-bn", "with-bn")
    }
    assert [row["accuracies"] for row in found["rates"]] == list(ends.values())
    assert found["difference"]["mean"] == pytest.approx(
        statistics.fmean(ends["with-bn"]) - statistics.fmean(ends["without-bn"])
    )
    assert found["verdict"].startswith("inconclusive: the difference is")  # there are only twelve validation images
    assert found["seeds"] == [0, 1]
    assert found["environment"].keys() >= {"hardware", "torch", "commit"}
    page = (tmp_path / "report.html").read_text()
    assert "inconclusive" in page
    assert '"low":[' in page
    assert main([*words, "--out", str(tmp_path), "--weight-decay", "0.5"]) == 2
    assert "weight_decay is 4e-05 instead of 0.5" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path), "--max-steps", "2"]) == 2
    assert "has already trained for 3 steps, but this command plans only 2: " in capsys.readouterr().err


def test_the_intervals():
    # Welch's interval by hand: three values each, variances 1e-4 and 4e-4; 2.94 degrees of freedom, rounded down to 2.
    before, after = [0.49, 0.50, 0.51], [0.58, 0.60, 0.62]
    gap, low, high = difference(before, after, 10**12)
    half = 4.30 * math.sqrt(1e-4 / 3 + 4e-4 / 3)
    assert (gap, low, high) == pytest.approx((0.1, 0.1 - half, 0.1 + half), abs=1e-5)
    # If all seeds agree, only the random choice of the validation images makes the accuracy uncertain.
    assert interval([0.5, 0.5], 100) == pytest.approx((0.5 - 0.098, 0.5 + 0.098))
    assert verdict(gap, low, high).startswith("batch normalization helps: the difference is +10.0 points")
    assert verdict(-0.1, -0.2, -0.05).startswith("batch normalization hurts")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--rate 0.1", "Perhaps you meant:\n    --rates"),
        ("--normalize insert", "Unrecognized options: --normalize, insert"),
        ("--freeze-statistics", "Unrecognized options: --freeze-statistics"),
        ("--graph True", "--graph True captures CUDA graphs, but this run is on the CPU"),
        ("--seeds 1", "seeds=1: must be 2 or more"),
        ("--size 2", "own.py:plain cannot take images of 3x2x2: "),
    ],
)
def test_what_cannot_be_compared_is_said_first(words, tmp_path, capsys, more, says):
    words = [*words, *more.split(), "--out", str(tmp_path / "out")]
    try:
        status = main(words)
    except SystemExit as stop:  # the command has no such option
        status = stop.code
    assert status == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_interval_of_a_difference_of_accuracies_ends_at_100_points():
    assert difference([0.0, 0.4], [0.3, 0.9], 100)[1:] == (-1.0, 1.0)


def test_a_comparison_that_is_stopped_goes_on_later(words, tmp_path, capsys):
    assert main([*words, "--out", str(tmp_path), "--minutes", "0"]) == 130
    assert capsys.readouterr().err == "stopped; run the same command again to resume\n"
    assert not (tmp_path / "compare.json").exists()


def test_rates_that_agree_in_six_digits_have_folders_of_their_own(words, tmp_path, monkeypatch):
    started = []
    monkeypatch.setattr(
        "batchnorm.reproduce.compare.run_side_by_side", lambda waiting, **options: started.extend(waiting)
    )
    k = words.index("0.01")
    assert main([*words[:k], "0.1234567", "0.1234568", *words[k + 1 :], "--out", str(tmp_path)]) == 130
    assert len({job.folder for job in started}) == len(started) == 8


def test_a_network_is_needed(folder, capsys):
    assert main(["compare", "--data", str(folder / "images")]) == 2
    assert "nothing to compare: name your own network with --network" in capsys.readouterr().err


def test_the_sentence_about_steps_names_what_it_compares():
    # The verdict compares final accuracies, with population statistics; these curves use running averages.
    for times, ends in ((None, "never reaches this value."), (2.0, "also reached, in 2.0 times fewer steps.")):
        told = _steps(times, (10, 0.444))
        assert told.startswith(
            "In the validations during training, which use running averages, the best mean accuracy without BN is 44"
        )
        assert told.endswith(ends)
