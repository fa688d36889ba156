"""The compiler of kernel.c: asked once, and nothing lost where it is missing or has no place for what it makes."""

import shutil
import subprocess

import pytest
import torch
from oracle import assert_near, expect

from batchnorm import layers, ops
from batchnorm.ops import Activation
from batchnorm.ops.cpu import compiled, compiler

RELU = Activation("relu")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def anew(monkeypatch, tmp_path):
    compiler._load.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "cc")
    yield
    compiler._load.cache_clear()


def check_another_way():
    assert compiler.kernels() is None
    check(torch.randn(4, 3, 5, 5))


def check(x):
    layer, x = layers.BatchNorm2d(x.shape[1], activation="relu"), x.requires_grad_()
    y = layer(x)
    assert_near(y, expect(x, layer.weight, layer.bias, 1e-5, torch.ones_like(x), RELU).y, torch.float32)
    y.sum().backward()
    assert layer.num_batches_tracked == 1


@needs_compiler
def test_it_is_asked_once_for_all_processes(monkeypatch, tmp_path):
    assert compiler.unavailable() is None
    assert "the compiled kernel" in ops.explain(torch.randn(8, 3)).reason
    for other in (torch.randn(8, 3).bfloat16(), torch.randn(8, 3, 4)[..., ::2]):
        assert "torch's kernels: the compiled one takes" in ops.explain(other).reason
    assert "without a residual" in ops.explain(torch.randn(8, 3), residual=torch.randn(8, 3)).reason
    (file,) = (tmp_path / "cache" / "batchnorm").iterdir()
    assert oct(file.parent.stat().st_mode)[-3:] == "700"
    compiler._load.cache_clear()
    monkeypatch.setattr(compiler.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    assert compiler.unavailable() is None


@needs_compiler
def test_other_flags_are_another_file(monkeypatch, tmp_path):
    compiler.unavailable()
    compiler._load.cache_clear()
    monkeypatch.setattr(compiler, "_processor", lambda: "another")
    assert compiler.unavailable() is None
    assert len(list((tmp_path / "cache" / "batchnorm").iterdir())) == 2


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no C compiler" in compiler.unavailable()
    assert "torch's kernels, for there is no C compiler" in ops.explain(torch.randn(8, 3)).reason
    check_another_way()


@needs_compiler
def test_a_compiler_that_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "cc -no-such-option")
    assert "no-such-option" in compiler.unavailable()
    check_another_way()
    assert not list((tmp_path / "cache" / "batchnorm").iterdir())


def test_switched_off(monkeypatch):
    monkeypatch.setenv("BATCHNORM_COMPILE", "0")
    assert "BATCHNORM_COMPILE=0" in compiler.unavailable()
    check_another_way()


@needs_compiler
def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert compiler.unavailable() is None
    check(torch.randn(4, 6, 8, 8))


@needs_compiler
def test_a_file_that_is_no_library(monkeypatch, tmp_path):
    compiler.unavailable()
    (file,) = (tmp_path / "cache" / "batchnorm").iterdir()
    (tmp_path / "other" / "batchnorm").mkdir(parents=True)
    (tmp_path / "other" / "batchnorm" / file.name).write_text("no library")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    compiler._load.cache_clear()
    assert compiler.unavailable() is None  # compiled elsewhere
    check(torch.randn(4, 6, 8, 8))


@needs_compiler
def test_a_library_without_the_functions(monkeypatch, tmp_path):
    compiler.unavailable()
    (file,) = (tmp_path / "cache" / "batchnorm").iterdir()
    folder = tmp_path / "other" / "batchnorm"
    folder.mkdir(parents=True)
    (folder / "empty.c").write_text("int nothing;")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / file.name, folder / "empty.c"], check=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    compiler._load.cache_clear()
    assert compiler.unavailable() is None  # compiled elsewhere


@needs_compiler
def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path):
    folder = tmp_path / "cache" / "batchnorm"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert compiler.unavailable() is None  # compiled elsewhere
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("command", "told"), [('cc "', "no command"), ("true", "makes no library"), ("cc -c", "makes no library")]
)
def test_commands_that_make_no_library(monkeypatch, tmp_path, command, told):
    monkeypatch.setenv("CC", command)
    assert told in compiler.unavailable() or shutil.which("cc") is None
    assert not list((tmp_path / "cache").rglob("*.so"))
    check_another_way()


@needs_compiler
def test_an_empty_name_is_none(monkeypatch):
    monkeypatch.setenv("CC", "")
    assert compiler.unavailable() is None


@needs_compiler
def test_without_threads(monkeypatch):
    monkeypatch.setattr(compiler, "_openmp", lambda: (None, None, None))
    x = torch.randn(8, 6, 64, 64)
    assert not compiled.form_of(x, False).parallel
    check(x)
