"""Test the pipeline from image files to normalized batches on real images, if shared/data has them."""

import importlib.util
import io

import numpy as np
import pytest
import torch
from pictures import real_jpegs, sharded, shared_data
from PIL import Image

from batchnorm.data import Augment, Normalize, open_images, seed_at
from batchnorm.data.crop_boxes import Box
from batchnorm.data.decode import decode_crop


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """Save one JPEG of each of the 1000 classes, as an image folder and as shards; return the paths."""
    root = tmp_path_factory.mktemp("imagenet")
    for name, data in real_jpegs():
        file = root / "folder" / "train" / name.partition("_")[0] / name
        file.parent.mkdir(parents=True)
        file.write_bytes(data)
    return {"folder": root / "folder", "shards": sharded(root / "folder", root / "shards", per_shard=300)}


@pytest.mark.parametrize("layout", ["folder", "shards"])
def test_a_thousand_jpegs_through_the_pipeline(imagenet, layout):
    batches = open_images(imagenet[layout], size=48, batch_size=96, train=True, workers=2)
    augment = Augment("full")
    labels, total = [], torch.zeros(3, dtype=torch.float64)
    for step, (images, y) in enumerate(batches.epoch(0)):
        generator = torch.Generator().manual_seed(seed_at(0, 0, step))
        x = augment(images, augment.draw(len(images), generator))
        assert x.isfinite().all()
        labels += y.tolist()
        total += x.double().mean((2, 3)).sum(0)
    assert sorted(labels) == list(range(1000))
    assert not batches.corrupt
    assert len(batches.classes) == 1000
    assert (total / 1000).abs().max() < 0.3  # normalized by ImageNet's mean, so about zero


def test_evaluation_of_a_thousand_jpegs(imagenet):
    batches = open_images(imagenet["folder"], size=32, batch_size=128, train=False)
    normalize = Normalize()
    outputs = [normalize(images) for images, _ in batches.epoch(0)]
    assert [len(x) for x in outputs] == [128] * 7 + [104]
    spread = torch.cat(outputs).std((0, 2, 3))
    assert (spread > 0.8).all()
    assert (spread < 1.3).all()


def test_pixels_of_real_jpegs_are_those_of_a_plain_loader():
    worst = 0.0
    for _, data in real_jpegs(40):
        out = torch.empty(224, 224, 3, dtype=torch.uint8)
        width, height = decode_crop(data, lambda w, h: Box(3, 5, w - 7, h - 1), out)
        image = Image.open(io.BytesIO(data)).convert("RGB").crop((3, 5, width - 7, height - 1))
        plain = torch.from_numpy(np.array(image.resize((224, 224), Image.Resampling.BILINEAR)))
        worst = max(worst, (out.float() - plain.float()).abs().max().item())
    assert worst <= 1


@pytest.mark.parametrize("cut", [0.3, 0.9])
def test_real_jpegs_cut_off_are_noticed(tmp_path, cut):
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    for k, (_, data) in enumerate(real_jpegs(12)):
        (folder / f"{k:02d}.jpg").write_bytes(data if k % 4 else data[: int(len(data) * cut)])
    batches = open_images(tmp_path, size=32, batch_size=4, train=True)
    assert sum(len(y) for _, y in batches.epoch(0)) == 9
    assert len(batches.corrupt) == 3


@pytest.mark.parametrize("shards", [0, 10])
def test_mini_imagenet_as_unpacked_for_users(tmp_path, shards):
    packed = shared_data("mini-imagenet-64-webp.npz")
    spec = importlib.util.spec_from_file_location("unpack", packed.parents[1] / "tools" / "unpack.py")
    unpack = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unpack)
    arrays = dict(np.load(packed))
    # Keep one in fifty of the images; the others get a number that belongs to no split.
    arrays["split"] = np.where(np.arange(len(arrays["split"])) % 50 == 0, arrays["split"], 9)
    if shards:
        unpack.shards(arrays, tmp_path / "set", shards)
    else:
        unpack.folders(arrays, tmp_path / "set")
    count = [int((arrays["split"] == k).sum()) for k in (0, 1)]
    train = open_images(tmp_path / "set", size=64, batch_size=128, train=True, workers=2, cache="device")
    val = open_images(tmp_path / "set", "val", size=64, batch_size=100, train=False, workers=2)
    assert train.num_examples == count[0]
    assert len(train.order.shard_sizes) == max(1, shards)
    seen = torch.cat([y for _, y in train.epoch(0)]).bincount(minlength=100)
    assert torch.equal(seen, torch.cat([y for _, y in train.epoch(1)]).bincount(minlength=100))
    assert sum(len(y) for _, y in val.epoch(0)) == count[1]
    assert not train.corrupt
    assert not val.corrupt
