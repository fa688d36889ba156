"""Test ``bn.load`` on a small trained run."""

import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from training import small

import batchnorm as bn
from batchnorm.data import Normalize, open_images
from batchnorm.data.augment import IMAGENET_MEAN, IMAGENET_STD
from batchnorm.evaluate import Crops, open_squares
from batchnorm.evaluate.predictions import predict as evaluate_network
from batchnorm.layers import BatchNorm
from batchnorm.train import checkpoint
from batchnorm.train.evaluate_command import evaluate
from batchnorm.train.saved_runs import open_run

CLASSES = ("class0", "class1", "class2")


def test_what_a_run_holds(run, finished):
    assert run.classes == CLASSES
    assert run.recipe == small()
    preprocessing = run.preprocessing
    assert (preprocessing.size, preprocessing.mean, preprocessing.std) == (32, IMAGENET_MEAN, IMAGENET_STD)
    assert run.metrics[-1]["final"]
    assert run.metrics[-1]["val_top1"] == json.loads((finished / "result.json").read_text())["top1"]
    assert repr(run) == f"TrainedRun('{finished}', 32 px, 3 classes)"


def test_both_networks_compute_the_same(run, files):
    assert any(isinstance(m, BatchNorm) for m in run.trained.modules())
    assert not any(isinstance(m, BatchNorm) for m in run.network.modules())
    assert not run.trained.training
    assert not run.network.training
    batch = run.preprocessing(files)
    with torch.no_grad():
        torch.testing.assert_close(run.network(batch), run.trained(batch), rtol=1e-3, atol=1e-4)


def test_predictions_are_those_of_evaluate_and_of_validation(run, finished, data, files):
    found = run.predict(files, batch_size=5)
    squares = open_squares(data, "val", crops=Crops.of(1, 32))
    expected = evaluate_network(open_run(finished).load(CLASSES), squares).probabilities
    torch.testing.assert_close(found.probabilities, expected, rtol=1e-5, atol=1e-6)
    right = np.mean([name == file.parent.name for name, file in zip(found.classes, files, strict=True)])
    assert right == pytest.approx(json.loads((finished / "result.json").read_text())["top1"])
    assert right == pytest.approx(1 - evaluate((finished,), data=data, device="cpu", workers=0).score.top1_error)


def test_the_default_device_is_not_used(run, finished, files):
    expected = run.predict(files).probabilities, run.preprocessing(files)
    again = bn.load(finished)  # its first prediction folds the network
    torch.set_default_device("meta")
    try:
        found = again.predict(files).probabilities, again.preprocessing(files)
    finally:
        torch.set_default_device(None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_input_is_that_of_validation(run, data, files):
    validation = open_images(data, "val", size=32, batch_size=12, train=False)
    ((images, _),) = validation.epoch(0)
    assert torch.equal(run.preprocessing.crops(files), images)
    assert torch.equal(run.preprocessing(files), Normalize()(images))


def test_files_pillow_images_and_tensors_give_the_same(run, files):
    pictures = [Image.open(file) for file in files[:3]]
    tensors = torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures])
    expected = run.predict(files[:3])
    for images in (pictures, tensors, list(tensors), map(str, files[:3]), np.array(list(map(str, files[:3])))):
        assert torch.equal(run.predict(images).probabilities, expected.probabilities)
    for image in (str(files[0]), pictures[0], tensors[0]):
        found = run.predict(image)
        assert found.classes == expected.classes[:1]
        torch.testing.assert_close(found.probabilities, expected.probabilities[:1])
    assert run.predict([]).probabilities.shape == (0, 3)


