"""Test that the project's files agree on versions, dependencies and paths."""

import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import batchnorm as bn

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOW = (ROOT / ".github" / "workflows" / "tests.yml").read_text()
INSTALL = runpy.run_path(str(ROOT / ".ci" / "check_install.py"))


@pytest.mark.parametrize(("name", "versions"), [("python", INSTALL["PYTHONS"]), ("torch", INSTALL["TORCHES"])])
def test_workflows_test_the_versions_that_can_be_installed(name, versions):
    row = re.search(rf"^ +{name}: \[(.*)\]$", WORKFLOW, re.M)
    assert tuple(re.findall(r'"([\d.]+)"', row[1])) == versions


def test_the_lowest_versions_are_the_ones_that_pyproject_names():
    project = PROJECT["project"]
    assert project["requires-python"] == f">={INSTALL['PYTHONS'][0]}"
    assert tuple(re.findall(r"Python :: (3\.\d+)", " ".join(project["classifiers"]))) == INSTALL["PYTHONS"]
    assert f"torch>={INSTALL['TORCHES'][0].removesuffix('.0')}" in project["dependencies"]


def test_workflows_run_the_commands_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    (matrix,) = (job for job in re.split(r"\n(?=  \w+:\n)", WORKFLOW) if "matrix:" in job)
    assert {"check", "test"} <= set(re.findall(r"run: make ([a-z-]+)", matrix))
    assert set(re.findall(r"run: make ([a-z-]+)", WORKFLOW)) <= targets


def test_every_declared_dependency_is_pinned():
    groups = PROJECT["dependency-groups"]
    listed = ["torch", *INSTALL["requirements"](), *(r for name in groups for r in INSTALL["group"](groups, name))]
    names = {re.split(r"[<>=\[]", requirement)[0].lower() for requirement in listed}
    assert names <= set(re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(), re.M))


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "tests/torch_internals.txt"])
def test_files_that_are_named_exist(page):
    named = re.findall(r"\b((?:src|tests|docs|\.ci)/[\w./-]*\w)", (ROOT / page).read_text())
    assert len(named) > 0
    assert not [path for path in named if not (ROOT / path).exists()]


def test_names_in_the_walks_are_in_the_files_beside_them():
    items = re.split(r"\n(?=\d\. |## )", (ROOT / "CONTRIBUTING.md").read_text())
    walks = [item for item in items if item[0].isdigit()]
    checked = 0
    for item in walks:
        files = [ROOT / path for path in re.findall(r"`((?:src|tests|docs)/[\w./]*\.\w+)`", item)]
        text = "\n".join(path.read_text() for path in files)
        names = re.findall(r"`(\w+)`", item)
        assert not [name for name in names if name not in text], item
        checked += len(names)
    assert len(walks) > 15
    assert checked > 15


def test_the_changelog_starts_with_this_version():
    assert re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[1] == bn.__version__


PRIVATE = re.compile(
    r"(?<![\w.])/(?:root/|work/|home/\w|Users/\w|tmp/w/|opt/pypi|opt/wheels)|C:\\Users"
    r"|artifactory|codeartifact|devpi|https?://(?!pypi\.org/)[^\s\"'<>]+/simple\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("/root/.cache", True),
        ("/home/ann/net.py", True),
        ("--index-url https://pip.example.com/x/simple", True),
        ("https://pypi.org/simple", False),
        ("https://example.com/a-simple-page", False),
        ("/tmp/net.pt", False),
        ("https://example.com/home/page", False),
    ],
)
def test_what_counts_as_private(text, found):
    assert bool(PRIVATE.search(text)) is found


@pytest.mark.skipif(not (ROOT / ".git").exists() or shutil.which("git") is None, reason="not a clone, or no git")
def test_no_file_names_a_folder_of_one_machine_or_a_private_package_index():
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    paths = [ROOT / name for name in listed if name and ROOT / name != Path(__file__)]
    texts = {path: path.read_bytes().decode(errors="ignore") for path in paths if path.is_file()}
    texts = {path: text for path, text in texts.items() if "\0" not in text}
    assert any(path.is_relative_to(ROOT / "results") for path in texts)
    found = {str(path.relative_to(ROOT)): hit[0] for path, text in texts.items() if (hit := PRIVATE.search(text))}
    assert not found
