"""Test the file of decoded images: it is never used for other data, and errors with it never stop a run."""

from pathlib import Path

import pytest
import torch
from pictures import image_folder
from safetensors import safe_open
from safetensors.torch import save_file

from batchnorm.data.device_cache import discard_decoded, open_decoded

SIZES = [(20, 20)] * 6


def opened(data, folder, split="train"):
    return open_decoded(data, split, 8, folder=folder, workers=0, device="cpu")


@pytest.fixture
def data(tmp_path):
    return image_folder(tmp_path / "data", SIZES)


def test_classes_that_are_links_elsewhere(data, tmp_path):
    other, folder = image_folder(tmp_path / "other", SIZES * 2), tmp_path / "decoded"
    for name, pool in (("few", data), ("many", other)):
        (tmp_path / name / "train").mkdir(parents=True)
        for kind in (pool / "train").iterdir():
            (tmp_path / name / "train" / kind.name).symlink_to(kind)
        assert len(opened(tmp_path / name, folder).labels) == len(opened(pool, tmp_path / "apart").labels)


def test_a_link_to_nowhere_is_a_corrupt_image(data, tmp_path):
    (data / "train" / "ant" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    for _ in range(2):
        cache = opened(data, tmp_path / "decoded")
        assert (len(cache.images), [Path(file.name).name for file in cache.corrupt]) == (len(SIZES) + 1, ["gone.png"])


def test_labels_follow_the_classes_of_the_training_images(data, tmp_path):
    image_folder(data, SIZES[:2], split="val", classes=("bee", "cow"))
    assert opened(data, tmp_path / "decoded", "val").labels.tolist() == [1, 2]
    image_folder(data, SIZES[:1], classes=("aardvark",))
    assert opened(data, tmp_path / "decoded", "val").labels.tolist() == [2, 3]


def test_the_home_folder(data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    image_folder(tmp_path / "other", SIZES * 2)
    found = [len(opened(Path("~") / name, tmp_path / "decoded").labels) for name in ("data", "other")]
    assert found == [len(SIZES), 2 * len(SIZES)]


def cut(file):
    content = file.read_bytes()
    file.unlink()
    file.write_bytes(content[:-50])


def emptied(file):
    file.write_bytes(b"")


def foreign(file):
    save_file({"weight": torch.zeros(3)}, file)


@pytest.mark.parametrize("damage", [cut, emptied, foreign])
def test_a_file_that_cannot_be_read_is_written_anew(damage, data, tmp_path):
    first = opened(data, tmp_path / "decoded")
    (file,) = (tmp_path / "decoded").iterdir()
    whole = file.read_bytes()
    damage(file)
    assert torch.equal(opened(data, tmp_path / "decoded").images, first.images)
    assert file.read_bytes() == whole


def changed(**changes):
    def change(tensors, metadata):
        return {**tensors, **changes}, metadata

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, _: (tensors, None),
        lambda tensors, _: (tensors, {"corrupt": "nonsense"}),
        lambda tensors, _: (tensors, {"corrupt": '[{"example": 99, "name": 1, "reason": null}]'}),
        changed(labels=torch.tensor([-5, 0, 0, 0, 0, 0])),
        changed(labels=torch.zeros(6)),
        changed(row_of=torch.full((6,), 1_000_000)),
        changed(row_of=torch.zeros(2, dtype=torch.int64)),
        changed(sizes=torch.zeros(6, 2, dtype=torch.int64)),
        changed(images=torch.zeros(6, 2, 2, 3, dtype=torch.uint8)),
        changed(images=torch.zeros(6, 10, 10, 3)),
    ],
)
def test_a_tampered_file_is_written_anew(change, data, tmp_path):
    first = opened(data, tmp_path / "decoded")
    (file,) = (tmp_path / "decoded").iterdir()
    whole = file.read_bytes()
    with safe_open(file, framework="pt") as stored:
        tensors, metadata = change({name: stored.get_tensor(name) for name in stored.keys()}, stored.metadata())  # noqa: SIM118
    file.unlink()  # do not overwrite the file: the tensors are mapped from it
    save_file(tensors, file, metadata)
    cache = opened(data, tmp_path / "decoded")
    assert torch.equal(cache.images, first.images)
    assert cache.labels.tolist() == first.labels.tolist()
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_written_to(data, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.warns(UserWarning, match="cannot cache the decoded images in"):
        cache = opened(data, tmp_path / "file")
    assert len(cache.labels) == len(SIZES)


def test_nothing_half_written_stays(data, tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(UserWarning, match="no space left"):
        opened(data, tmp_path / "decoded")
    assert list((tmp_path / "decoded").iterdir()) == []


def test_only_what_was_kept_is_discarded(data, tmp_path):
    folder = tmp_path / "decoded"
    opened(data, folder)
    (folder / "notes.txt").write_text("mine")
    discard_decoded(folder)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    (folder / "notes.txt").unlink()
    discard_decoded(folder)
    assert not folder.exists()
    discard_decoded(folder)  # without the folder, no error
