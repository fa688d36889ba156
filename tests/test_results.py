import json
import os

import pytest
from full_disk import no_room

from batchnorm.results import read_json, write_atomically, write_json


def test_a_full_disk_leaves_the_old_file(tmp_path):
    path = write_json(tmp_path / "a.json", {"old": 1})
    with no_room(100), pytest.raises(OSError, match="too large") as error:
        write_json(path, {"new": "x" * 1000})
    assert error.value.filename == str(path)
    assert read_json(path) == {"old": 1}
    assert os.listdir(tmp_path) == ["a.json"]


def test_an_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "a", b"content")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"\xff", b"[1]", b"{" * 9999, json.dumps({"a": "b"}).encode()[:-1]])
def test_what_is_no_object_is_named(tmp_path, content):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"a\.json is not"):
        read_json(tmp_path / "a.json")
