"""Test the conversion of ImageNet's official tar files, here with few images, to shards."""

import gzip

import pytest
from pictures import encoded, smooth, tar_of

from batchnorm.data import open_images
from batchnorm.data.imagenet_tars import open_official
from batchnorm.data.sharding import shard

CLASSES = ("n01440764", "n01443537", "n01484850")
ANNOTATION = "<annotation><object><name>{}</name><bndbox/></object><object><name>x</name></object></annotation>"


def picture(label, k):
    return encoded(smooth(30, 20, seed=100 * label + k), "JPEG")


def validation_class(k):
    return (k * 2) % 3


@pytest.fixture
def official(tmp_path):
    """Write tar files like ImageNet's, with four training images of each class and seven validation images."""
    root = tmp_path / "imagenet"
    root.mkdir()
    inner = [
        (f"{wnid}.tar", tar_of([(f"{wnid}_{k}.JPEG", picture(label, k)) for k in range(4)]))
        for label, wnid in reversed(list(enumerate(CLASSES)))
    ]
    (root / "ILSVRC2012_img_train.tar").write_bytes(tar_of(inner))
    val = [(f"ILSVRC2012_val_{k:08d}.JPEG", picture(validation_class(k), 50 + k)) for k in range(7)]
    (root / "ILSVRC2012_img_val.tar").write_bytes(tar_of(val))
    return root


def add_boxes(root):
    notes = [
        (f"val/ILSVRC2012_val_{k:08d}.xml", ANNOTATION.format(CLASSES[validation_class(k)]).encode()) for k in range(7)
    ]
    (root / "ILSVRC2012_bbox_val_v3.tgz").write_bytes(tar_of(notes, "w:gz"))


def add_table(root):
    rows = [f"ILSVRC2012_val_{k:08d},{CLASSES[validation_class(k)]} 85 1 499 272 " for k in reversed(range(7))]
    (root / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *rows, ""]))


@pytest.mark.parametrize("add_classes", [add_boxes, add_table])
def test_official_tars_become_shards(official, tmp_path, add_classes):
    add_classes(official)
    assert [tuple(s) for s in shard(official, tmp_path / "out", per_shard=5)] == [("train", 12, 3, 3), ("val", 7, 2, 3)]
    for split, source in open_official(official).items():
        batches = open_images(tmp_path / "out", split, size=8, batch_size=12, train=False)
        assert batches.classes == CLASSES
        stored = batches._source
        mine = {source.read(i): int(source.labels[i]) for i in range(len(source.labels))}
        assert {stored.read(i): int(stored.labels[i]) for i in range(len(stored.labels))} == mine
        expected = (
            {picture(label, k): label for label in range(3) for k in range(4)}
            if split == "train"
            else {picture(validation_class(k), 50 + k): validation_class(k) for k in range(7)}
        )
        assert mine == expected


def test_training_part_alone(official):
    (official / "ILSVRC2012_img_val.tar").unlink()
    assert list(open_official(official)) == ["train"]


def test_validation_images_need_their_classes(official, tmp_path):
    with pytest.raises(FileNotFoundError, match="no file with the classes of its images: put ILSVRC2012_bbox"):
        shard(official, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    add_table(official)
    table = official / "LOC_val_solution.csv"
    table.write_text("\n".join(table.read_text().splitlines()[:-1]))
    with pytest.raises(ValueError, match=r"ILSVRC2012_val_00000000.JPEG is not listed in"):
        open_official(official)


def test_wrong_tars_say_so(official):
    (official / "ILSVRC2012_img_train.tar").write_bytes(tar_of([("readme.txt", b"hello")]))
    with pytest.raises(ValueError, match=r"contains readme.txt, but should contain one tar file per class and"):
        open_official(official)
    (official / "ILSVRC2012_img_train.tar").write_bytes(b"hello" * 300)
    with pytest.raises(ValueError, match="is not a complete, uncompressed tar file"):
        open_official(official)


def test_a_tar_cut_between_two_classes_or_two_images(official):
    path = official / "ILSVRC2012_img_train.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"n01440764.tar")])
    with pytest.raises(
        ValueError, match=r"img_train\.tar is not a complete, uncompressed tar file .*without an end-of-archive marker"
    ):
        open_official(official)
    inner = tar_of([("n01440764_0.JPEG", picture(0, 0)), ("n01440764_1.JPEG", picture(0, 1))])
    path.write_bytes(tar_of([("n01440764.tar", inner[: inner.index(b"n01440764_1.JPEG")])]))
    with pytest.raises(ValueError, match=r"img_train\.tar:n01440764\.tar is not a complete, uncompressed tar file"):
        open_official(official)


@pytest.mark.parametrize("content", [b"", b"ImageId\nx\n", b"ImageId,PredictionString\nx\n", b"\xff\xfe\n\xff"])
def test_a_broken_table_is_named(official, content):
    (official / "LOC_val_solution.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"LOC_val_solution\.csv"):
        open_official(official)


NOTES = tar_of([("a.xml", ANNOTATION.format("a").encode())])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense" * 100,
        tar_of([("a.xml", b"<a")]),
        gzip.compress(NOTES)[:30],
        gzip.compress(NOTES[:1024])[:-8] + bytes(8),
    ],
    ids=["empty", "no tar", "no XML", "cut off", "wrong checksum"],
)
def test_broken_annotations_are_named(official, content):
    (official / "ILSVRC2012_bbox_val_v3.tgz").write_bytes(content)
    with pytest.raises(ValueError, match=r"ILSVRC2012_bbox_val_v3\.tgz is not a tar file of annotations") as error:
        open_official(official)
    assert "\n" not in str(error.value)
