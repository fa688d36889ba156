"""Test the commands ``batchnorm train`` and ``batchnorm describe`` as a user types them."""

import json
import os
import re
import shutil
import signal
import time
from threading import Thread

import pytest
from full_disk import no_room
from training import lines_in

from batchnorm.cli import main
from batchnorm.data.image_sources import open_source, small_images_note
from batchnorm.train.metrics import read


def command(recipe, data, out, more):
    """Return the words of a command that trains a small network with one of the paper's recipes."""
    options = f"--recipe {recipe} --width 0.04 --size 32 --device cpu --workers 0 {more}"
    return ["train", "--data", str(data), "--out", str(out), *options.split()]


def test_describe_says_what_small_images_do_without(capsys):
    for size, note in ((32, "left out and the first convolution has stride 1"), (64, "the first max pool is left out")):
        assert main(["describe", "inception", "--size", str(size)]) == 0
        assert note in capsys.readouterr().out


def test_describe(capsys):
    assert main(["describe", "inception"]) == 0
    out = capsys.readouterr().out
    assert "11,188,288" in out
    assert "13.6 million parameters" in out
    assert "22% more" in out


def test_train_with_overrides(data, tmp_path, capsys):
    fields = "--batch-size 10 --epochs 1 --dropout 0.1 --per-activation 5a 5b"
    assert main(command("bn-x30", data, tmp_path, f"{fields} --estimate-batches 2 --targets 0.1")) == 0
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    assert (recipe["rate"], recipe["dropout"], recipe["per_activation"]) == (0.045, 0.1, ["5a", "5b"])
    assert "after 3 steps" in capsys.readouterr().out
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 3


def test_a_run_of_few_images_and_few_classes(data, tmp_path, capsys):
    out = tmp_path / "my run"
    assert main(command("bn-x30", data, out, "--batch-size 100 --epochs 1")) == 0
    said, shown = capsys.readouterr()
    assert "; 1 step of 30 images on cpu, too few images for --batch-size 100, in " in said
    assert f"next: batchnorm predict '{out}' IMAGE...\n      batchnorm fold '{out}' -o net.onnx\n" in said
    assert "val_top1" in shown
    assert "top5" not in shown, "there are only three classes"
    assert "top-5" not in said
    assert main(["evaluate", str(out), "--data", str(data), "--device", "cpu", "--workers", "0"]) == 0
    assert "top-5" not in capsys.readouterr().out


def test_steps_that_share_the_images_evenly_are_not_called_small(data, tmp_path, capsys):
    assert main(command("bn-x30", data, tmp_path, "--batch-size 28 --epochs 1 --max-steps 1")) == 0
    assert "; 1 step of 15 images on cpu, in " in capsys.readouterr().out


def test_images_that_would_be_enlarged_are_told(data):
    source = open_source(data, "train")
    assert small_images_note(source, 32) is None  # the images are 36 px wide and high
    # The note advises no size, because not every network takes smaller images.
    assert small_images_note(source, 64) == (
        "in a sample, most images are smaller than --size 64 and will be enlarged; the median short side is 36 px"
    )


def test_a_run_that_diverges_is_told_by_the_exit_status(data, tmp_path, capsys):
    words = command("inception", data, tmp_path, "--batch-size 10 --epochs 3 --rate 1e30 --log-every 1")
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 1
    assert "diverged by step" in capsys.readouterr().out


def test_help_says_what_each_recipe_has(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    # Remove all spaces, because lines may break anywhere.
    text = "".join(capsys.readouterr().out.replace("│", " ").split())
    overrides = text.partition("fieldsoftherecipetochange")[2]
    assert "None" not in overrides
    assert "--decayFLOATfactorbywhichthelearningrateismultipliedevery--decay-epochsepochs(default:0.96)" in overrides
    assert "(byrecipe:0.045;0.0015ininception,bn-baseline,inception-sigmoid;0.0075inbn-x5," in overrides
    assert "(byrecipe:none;5binbn-x30-per-activation," in overrides


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ("--data nowhere", "nowhere"),
        ("--size 16", "32 px or more, not 16"),
        ("--epochs 0.001", "epochs=0.001 is less than one step (steps per epoch: 1)"),
        ("--epochs 1e30", "epochs=1e+30 is more than 10,000,000,000 steps (steps per epoch: 1)"),
        ("--batch-size 1", "some step has fewer than 2 examples, too few"),
    ],
    ids=["no data", "too small", "no step", "too many steps", "batch of one"],
)
def test_what_a_user_can_put_right_gets_one_sentence(data, tmp_path, capsys, more, says):
    assert main(command("bn-x5", data, tmp_path / "run", more)) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_an_unknown_recipe(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["train", "--recipe", "bn-x7", "--data", "nowhere"])
    assert stop.value.code == 2


def test_a_corrected_command_is_not_refused_for_the_mistake_before(data, tmp_path, capsys):
    words = command("bn-x5", data, tmp_path / "run", "--batch-size 8 --max-steps 1 --estimate-batches 2")
    assert main([*words, "--size", "16"]) == 2
    assert "32 px or more" in capsys.readouterr().err
    assert main(words) == 0


def test_a_stop_is_told_once(data, tmp_path, capsys):
    def interrupt():
        while not lines_in(tmp_path / "run"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    words = command("bn-x5", data, tmp_path / "run", "--batch-size 8 --log-every 1")
    Thread(target=interrupt, daemon=True).start()
    assert main(words) == 130
    last = capsys.readouterr().err.splitlines()[-2:]
    assert last[0].startswith("step ")
    assert re.fullmatch(r"stopped at step \d+(, during validation)?; run the same command again to resume", last[1])


def test_a_damaged_recipe_is_named(data, tmp_path, capsys):
    (tmp_path / "recipe.json").write_text("{")
    assert main(["evaluate", str(tmp_path), "--data", str(data)]) == 2
    assert (
        f"{tmp_path}/recipe.json is not a valid recipe for this version of batchnorm: Expecting"
        in capsys.readouterr().err
    )


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_later(data, tmp_path, capsys):
    more = "--batch-size 8 --max-steps 2 --log-every 1 --checkpoint-every 1 --estimate-batches 2"
    words = command("bn-x5", data, tmp_path / "run", more)
    with no_room(20_000):
        assert main(words) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"batchnorm train: {tmp_path}/run/checkpoints/.*/model.safetensors: file too large", last)
    assert main(words) == 0
    assert [line["step"] for line in read(tmp_path / "run" / "metrics.jsonl") if "loss" in line] == [1, 2]


def test_file_names_are_no_markup(data, tmp_path, capsys):
    broken = shutil.copytree(data, tmp_path / "data")
    (broken / "val" / "class0" / "[bold].png").write_bytes(b"no image")
    more = "--batch-size 8 --max-steps 1 --estimate-batches 2"
    assert main(command("bn-x5", broken, tmp_path / "run", more)) == 0
    assert "[bold].png" in capsys.readouterr().out.replace("\n", "")
