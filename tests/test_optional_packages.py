"""Test that the library's table of optional packages agrees with pyproject.toml."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from batchnorm.optional_packages import EXTRAS, PACKAGES, MissingExtraError, check_installed, require


def test_the_extras_are_those_of_pyproject():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    declared = project["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        packages = {re.match(r"[\w-]+", requirement)[0] for requirement in declared[extra]}
        assert packages == {PACKAGES.get(module, module) for module in modules}


def test_everything_missing_is_named_at_once(monkeypatch):
    for module in ("PIL", "matplotlib", "onnx"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        MissingExtraError,
        match=r"^pillow, matplotlib and onnx are not installed; run: pip install pillow matplotlib onnx, or"
        r" pip install '\.\[export,report,train\]' in a clone of the repository$",
    ):
        check_installed("PIL", "matplotlib", "onnx", "safetensors")
    with pytest.raises(MissingExtraError, match=r"^pillow and matplotlib are not installed"):
        check_installed("PIL", "matplotlib")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("raise ImportError('libbroken.so: file too short')", "libbroken.so: file too short"),
        ("import broken._part", "No module named 'broken._part'"),
        ("import absent_dependency", "No module named 'absent_dependency'"),
    ],
)
def test_a_package_that_is_installed_but_broken_is_not_called_missing(tmp_path, monkeypatch, line, why):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingExtraError) as error:
        require("broken", "report")
    assert str(error.value) == f"broken is installed but cannot be imported ({why}): repair the installation"


def test_the_package_that_is_missing_is_named_and_not_its_user(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    for name in [name for name in sys.modules if name.startswith(("torch.utils.tensorboard", "tensorboard."))]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=r"^tensorboard is not installed"):
        require("torch.utils.tensorboard", "train")
