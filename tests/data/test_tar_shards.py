"""Test writing, indexing and reading tar shards, and the error messages for broken shards."""

import os
import tarfile

import numpy as np
import pytest
from full_disk import no_room
from pictures import encoded, image_folder, smooth, tar_of

from batchnorm.data import open_images
from batchnorm.data.image_sources import open_source
from batchnorm.data.sharding import shard
from batchnorm.data.tar_shards import scan

PNG = encoded(smooth(8, 8))


def write_tar(path, members):
    path.write_bytes(tar_of(members))
    return path


def examples(n):
    return [(f"{k}.{s}", PNG if s == "png" else b"1") for k in range(n) for s in ("png", "cls")]


@pytest.fixture
def folder(tmp_path):
    image_folder(tmp_path / "set", [(8, 8)] * 20)
    return image_folder(tmp_path / "set", [(8, 8)] * 6, split="val")


def test_shards_hold_the_folder_byte_for_byte(folder, tmp_path, capsys):
    written = shard(folder, tmp_path / "out", per_shard=8)
    assert [tuple(split) for split in written] == [("train", 20, 3, 3), ("val", 6, 1, 3)]
    assert capsys.readouterr().out.splitlines()[0] == "train: 20 images of 3 classes in 3 shards"
    assert str(written[0]._replace(shards=1)) == "train: 20 images of 3 classes in 1 shard"
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
    with pytest.raises(ValueError, match="per_shard=0: must be 1 or more"):
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
    os.utime(path, (1, 1))  # another modification time
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
        (
            [("a.png", PNG), *((f"b{i}.cls", b"0") for i in range(20))],
            r"has 21 incomplete example\(s\); the first, a, has no label",
        ),
        ([("a.png", PNG)], r"has 1 incomplete example\(s\); the first, a, has no label"),
        ([("a.cls", b"1")], r"the first, a, has no image"),
        ([("a.png", PNG), ("a.jpg", PNG), ("a.cls", b"1")], r"two images with the same key: a.png and a.jpg"),
        ([("a.png", PNG), ("a.cls", b"cat")], r"a.cls contains b'cat' instead of a class number"),
        ([("a.png", PNG), ("a.cls", b"-5")], r"a.cls contains b'-5' instead of a class number"),
        (
            [("a.png", PNG), ("a.cls", b"200000000")],
            r"a.cls contains the class number 200000000, but the largest allowed is 999,999",
        ),
        (
            [("a.png", PNG), ("a.cls", b"1" * 5000)],
            r"a.cls contains the class number 1111.*, but the largest allowed is 999,999",
        ),
    ],
)
def test_incomplete_examples(tmp_path, members, message):
    with pytest.raises(ValueError, match=message):
        list(scan(write_tar(tmp_path / "train-0.tar", members)))


def cut_between_examples(whole):
    header = whole.index(b"1.png")
    assert header % 512 == 0
    return whole[:header]


def cut_in_a_header(whole):
    return cut_between_examples(whole) + whole[:100]


def damage_a_header(whole):
    return whole.replace(b"1.png", b"X.png")


def concatenate(whole):
    return whole + whole


def cut_in_an_image(whole):
    return whole[: len(PNG) + 600]


def put_other_bytes_first(whole):
    return b"\x1f\x8b" + whole


def go_backwards(whole):
    """Insert a member with a negative size, which would send tarfile into an endless loop."""
    info = tarfile.TarInfo("1.txt")
    info.size = -1024
    at = whole.index(b"1.png")
    return whole[:at] + info.tobuf(tarfile.GNU_FORMAT) + whole[at:]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_between_examples, r"ends at byte 2,048 without an end-of-archive marker"),
        (cut_in_a_header, r"ends at byte 2,148 without an end-of-archive marker"),
        (damage_a_header, r"the header at byte 2,048 is damaged"),
        (cut_in_an_image, ""),
        (put_other_bytes_first, ""),
        (concatenate, r"data follows the end-of-archive marker"),
        # Newer versions of tarfile notice a negative size themselves.
        (go_backwards, r"(member '1.txt' has a negative size|header at byte 2,048 is damaged)"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_no_example_of_a_damaged_shard_goes_missing(tmp_path, damage, says):
    path = write_tar(tmp_path / "train-0.tar", examples(3))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"train-0\.tar is not a complete, uncompressed tar file .*{says}"):
        open_source(tmp_path, "train")


def test_a_mark_of_one_block_is_enough(tmp_path):
    path = write_tar(tmp_path / "train-0.tar", examples(3))
    whole = path.read_bytes().rstrip(b"\0")
    path.write_bytes(whole + b"\0" * (-len(whole) % 512 + 512))
    assert len(open_source(tmp_path, "train").labels) == 3


