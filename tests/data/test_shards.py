"""Tar shards: written, indexed, read; and what is said of broken ones."""

import io
import os
import tarfile

import numpy as np
import pytest
from pictures import encoded, image_folder, smooth

from batchnorm.data import open_images
from batchnorm.data.index import scan
from batchnorm.data.sharding import shard
from batchnorm.data.source import open_source

PNG = encoded(smooth(8, 8))


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.fixture
def folder(tmp_path):
    image_folder(tmp_path / "set", [(8, 8)] * 20)
    return image_folder(tmp_path / "set", [(8, 8)] * 6, split="val")


def test_shards_hold_the_folder_byte_for_byte(folder, tmp_path, capsys):
    written = shard(folder, tmp_path / "out", per_shard=8)
    assert [tuple(split) for split in written] == [("train", 20, 3, 3), ("val", 6, 1, 3)]
    assert capsys.readouterr().out.splitlines()[0] == "train: 20 images of 3 classes in 3 shards"
    for split in ("train", "val"):
        a, b = open_source(folder, split), open_source(tmp_path / "out", split)
        assert a.classes == b.classes == ("ant", "bee", "cow")
        pairs = [sorted((s.read(i), int(s.labels[i])) for i in range(len(s.labels))) for s in (a, b)]
        assert pairs[0] == pairs[1]
    assert open_source(tmp_path / "out", "train").shard_sizes == (7, 7, 6)


def test_shards_are_mixed_and_reproducible(folder, tmp_path):
    for out, seed in (("a", 0), ("b", 0), ("c", 1)):
        shard(folder, tmp_path / out, per_shard=8, seed=seed)
    a, b, c = ((tmp_path / out / "train-000000.tar").read_bytes() for out in "abc")
    assert a == b != c
    assert len(set(open_source(tmp_path / "a", "train").labels[:7])) > 1


def test_webdataset_groups_its_members(folder, tmp_path):
    shard(folder, tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "val-000000.tar") as tar:
        names = tar.getnames()
    for image, label in zip(names[::2], names[1::2], strict=True):
        assert image.partition(".")[0] == label.partition(".")[0]
        assert (image.partition(".")[2], label.partition(".")[2]) == ("png", "cls")


def test_names_with_dots_and_equal_stems_stay_apart(tmp_path):
    for name in ("a.b.png", "a_b.png", "a.png", "a.jpg"):
        (tmp_path / "set" / "train" / "x").mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / "train" / "x" / name).write_bytes(name.encode())
    shard(tmp_path / "set", tmp_path / "out")
    source = open_source(tmp_path / "out", "train")
    assert {source.read(i) for i in range(4)} == {b"a.b.png", b"a_b.png", b"a.png", b"a.jpg"}


def test_nothing_is_left_of_a_failed_run(folder, tmp_path, monkeypatch):
    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        shard(folder, tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def test_existing_output_is_not_touched(folder, tmp_path):
    with pytest.raises(ValueError, match="exists already"):
        shard(folder, folder)
    with pytest.raises(FileNotFoundError, match="has neither train"):
        shard(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match="at least one image"):
        shard(folder, tmp_path / "out", per_shard=0)


def test_index_is_used_and_renewed_with_the_shards(tmp_path):
    def labels():
        return open_source(tmp_path, "train").labels.tolist()

    path = write_tar(tmp_path / "train-0.tar", [("a.png", PNG), ("a.cls", b"3")])
    assert labels() == [3]
    index = tmp_path / "train.index.npz"
    before = index.stat().st_mtime_ns
    assert labels() == [3]
    assert index.stat().st_mtime_ns == before
    write_tar(path, [("a.png", PNG), ("a.cls", b"4")])
    os.utime(path, (1, 1))  # another time of change
    assert labels() == [4]
    write_tar(tmp_path / "train-1.tar", [("b.png", PNG), ("b.cls", b"1\n")])
    assert labels() == [4, 1]
    index.write_bytes(b"nonsense")
    assert labels() == [4, 1]
    index.write_bytes(index.read_bytes()[:300])
    assert labels() == [4, 1]


def test_read_only_data_needs_no_index(tmp_path, monkeypatch):
    write_tar(tmp_path / "train-0.tar", [("a.png", PNG), ("a.cls", b"3")])

    def refuse(*_, **__):
        raise PermissionError("read-only file system")

    monkeypatch.setattr(np, "savez", refuse)
    assert open_source(tmp_path, "train").labels.tolist() == [3]


def test_shards_of_others(tmp_path):
    members = [
        ("n01/x_1.JPEG", PNG), ("n01/x_1.cls", b"2\n"), ("n01/x_1.json", b"{}"),
        ("0002.cls", b"0"), ("0002.seg.png", b"a mask"), ("0002.webp", PNG),
    ]  # fmt: skip
    write_tar(tmp_path / "train-0.tar", members)
    source = open_source(tmp_path, "train")
    assert source.labels.tolist() == [2, 0]
    assert source.classes == ("0", "1", "2")
    assert [source.read(i) for i in range(2)] == [PNG, PNG]
    assert source.name(0).endswith("train-0.tar:n01/x_1.JPEG")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", PNG)], r"1 of its keys are incomplete; a has no label"),
        ([("a.cls", b"1")], r"a has no image"),
        ([("a.png", PNG), ("a.jpg", PNG), ("a.cls", b"1")], r"two images of one key: a.png and a.jpg"),
        ([("a.png", PNG), ("a.cls", b"cat")], r"a.cls holds b'cat' where a class number is expected"),
    ],
)
def test_incomplete_examples(tmp_path, members, message):
    with pytest.raises(ValueError, match=message):
        list(scan(write_tar(tmp_path / "train-0.tar", members)))


def test_truncated_and_foreign_shards(tmp_path):
    path = write_tar(
        tmp_path / "train-0.tar", [(f"{k}.{s}", PNG if s == "png" else b"1") for k in range(9) for s in ("png", "cls")]
    )
    whole = path.read_bytes()
    path.write_bytes(whole[: len(PNG) + 600])
    with pytest.raises(ValueError, match="not a whole, uncompressed tar file"):
        open_source(tmp_path, "train")
    path.write_bytes(b"\x1f\x8b" + whole)
    with pytest.raises(ValueError, match="not a whole, uncompressed tar file"):
        open_source(tmp_path, "train")


def test_an_empty_shard_is_no_problem_but_an_empty_set_is(tmp_path):
    write_tar(tmp_path / "train-0.tar", [])
    with pytest.raises(ValueError, match="hold no images"):
        open_source(tmp_path, "train")
    write_tar(
        tmp_path / "train-1.tar", [(f"{k}.{s}", PNG if s == "png" else b"1") for k in range(4) for s in ("png", "cls")]
    )
    batches = open_images(tmp_path, size=4, batch_size=4, train=True)
    assert sum(len(labels) for _, labels in batches.epoch(0)) == 4


def test_labels_beyond_the_class_names(tmp_path):
    write_tar(tmp_path / "train-0.tar", [("a.png", PNG), ("a.cls", b"3")])
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    with pytest.raises(ValueError, match=r"names 2 classes, but .* have label 3"):
        open_source(tmp_path, "train")
