import os
import shutil

import numpy as np
import pytest
from pictures import gigantic, image_folder, sharded

from batchnorm.data.image_sources import FolderSource, open_source, small_images_note, training_splits


def test_an_image_of_gigantic_dimensions_is_passed_over(tmp_path):
    image_folder(tmp_path, [(20, 20)] * 3)
    (tmp_path / "train" / "ant" / "gigantic.png").write_bytes(gigantic())
    note = small_images_note(open_source(tmp_path, "train"), 32)
    assert "the median short side is 20 px" in note


def names(path, split):
    source = open_source(path, split)
    return [source.name(k).removeprefix(str(path)) for k in range(len(source.labels))]


def test_a_share_of_each_class_is_held_out(tmp_path):
    data = image_folder(tmp_path / "data", [(8, 8)] * 33)
    kept, held_out = (open_source(data, split) for split in training_splits(data, 0.2))
    assert np.bincount(held_out.labels).tolist() == [2, 2, 2]
    assert np.bincount(kept.labels).tolist() == [9, 9, 9]
    assert sorted(names(data, "train[0.2:]") + names(data, "train[:0.2]")) == sorted(names(data, "train"))
    whole = open_source(data, "train")
    for source in (kept, held_out):
        for k, label in enumerate(source.labels):
            assert source.read(k) == whole.read(names(data, "train").index(source.name(k).removeprefix(str(data))))
            assert source.classes[label] in source.name(k)


def test_where_the_data_lies_does_not_decide_what_is_held_out(tmp_path, monkeypatch):
    data = image_folder(tmp_path / "data", [(8, 8)] * 12)
    moved = shutil.copytree(data, tmp_path / "elsewhere")
    assert names(moved, "train[:0.3]") == names(data, "train[:0.3]")
    held_out = open_source(data, "train[:0.3]").examples.tolist()
    for here, path in ((data, "."), (tmp_path, "data"), (data / "train", "..")):
        monkeypatch.chdir(here)
        assert open_source(path, "train[:0.3]").examples.tolist() == held_out


def test_the_separator_of_paths_does_not_decide_what_is_held_out(tmp_path, monkeypatch):
    data = image_folder(tmp_path / "data", [(8, 8)] * 33)
    expected = open_source(data, "train[:0.3]").examples.tolist()
    name = FolderSource.name
    below = len(str(data))
    monkeypatch.setattr(FolderSource, "name", lambda *at: str(data) + name(*at)[below:].replace("/", "\\"))
    monkeypatch.setattr(os, "sep", "\\")
    assert open_source(data, "train[:0.3]").examples.tolist() == expected


def test_a_share_of_shards_is_held_out(tmp_path):
    data = sharded(image_folder(tmp_path / "data", [(8, 8)] * 12), tmp_path / "shards", per_shard=5)
    kept, held_out = (open_source(data, split) for split in training_splits(data, 0.25))
    assert len(held_out.labels) == sum(held_out.shard_sizes) == 3
    assert len(kept.labels) == sum(kept.shard_sizes) == 9
    assert not set(names(data, "train[0.25:]")) & set(names(data, "train[:0.25]"))


def test_what_cannot_be_held_out(tmp_path):
    data = image_folder(tmp_path / "data", [(8, 8)] * 4)
    with pytest.raises(
        ValueError, match=r"has only one image of class bee, but holding out a share of 0\.5 needs at least two"
    ):
        open_source(data, "train[:0.5]")
    with pytest.raises(FileNotFoundError, match=r"has no validation set \(.* with --validate 0\.1"):
        training_splits(data, 0)
    image_folder(data, [(8, 8)] * 3, split="val")
    with pytest.raises(ValueError, match="has a validation set, val, so --validate is not needed"):
        training_splits(data, 0.1)
