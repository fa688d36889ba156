import json
import os
import random
import shutil
import signal
import tarfile
import time
from pathlib import Path

import pytest
from training import assert_same_outcome, lines_in, outcome, small, start, start_and_kill, train_small

from batchnorm.train import Recipe, Stopped
from batchnorm.train.checkpoint import load_latest, save
from batchnorm.train.metrics import Logger, read
from batchnorm.train.saved_runs import open_run
from batchnorm.train.train_command import _summary


@pytest.fixture(scope="module")
def reference(data, tmp_path_factory):
    """Return the folder of an uninterrupted run of 12 steps."""
    out = tmp_path_factory.mktemp("reference")
    train_small(data, out, targets=(0.1, 1.01))
    return out


def test_what_a_run_leaves(reference):
    result = json.loads((reference / "result.json").read_text())
    lines = read(reference / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in lines if "val_top1" in line] == [5, 10, 12, 12]  # the last is the folded network's
    assert (result["steps"], result["examples"], result["classes"], result["diverged"]) == (12, 30, 3, False)
    assert result["top1"] == lines[-1]["val_top1"]
    assert result["best_top1"] == max(line["val_top1"] for line in lines[:-1] if "val_top1" in line)
    assert result["steps_to"] == {"0.1": 5, "1.01": None}
    assert Recipe.from_json((reference / "recipe.json").read_text()) == small()
    final = load_latest(reference / "final")
    assert final.state["classes"] == ["class0", "class1", "class2"]
    small().network(3).load_state_dict(final.model)


def test_a_short_run_logs_its_loss_before_each_validation(data, tmp_path):
    train_small(data, tmp_path, small(epochs=1.5), log_every=100, evaluate_every=0)
    lines = read(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == [4, 6]
    assert [line["step"] for line in lines if "val_top1" in line] == [4, 6, 6]


def test_a_finished_run_says_so(data, reference, tmp_path, capsys):
    run = shutil.copytree(reference, tmp_path / "run")
    train_small(data, run)
    said = capsys.readouterr().out
    assert "going on" not in said
    assert "this run is finished, so only its final network is computed and scored again. To train longer" in said
    assert_same_outcome(run, reference)


@pytest.mark.slow
def test_it_learns(data, tmp_path):
    result = train_small(data, tmp_path, small(width=0.1, rate=0.02, epochs=12), evaluate_every=0, checkpoint_every=99)
    lines = read(tmp_path / "metrics.jsonl")
    losses = [line["loss"] for line in lines if "loss" in line]
    # Small batches are noisy, so compare the sums over the first two and the last two epochs.
    assert sum(losses[-8:]) < 0.85 * sum(losses[:8])
    assert result.top1 > 0.5


def test_the_training_images_are_scored_as_validation_images_are(data, tmp_path):
    shutil.copytree(data / "train", tmp_path / "data" / "train")
    (tmp_path / "data" / "val").symlink_to(tmp_path / "data" / "train")
    for cache in ("none", "device"):
        result = train_small(tmp_path / "data", tmp_path / cache, small(epochs=0.25), score_training=True, cache=cache)
        assert result.train_top1 == result.top1
    assert train_small(data, tmp_path / "not asked", small(epochs=0.25)).train_top1 is None


def test_validations_alone_do_not_save(data, tmp_path):
    start_and_kill(8, data, tmp_path, evaluate_every=1, checkpoint_every=5)
    steps = [int(path.name[5:]) for path in (tmp_path / "checkpoints").glob("step-*")]
    assert all(step in (5, 10, 12) for step in steps)


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["none", "device"])
def test_on_a_gpu_a_run_goes_on_where_it_stopped(data, tmp_path, cache):
    recipe, options = small(width=0.25, epochs=6, dropout=0.2), {"device": "cuda", "cache": cache}
    train_small(data, tmp_path / "whole", recipe, **options)
    for steps in (13, 24):  # the graph is captured after three steps
        result = train_small(data, tmp_path / "parts", recipe, max_steps=steps, **options)
    assert result.steps == 24
    assert result.top1 is not None
    whole, parts = (
        [line for line in read(tmp_path / run / "metrics.jsonl") if "loss" in line] for run in ("whole", "parts")
    )
    assert [line["step"] for line in parts] == [line["step"] for line in whole] == list(range(1, 25))
    # On a GPU, the last bits differ from run to run, and training amplifies the difference.
    for a, b in zip(whole[:6], parts[:6], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=0.05)
    assert sum(line["loss"] for line in parts[13:]) == pytest.approx(sum(line["loss"] for line in whole[13:]), rel=0.2)


