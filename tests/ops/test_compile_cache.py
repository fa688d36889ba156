"""Test how compiled files are cached in the user's cache folder."""

import itertools
import sys

import pytest

from batchnorm.ops import compile_cache

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are compiled on Linux only")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "batchnorm"


def maker():
    numbers = itertools.count()
    return lambda: b"compiled %d" % next(numbers)


def test_a_file_is_made_once(folder):
    make = maker()
    assert [compile_cache.kept("kernel", ("source", 1), make) for _ in range(2)] == [b"compiled 0"] * 2
    assert compile_cache.kept("kernel", ("source", 2), make) == b"compiled 1"
    assert compile_cache.kept("kernel", ("source", 1), make) == b"compiled 0"
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_a_damaged_or_foreign_file_is_made_again(folder):
    make = maker()
    compile_cache.kept("kernel", "source", make)
    (path,) = folder.iterdir()
    path.write_bytes(b"compi")
    assert compile_cache.kept("kernel", "source", make) == b"compiled 1"
    (path,) = folder.iterdir()
    path.chmod(0o666)
    assert compile_cache.kept("kernel", "source", make) == b"compiled 2"
    (path,) = folder.iterdir()
    other = folder.parent / "other"
    path.rename(other)
    path.symlink_to(other)
    assert compile_cache.kept("kernel", "source", make) == b"compiled 3"
    assert compile_cache.kept("kernel", "source", make) == b"compiled 3"


def test_without_a_folder_it_is_made_each_time(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    make = maker()
    assert [compile_cache.kept("kernel", "source", make) for _ in range(2)] == [b"compiled 0", b"compiled 1"]


def test_what_does_not_compile_leaves_nothing(folder):
    def fails():
        raise RuntimeError("does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        compile_cache.kept("kernel", "source", fails)
    assert list(folder.iterdir()) == []
