"""Check that a wheel built from the sdist can be installed into an empty environment, and works there.

The wheel is installed without extras. In this environment, the command ``batchnorm``, the first example of
docs/index.md and some of the sdist's tests must run. pip downloads the dependencies from its configured index.

    .venv/bin/python .ci/check_package.py
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# PYTHONPATH and PYTHONHOME could make the new environment import the package from elsewhere.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
# Quick tests that need no extras. They also compile the C kernel, whose source must be in the wheel.
TESTS = """tests/layers tests/inference/test_fold.py tests/surgery/test_insert.py tests/test_population.py
tests/test_network_call.py tests/ops/test_cpu_autograd.py
tests/test_package.py::test_import_needs_torch_and_numpy_alone""".split()  # noqa: SIM905
MARKS = "not slow and not zoo and not dist and not inductor"
IS_BARE = """
import sys
from importlib.util import find_spec
from pathlib import Path
import batchnorm
from batchnorm.optional_packages import EXTRAS
assert Path(batchnorm.__file__).is_relative_to(sys.prefix), batchnorm.__file__
found = [module for modules in EXTRAS.values() for module in modules if find_spec(module)]
assert not found, f"the environment has optional packages: {found}"
"""


def run(says: str, folder: Path, *command: str | Path) -> str:
    """Run a command in a folder and return its output; if it fails, print the output and exit."""
    print(says, end=": ", flush=True)
    start = time.monotonic()
    words = [str(word) for word in command]
    done = subprocess.run(
        words, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        raise SystemExit(f"failed\n{done.stdout}\ncheck_package: exit status {done.returncode}: {shlex.join(words)}")
    print(f"{time.monotonic() - start:.0f} s", flush=True)
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Build the sdist and, from the sdist, the wheel. Return the unpacked sdist and the wheel."""
    hatchling = (sys.executable, "-m", "hatchling", "build", "-d", folder)
    run("build the sdist", ROOT, *hatchling, "-t", "sdist")
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder)
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    run("build the wheel from the sdist", unpacked, *hatchling, "-t", "wheel")
    (wheel,) = folder.glob("*.whl")
    return unpacked, wheel


def missing_files(wheel: Path) -> list[str]:
    """Return the files in src/batchnorm that the wheel lacks."""
    files = (path for path in (ROOT / "src" / "batchnorm").rglob("*") if path.is_file() and path.suffix != ".pyc")
    return sorted(
        {path.relative_to(ROOT / "src").as_posix() for path in files} - set(zipfile.ZipFile(wheel).namelist())
    )


def first_example(unpacked: Path) -> str:
    """Return the first example of docs/index.md, changed to write a .pt2 file, because ONNX files need an extra."""
    found = re.search(r"```python\n(.*?)```", (unpacked / "docs" / "index.md").read_text(), re.S)
    if found is None or "net.onnx" not in found[1]:
        raise SystemExit("check_package: docs/index.md should start with an example that writes net.onnx")
    return found[1].replace("net.onnx", "net.pt2")


def check(folder: Path) -> None:
    """Build the sdist and the wheel in a folder; install the wheel, and use it in a command, an example and tests."""
    unpacked, wheel = build(folder)
    if missing := missing_files(wheel):
        raise SystemExit(f"check_package: the wheel lacks {', '.join(missing)}")
    venv.create(folder / "empty", with_pip=False)
    programs = folder / "empty" / ("Scripts" if os.name == "nt" else "bin")
    pip = (sys.executable, "-m", "pip", "--python", programs / "python", "--quiet", "--disable-pip-version-check")
    pins = ("--no-compile", "-c", ROOT / "constraints.txt")
    run("install the wheel into an empty environment", folder, *pip, "install", *pins, wheel)
    run("pip check", folder, *pip, "check")
    run("import the package", folder, programs / "python", "-c", IS_BARE)
    for option, says in (("--version", wheel.name.split("-")[1]), ("--help", "reproduce fig1")):
        if says not in run(f"batchnorm {option}", folder, programs / "batchnorm", option):
            raise SystemExit(f"check_package: batchnorm {option} does not print {says}")
    run("the first example of docs/index.md", folder, programs / "python", "-c", first_example(unpacked))
    run("install pytest", folder, *pip, "install", *pins, "--group", f"{unpacked / 'pyproject.toml'}:test")
    shutil.rmtree(unpacked / "src")  # the tests must use the wheel
    out = run(
        "some of the sdist's tests", unpacked, programs / "python", "-m", "pytest", "-n", "auto", "-m", MARKS, *TESTS
    )
    print(out.strip().splitlines()[-1])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        check(Path(name).resolve())