@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_at_random_points(data, reference, tmp_path, times):
    rng = random.Random(0)
    kills = 0
    while kills < times:
        out = tmp_path / f"run{kills}"
        while not (out / "result.json").exists():
            process = start(data, out)
            if kills < times:
                # Kill the run at a random time between its start and its last step.
                wanted, delay = rng.randrange(0, 16), rng.uniform(0, 0.2)
                while process.is_alive() and lines_in(out) < wanted:
                    time.sleep(0.005)
                process.join(delay)
                if process.is_alive():
                    process.kill()
                    kills += 1
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL)
        assert_same_outcome(out, reference)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_save_first(data, reference, tmp_path, number, monkeypatch):
    write = Logger.log

    def write_and_signal(logger, record):
        write(logger, record)
        if record["step"] == 3:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Logger, "log", write_and_signal)
        with pytest.raises(Stopped, match="stopped at step 3"):
            train_small(data, tmp_path, checkpoint_every=1000, evaluate_every=5)
    assert load_latest(tmp_path / "checkpoints").step == 3
    train_small(data, tmp_path)
    assert_same_outcome(tmp_path, reference)


def test_a_damaged_checkpoint_costs_steps_but_not_the_run(data, reference, tmp_path, capfd):
    shutil.copytree(reference, tmp_path / "run")
    newest = max((tmp_path / "run" / "checkpoints").iterdir())
    os.truncate(newest / "state.pt", 100)
    shutil.rmtree(tmp_path / "run" / "final")
    train_small(data, tmp_path / "run", targets=(0.1, 1.01))
    assert "state.pt has 100 bytes" in capfd.readouterr().out
    assert_same_outcome(tmp_path / "run", reference)


def test_a_folder_of_another_run_is_refused(data, reference):
    with pytest.raises(ValueError, match=r"rate is 0\.0075 instead of 0\.1"):
        train_small(data, reference, small(rate=0.1))


def test_a_longer_run_goes_on(data, tmp_path):
    train_small(data, tmp_path, small(epochs=1))
    result = train_small(data, tmp_path, small(epochs=2))
    assert result.steps == 8
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl") if "loss" in line] == list(range(1, 9))


def test_a_run_is_not_made_shorter_than_it_is(data, tmp_path):
    train_small(data, tmp_path, small(epochs=2))
    with pytest.raises(
        ValueError, match="has already trained for 8 steps, but this command plans only 4: increase --epochs"
    ):
        train_small(data, tmp_path, small(epochs=1))
    assert Recipe.read(tmp_path / "recipe.json").epochs == 2


def test_divergence_is_a_result(data, tmp_path):
    recipe = small(batch_norm=False, rate=1e9)
    result = train_small(data, tmp_path, recipe)
    assert result.diverged
    assert result.top1 is None
    assert read(tmp_path / "metrics.jsonl")[-1]["loss"] is None
    assert json.loads((tmp_path / "result.json").read_text())["diverged"] is True


def test_dropout_and_order_resume_exactly(data, tmp_path):
    recipe = small(dropout=0.4, local_response=True, shuffle="fixed", photometric="full", batch_norm=False, epochs=1.5)
    train_small(data, tmp_path / "whole", recipe)
    start_and_kill(2, data, tmp_path / "parts", recipe)
    train_small(data, tmp_path / "parts", recipe)
    assert_same_outcome(tmp_path / "parts", tmp_path / "whole")


def test_the_monitor_watches_without_a_trace(data, reference, tmp_path):
    train_small(data, tmp_path, monitor_every=4, targets=(0.1, 1.01))
    records = read(tmp_path / "monitor.jsonl")
    assert [record["step"] for record in records] == [4, 8, 12]
    assert len(records[0]["percentiles"]) == sum(".bn.weight" in k for k in outcome(reference)[1])
    assert_same_outcome(tmp_path, reference)


def test_tensorboard(data, tmp_path):
    train_small(data, tmp_path, small(epochs=0.5), tensorboard=True)
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_bf16_on_the_cpu(data, tmp_path):
    result = train_small(data, tmp_path, small(epochs=0.5), precision="bf16")
    assert not result.diverged


def real_images():
    return next((p / "shared" / "data" for p in Path(__file__).parents if (p / "shared" / "data").is_dir()), None)