def test_a_shard_that_the_index_lists_is_missing(folder, tmp_path):
    shard(folder, tmp_path / "out", per_shard=8)
    (tmp_path / "out" / "train-000001.tar").unlink()
    with pytest.raises(ValueError, match=r"train\.index\.npz lists the shard train-000001\.tar, which is missing"):
        open_source(tmp_path / "out", "train")
    (tmp_path / "out" / "train.index.npz").unlink()
    assert len(open_source(tmp_path / "out", "train").labels) == 13


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": np.array([-5, 1, 1])},
        {"labels": np.array([1, 1, 200_000_000])},
        {"labels": np.array([1.0, 1.0, 1.0])},
        {"labels": np.array([1, 1])},
        {"spans": np.full((3, 2), -512)},
        {"spans": np.array([[512, 2**62]] * 3)},
        {"spans": np.array([[2**62, 8]] * 3)},
        {"spans": np.zeros(6, dtype=np.int64)},
        {"shard_of": np.array([0, 0, 7], dtype=np.int32)},
        {"shard_of": np.array([0, 0, -1], dtype=np.int32)},
        {"members": np.array([1, 2, 3])},
        {"members": np.array([print] * 3)},
        {"shards": np.array(["train-0.tar"])},
        {"states": np.zeros((2, 2), dtype=np.int64)},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_tampered_index_is_not_believed(tmp_path, changes):
    path = write_tar(tmp_path / "train-0.tar", examples(3))
    expected = open_source(tmp_path, "train").index
    index = tmp_path / "train.index.npz"
    with np.load(index) as stored:
        np.savez(index, **{**stored, **changes})
    source = open_source(tmp_path, "train")
    assert source.labels.tolist() == [1, 1, 1]
    assert source.index.spans.tolist() == expected.spans.tolist()
    assert [source.read(k) for k in range(3)] == [PNG] * 3
    assert str(path) in source.name(2)


def test_a_compressed_index_is_not_unpacked(tmp_path):
    write_tar(tmp_path / "train-0.tar", examples(3))
    index = tmp_path / "train.index.npz"
    open_source(tmp_path, "train")
    with np.load(index) as stored:
        np.savez_compressed(index, **{**stored, "labels": np.array([0, 0, 0])})
    assert open_source(tmp_path, "train").labels.tolist() == [1, 1, 1]


def test_a_long_name_does_not_lengthen_all(tmp_path):
    write_tar(tmp_path / "train-0.tar", [("x" * 5000 + "/a.png", PNG), ("x" * 5000 + "/a.cls", b"0")])
    source = open_source(tmp_path, "train")
    assert source.index.members.itemsize == 256
    assert source.name(0).endswith("xx/a.png")


@pytest.mark.skipif(os.name == "nt", reason="Windows does not allow such names")
def test_class_names_stay_with_their_labels(tmp_path):
    names = ["a", "b\u2028c", "d\x85", "e\udcff", "f\x0b"]
    image_folder(tmp_path / "set", [(8, 8)] * 5, classes=names)
    shard(tmp_path / "set", tmp_path / "out")
    assert open_source(tmp_path / "out", "train").classes == tuple(sorted(names))
    image_folder(tmp_path / "set", [(8, 8)], classes=["g\nh"])
    with pytest.raises(ValueError, match=r"'g\\nh' has a line break in its name"):
        shard(tmp_path / "set", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_full_disk_is_told_with_the_folder(folder, tmp_path):
    with no_room(1000), pytest.raises(OSError, match="too large") as error:
        shard(folder, tmp_path / "new" / "out")
    assert error.value.filename == str(tmp_path / "new" / "out")
    assert list((tmp_path / "new").iterdir()) == []


def test_an_empty_shard_is_no_problem_but_an_empty_set_is(tmp_path):
    write_tar(tmp_path / "train-0.tar", [])
    with pytest.raises(ValueError, match="hold no images"):
        open_source(tmp_path, "train")
    write_tar(tmp_path / "train-1.tar", examples(4))
    batches = open_images(tmp_path, size=4, batch_size=4, train=True)
    assert sum(len(labels) for _, labels in batches.epoch(0)) == 4


def test_labels_beyond_the_class_names(tmp_path):
    write_tar(tmp_path / "train-0.tar", [("a.png", PNG), ("a.cls", b"3")])
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    with pytest.raises(ValueError, match=r"lists 2 classes, but .* contain the label 3"):
        open_source(tmp_path, "train")
