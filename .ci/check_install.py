"""Check with pip's dry run that the packages of `make test`, which include those of `make run`, can be installed.

The check covers every supported version of torch and Python, on Linux with and without CUDA, macOS and Windows. Nothing
is installed.

    python .ci/check_install.py
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
TORCHES = ("2.11.0", "2.12.0", "2.13.0")
PYTHONS = ("3.11", "3.12", "3.13")
# The requirements of torch's CPU build: those of the regular wheel, without the CUDA packages and Triton.
CPU_REQUIRES = ("filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2", "fsspec")

# With --platform, pip chooses the wheels of another machine, but still evaluates environment markers, such as
# sys_platform, for the machine that it runs on. The program PIP sets the markers to the values of the target machine,
# and then runs pip.
PIP = """
import json, sys
from pip._vendor.packaging import markers
environment = {**markers.default_environment(), **json.loads(sys.argv.pop(1))}
markers.default_environment = lambda: dict(environment)
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class Machine(NamedTuple):
    """A kind of machine: its wheel tags, and the values of its environment markers."""

    tags: list[str]
    markers: dict[str, str]


LINUX = Machine(
    [*(f"manylinux_2_{minor}_x86_64" for minor in range(5, 36)), "manylinux2014_x86_64", "linux_x86_64"],
    {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"},
)
MACHINES = {
    "linux": LINUX,
    "linux, CPU build": LINUX,
    "macos": Machine(
        [f"macosx_{major}_0_{kind}" for major in range(11, 16) for kind in ("arm64", "universal2")],
        {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": "arm64", "os_name": "posix"},
    ),
    "windows": Machine(
        ["win_amd64"],
        {"sys_platform": "win32", "platform_system": "Windows", "platform_machine": "AMD64", "os_name": "nt"},
    ),
}


def requirements() -> list[str]:
    """Return the requirements of `make test` other than torch, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras, groups = project["project"]["optional-dependencies"], project["dependency-groups"]
    listed = [*project["project"]["dependencies"], *group(groups, "dev")]
    listed += [r for name, rows in extras.items() if name != "all" for r in rows]
    return [r for r in dict.fromkeys(listed) if not r.startswith("torch")]


def group(groups: dict[str, list[str | dict[str, str]]], name: str) -> list[str]:
    """Return the requirements of a dependency group and of the groups that it includes."""
    return [
        requirement
        for row in groups[name]
        for requirement in ([row] if isinstance(row, str) else group(groups, row["include-group"]))
    ]


def makefile_triton() -> str:
    """Return the Makefile's requirement for Triton, which torch's CPU build on Linux does not install."""
    found = re.search(r"^TRITON := (\S+)$", (ROOT / "Makefile").read_text(), re.M)
    if found is None:
        raise SystemExit("check_install: the Makefile needs a line such as 'TRITON := triton==3.6.0'")
    return found[1]


def write_cpu_wheel(folder: Path, version: str) -> None:
    """Write an empty wheel with the name and requirements of torch's CPU build."""
    info = f"torch-{version}+cpu.dist-info"
    lines = [f"Requires-Dist: {name}" for name in CPU_REQUIRES]
    metadata = "\n".join(["Metadata-Version: 2.1", "Name: torch", f"Version: {version}+cpu", *lines, ""])
    with zipfile.ZipFile(folder / f"torch-{version}+cpu-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def resolve(torch: str, python: str, kind: str, folder: Path) -> str:
    """Return why the packages cannot be installed on a kind of machine, or an empty string if they can."""
    machine, cpu = MACHINES[kind], kind == "linux, CPU build"
    wanted = [f"torch==={torch}{'+cpu' * cpu}", *requirements(), *[makefile_triton()] * cpu]
    full = {**machine.markers, "python_version": python, "python_full_version": f"{python}.1"}
    report = folder / f"{torch}-{python}-{kind[:9]}.json".replace(" ", "")
    command = [sys.executable, "-c", PIP, json.dumps(full), "install", "--dry-run", "--quiet", "--ignore-installed"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--python-version", python]
    command += ["--target", str(folder / "unused"), "--report", str(report), "--find-links", str(folder)]
    command += ["--constraint", str(folder / "constraints.txt")]
    command += [part for tag in machine.tags for part in ("--platform", tag)]
    done = subprocess.run([*command, *wanted], capture_output=True, text=True)
    if done.returncode:
        return "\n    ".join(line for line in done.stderr.splitlines() if "WARNING" not in line)
    found = {i["metadata"]["name"].lower(): i["metadata"]["version"] for i in json.loads(report.read_text())["install"]}
    return problem(found, kind)


def problem(found: dict[str, str], kind: str) -> str:
    """Return an error if Triton or CUDA packages are missing or unexpected, or an empty string otherwise."""
    has_triton, has_cuda = "triton" in found, any(name.startswith("nvidia-") for name in found)
    if has_triton != kind.startswith("linux"):
        return f"{'has' if has_triton else 'lacks'} Triton"
    if has_cuda != (kind == "linux"):
        return f"{'has' if has_cuda else 'lacks'} CUDA packages"
    return ""


def main() -> int:
    """Check every combination of torch, Python and machine, print each result, and return 1 if any check fails."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(4) as pool:
        folder = Path(name)
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        (folder / "constraints.txt").write_text("\n".join(p for p in pins if not p.startswith("torch==")))
        for torch in TORCHES:
            write_cpu_wheel(folder, torch)
        cases = list(product(TORCHES, PYTHONS, MACHINES))
        failed = 0
        for case, why in zip(cases, pool.map(lambda c: resolve(*c, folder), cases), strict=True):
            failed += bool(why)
            print("torch {}, Python {}, {}: {}".format(*case, why or "ok"), flush=True)
    print(f"{len(cases) - failed} of {len(cases)} can be installed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