@pytest.mark.slow
@pytest.mark.skipif(real_images() is None, reason="no ../shared/data with real images")
def test_a_thousand_real_jpegs(tmp_path):
    with tarfile.open(real_images() / "imagenet-sample-1000-short256.tar") as tar:
        tar.extractall(tmp_path / "raw", filter="data")
    images = sorted(p for p in (tmp_path / "raw").rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
    assert len(images) == 1000
    for split in ("train", "val"):
        for label, image in enumerate(images):
            folder = tmp_path / "data" / split / f"{label:03d}"
            folder.mkdir(parents=True)
            (folder / image.name).symlink_to(image)
    result = train_small(
        tmp_path / "data", tmp_path / "run", small(batch_size=250, epochs=1), evaluate_every=0, checkpoint_every=99
    )
    assert (result.examples, result.classes, result.corrupt, result.steps) == (1000, 1000, 0, 4)
    assert outcome(tmp_path / "run")[0] == 4


def test_a_run_does_not_go_on_with_other_data(data, tmp_path):
    run = tmp_path / "run"
    train_small(data, run, small(epochs=1))
    other = shutil.copytree(data, tmp_path / "other")
    next(path for path in sorted(other.joinpath("train").rglob("*")) if path.is_file()).unlink()
    with pytest.raises(
        ValueError,
        match=r"the run in .* and this command use different data \(train 30 and 29, .*\); keep their results in sep",
    ):
        train_small(other, run, small(epochs=2))
    assert train_small(data, run, small(epochs=2)).steps > 0


def test_files_that_cannot_be_read_are_listed(data, tmp_path):
    broken = shutil.copytree(data, tmp_path / "broken")
    for split in ("train", "val"):
        (next(path for path in sorted(broken.joinpath(split).iterdir())) / "broken.png").write_bytes(b"no image")
    result = train_small(broken, tmp_path / "run", small(epochs=1))
    assert result.corrupt == 2
    assert all("broken.png" in file for file in result.corrupt_files)
    assert "2 file(s) could not be read and were skipped:\n  " in _summary(result, tmp_path)


def test_a_link_to_nowhere_is_an_unreadable_image(data, tmp_path):
    broken = shutil.copytree(data, tmp_path / "broken")
    (broken / "train/class0/link.png").symlink_to(tmp_path / "nowhere.png")
    result = train_small(broken, tmp_path / "run", small(epochs=0.5))
    assert "link.png" in result.corrupt_files[0]


def test_validation_without_a_readable_image_is_an_error(data, tmp_path):
    broken = shutil.copytree(data, tmp_path / "broken")
    for file in (broken / "val").rglob("*.png"):
        file.unlink() if file.name == "0.png" else file.write_bytes(b"no image")
    with pytest.raises(ValueError, match="none of the 9 images to score can be read"):
        train_small(broken, tmp_path / "run", small(epochs=1))


def test_a_network_without_batch_normalization_has_no_statistics(data, tmp_path):
    result = train_small(data, tmp_path / "run", small(epochs=1, batch_norm=False))
    assert result.statistics == "none"
    summary = _summary(result, tmp_path)
    assert " steps\nbest top-1 accuracy: " in summary
    assert "statistics" not in summary


def test_a_checkpoint_without_its_parts_is_told(data, reference, tmp_path):
    found = load_latest(reference / "checkpoints")
    for state in ({}, {**found.state, "sums": 3}, {**found.state, "positions": [1]}, {**found.state, "optimizer": []}):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(reference, tmp_path / "run")
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        save(tmp_path / "run" / "checkpoints", 12, found.model, state)
        with pytest.raises(ValueError, match=r"the checkpoint in .*run does not fit the network"):
            train_small(data, tmp_path / "run")


def test_broken_files_of_a_run_are_named(data, reference, tmp_path):
    run = shutil.copytree(reference, tmp_path / "run")
    (run / "data.json").write_text("[")
    with pytest.raises(ValueError, match=r"data\.json is not valid JSON"):
        train_small(data, run)
    final = load_latest(run / "final")
    shutil.rmtree(run / "final")
    save(run / "final", 12, final.model, {})
    classes = [f"class{k}" for k in range(3)]
    with pytest.raises(ValueError, match=r"final has no list of classes or no network settings"):
        open_run(run).load(classes)
    manifest = next((run / "final").glob("*/manifest.json"))
    manifest.write_text('{"format": "batchnorm checkpoint 1"}')
    with pytest.raises(ValueError, match=r"manifest\.json has no valid step, or lacks"):
        _ = open_run(run).weights
    shutil.rmtree(run / "final")
    (run / "result.json").write_text("3")
    with pytest.raises(ValueError, match=r"result\.json is not a JSON object"):
        open_run(run).load(classes)