def test_wide_and_gray_images_are_cropped_as_files_are(run, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (70, 101), dtype=np.uint8)
    picture = Image.fromarray(pixels)
    picture.save(tmp_path / "gray.png")
    rgb = torch.from_numpy(pixels).expand(3, -1, -1)
    expected = run.preprocessing.crops(tmp_path / "gray.png")
    assert torch.equal(run.preprocessing.crops(picture), expected)
    assert torch.equal(run.preprocessing.crops(rgb), expected)


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (3, "image 1 is of type int: give a path, a Pillow image or a uint8 tensor"),
        (torch.zeros(3, 8, 8), r"image 1 is a torch.float32 tensor of shape \(3, 8, 8\): give a uint8 tensor of shape"),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), r"torch.uint8 tensor of shape \(8, 8, 3\): give a uint8 "),
    ],
)
def test_other_things_are_no_images(run, files, image, says):
    with pytest.raises(ValueError, match=says):
        run.predict([files[0], image])


@pytest.mark.parametrize(
    ("images", "name"),
    [
        (None, "NoneType"),
        (b"bytes", "bytes"),
        ({"a": torch.zeros(3, 8, 8, dtype=torch.uint8)}, "dict"),
        (np.zeros((8, 8, 3), np.uint8), "ndarray"),
        (torch.nn.Sequential(torch.nn.ReLU()), "Sequential"),
        (io.BytesIO(b"a file"), "BytesIO"),
    ],
)
def test_what_is_neither_an_image_nor_images(run, images, name):
    with pytest.raises(ValueError, match=f"image 0 is of type {name}: give a path, a Pillow image or a uint8 tensor"):
        run.predict(images)


@pytest.mark.parametrize("size", [None, 1.5, "64"])
def test_a_batch_size_of_another_type(run, size):
    with pytest.raises(TypeError, match=f"batch_size must be an int, not {type(size).__name__}"):
        run.predict([], batch_size=size)


def test_damaged_images_are_named(run, files, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    with pytest.raises(ValueError, match=r"text.png cannot be read as an image \(.*cannot identify image file\)$"):
        run.predict([files[0], tmp_path / "text.png"])
    cut = Image.open(io.BytesIO(files[0].read_bytes()[:200]))
    with pytest.raises(ValueError, match="image 0 cannot be read as an image"):
        run.predict(cut)
    with pytest.raises(FileNotFoundError, match=r"missing\.png"):
        run.predict("missing.png")


def test_images_are_counted_over_all_batches(run):
    images = [torch.zeros(3, 8, 8, dtype=torch.uint8)] * 3
    with pytest.raises(ValueError, match="image 3 is of type int"):
        run.predict([*images, 0], batch_size=2)


@pytest.fixture
def refused(refusal, tmp_path, files):
    """Return a function that returns load's error message for a folder, and checks that the commands print it, too."""

    def refused(folder):
        with pytest.raises((ValueError, FileNotFoundError)) as error:
            bn.load(folder)
        assert refusal("predict", folder, files[0]) == f"batchnorm predict: {error.value}"
        if folder.is_dir():
            output = tmp_path / "net.pt2"
            assert refusal("fold", folder, "-o", output) == f"batchnorm fold: {error.value}"
            assert not output.exists()
        return str(error.value)

    return refused


def test_folders_that_are_no_finished_run(finished, refused, tmp_path):
    assert refused(tmp_path / "no").endswith("no does not exist: give the folder of a run")
    assert refused(finished.parent).endswith("it holds mine, but a run's folder holds recipe.json and final/")
    unfinished = shutil.copytree(finished, tmp_path / "unfinished", ignore=shutil.ignore_patterns("final"))
    assert "unfinished has no final network: its training has not finished" in refused(unfinished)


def test_a_run_that_was_extended_and_diverged(finished, refused, tmp_path):
    run = shutil.copytree(finished, tmp_path / "extended")
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps({**result, "diverged": True, "steps": 15}))
    assert "diverged after the network in its subfolder 'final' was saved, at step 12; use" in refused(run)


def test_another_number_of_classes_than_the_weights(finished, refused, tmp_path):
    run = shutil.copytree(finished, tmp_path / "mixed")
    saved = checkpoint.load_latest(run / "final")
    checkpoint.save(run / "final", saved.step, saved.model, {**saved.state, "classes": [*CLASSES, "class3"]})
    assert "final names 4 classes, but its weights are for 3" in refused(run)
