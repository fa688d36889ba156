"""Test that kernel.c is compiled only once, and that nothing fails without a compiler or a writable cache."""

import os
import shutil
import subprocess
import sys
import threading
import time
from threading import Thread

import pytest
import torch
from oracle import assert_near, expect

from batchnorm import layers, ops
from batchnorm.ops import Activation, compile_cache
from batchnorm.ops.cpu import autograd, compiler

RELU = Activation("relu")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@pytest.fixture(autouse=True)
def anew(monkeypatch, tmp_path):
    compiler._load.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", "cc")
    quick = ("-O0" if flag == "-O3" else flag for flag in compiler.FLAGS)  # faster to compile
    monkeypatch.setattr(compiler, "FLAGS", tuple(quick))
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
        assert "torch's kernels: the compiled kernel needs" in ops.explain(other).reason
    assert "the compiled kernel" in ops.explain(torch.randn(8, 3), residual=torch.randn(8, 3)).reason
    file = compiled_once(tmp_path)
    assert oct(file.parent.stat().st_mode)[-3:] == "700"
    monkeypatch.setattr(compile_cache, "_run", lambda *_: pytest.fail("compiled again"))
    assert compiler.unavailable() is None


@needs_compiler
def test_other_flags_are_another_file(monkeypatch, tmp_path):
    compiler.unavailable()
    compiler._load.cache_clear()
    monkeypatch.setattr(compiler, "_processor", lambda: "another")
    assert compiler.unavailable() is None
    assert len(list((tmp_path / "cache" / "batchnorm").glob("*.so"))) == 2


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "no C compiler" in compiler.unavailable()
    assert "torch's kernels because there is no C compiler" in ops.explain(torch.randn(8, 3)).reason
    check_another_way()


@needs_compiler
def test_a_compiler_that_fails(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "cc -no-such-option")
    assert "no-such-option" in compiler.unavailable()
    check_another_way()
    assert not list((tmp_path / "cache" / "batchnorm").glob("*.so"))


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


def compiled_once(tmp_path):
    """Compile kernel.c, forget the loaded library, and return the cached file."""
    assert compiler.unavailable() is None
    compiler._load.cache_clear()
    (file,) = (tmp_path / "cache" / "batchnorm").glob("*.so")
    return file


def without_the_functions(file):
    source = file.with_suffix(".c")
    source.write_text("int nothing;")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", file, source], check=True)
    source.unlink()


@needs_compiler
@pytest.mark.parametrize(
    "damage",
    [
        lambda file: (file.unlink(), file.write_text("no library")),  # unlinked first: this process has it loaded
        without_the_functions,
        lambda file: (file.unlink(), file.symlink_to("/nowhere.so")),
    ],
)
def test_a_damaged_file_is_compiled_again(damage, tmp_path):
    file = compiled_once(tmp_path)
    sound = file.read_bytes()
    damage(file)
    assert compiler.unavailable() is None
    assert compiled_once(tmp_path).stat().st_size == len(sound)
    check(torch.randn(4, 6, 8, 8))


@needs_compiler
def test_a_library_cut_short_does_not_end_the_process(tmp_path):
    file = compiled_once(tmp_path)
    beginning = file.read_bytes()[:4096]
    file.unlink()  # do not overwrite the file, because this process has it loaded
    file.write_bytes(beginning)
    file.chmod(0o700)
    code = f"""
from batchnorm.ops.cpu import compiler
compiler.FLAGS = {compiler.FLAGS}
assert compiler.unavailable() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert compiled_once(tmp_path).stat().st_size > 4096


@needs_compiler
def test_a_file_that_others_can_write_to_is_not_loaded(tmp_path):
    file = compiled_once(tmp_path)
    assert oct(file.stat().st_mode)[-3:] == "700"
    file.chmod(0o722)
    assert compiled_once(tmp_path).stat().st_mode & 0o022 == 0


@needs_compiler
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_not_loaded(tmp_path):
    file = compiled_once(tmp_path)
    try:
        os.chown(file, 12345, 12345)
    except OSError:
        pytest.skip("root may not give files away in this container")
    assert compiled_once(tmp_path).stat().st_uid == 0


@needs_compiler
def test_a_folder_of_another_user_is_not_trusted(monkeypatch, tmp_path):
    file = compiled_once(tmp_path)
    monkeypatch.setattr(compile_cache.os, "geteuid", lambda: file.stat().st_uid + 1)
    assert "belongs to another user" in compiler.kernels().uncached
    assert "the compiled kernel could not be cached: " in ops.explain(torch.randn(8, 3)).reason


@needs_compiler
def test_a_folder_that_others_can_write_to_is_not_trusted(tmp_path):
    folder = tmp_path / "cache" / "batchnorm"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert "is writable by others" in compiler.kernels().uncached  # so kernel.c is compiled in a temporary folder
    assert not list(folder.iterdir())


@needs_compiler
def test_a_read_only_cache_is_used(monkeypatch, tmp_path):
    file = compiled_once(tmp_path)
    file.parent.chmod(0o500)
    monkeypatch.setattr(compile_cache, "_run", lambda *_: pytest.fail("compiled again"))
    assert compiler.unavailable() is None
    file.parent.chmod(0o700)


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems(monkeypatch, system, tmp_path):
    monkeypatch.setattr(compile_cache.sys, "platform", system)
    monkeypatch.delattr(compile_cache.os, "geteuid")  # Windows has none
    monkeypatch.setattr(compile_cache, "_run", lambda *_: pytest.fail("asked a compiler"))
    assert f"on Linux only, not on {system}" in ops.explain(torch.randn(8, 3)).reason
    check_another_way()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("command", "told"),
    [('cc "', "not a valid command"), ("true", "could not compile"), ("cc -c", "could not compile")],
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
    assert not autograd.form_of(x, RELU).parallel
    check(x)


def test_to_stop_a_compiler_stops_what_it_started():
    thread = Thread(target=compile_cache._run, args=(["sh", "-c", "sleep 100 & wait"],), daemon=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda _: None)  # _run raises an error, because the compiler is killed
        thread.start()
        while not compile_cache._running:
            time.sleep(0.01)
        compile_cache.stop()
        thread.join(50)
    assert not thread.is_alive()
