"""Test the package as a whole: its exported names, which modules may import which, and the cost of importing it."""

import ast
import os
import subprocess
import sys
from functools import wraps
from importlib import import_module
from pathlib import Path

import pytest

import batchnorm as bn
from batchnorm.cli import COMMANDS, _call, main

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "batchnorm"

# Packages and modules, from top to bottom. Each may import from the rows below its own, and from its own package.
LAYERS = [
    ["__main__"],
    ["cli"],
    ["reproduce", "bench"],
    ["train"],
    ["diagnosis", "evaluate", "report", "dynamo"],
    ["adaptation"],
    ["surgery", "population", "inference", "monitor", "models", "data"],
    ["layers"],
    ["collectives", "graph", "verify", "jobs"],
    ["ops", "network_copy", "pictures", "processes"],
    [
        "arguments",
        "change_report",
        "errors",
        "network_call",
        "network_factory",
        "optional_packages",
        "progress",
        "results",
    ],
]
LEVEL = {name: -i for i, row in enumerate(LAYERS) for name in row}


def run(code):
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_every_exported_name_exists_and_is_sorted():
    assert bn.__all__ == sorted(bn.__all__)
    for name in bn.__all__:
        assert hasattr(bn, name), name


def test_import_needs_torch_and_numpy_alone():
    code = """
import sys, torch, numpy
before = set(sys.modules)
import batchnorm
new = {m.partition(".")[0] for m in set(sys.modules) - before} - sys.stdlib_module_names
print(*sorted(new))
assert "torch._dynamo" not in sys.modules
"""
    assert set(run(code).split()) <= {"batchnorm", "torch", "numpy"}


def imports_of(path):
    """Yield the parts of batchnorm that a file imports, including imports inside functions."""
    package = path.relative_to(SOURCE.parent).with_suffix("").parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            full = [*base, *(node.module.split(".") if node.module else [])]
            names = [full] if len(full) > 1 else [[*full, a.name] for a in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".") for a in node.names]
        else:
            continue
        for name in names:
            if name[0] == "batchnorm" and len(name) > 1:
                yield name[1]


FILES = [p for p in sorted(SOURCE.rglob("*.py")) if p != SOURCE / "__init__.py"]


def test_imports_point_down():
    wrong = []
    for path in FILES:
        mine = path.relative_to(SOURCE).with_suffix("").parts[0]
        assert mine in LEVEL, f"{mine} has no place in the layering: add it to LAYERS"
        others = [other for other in imports_of(path) if other != mine and other in LEVEL]
        wrong += [f"{path.relative_to(SOURCE)} imports {o}" for o in others if LEVEL[o] >= LEVEL[mine]]
    assert not wrong, "a module may import only from rows of LAYERS below its own: " + "; ".join(wrong)


@pytest.mark.parametrize(
    ("package", "home"),
    [("triton", "ops/"), ("tensorboard", "monitor/"), ("torch.distributed", None)],
)
def test_optional_packages_are_imported_in_their_place_only(package, home):
    allowed = {
        "triton": ("ops/cuda/", "models/bn_inception/triton/", "train/triton/"),
        "torch.distributed": ("collectives.py", "train/", "layers/statistics.py", "evaluate/", "bench/"),
    }
    for path in FILES:
        where = str(path.relative_to(SOURCE))
        if where.startswith(allowed.get(package, (home,))):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
            assert not any(n == package or n.startswith(package + ".") for n in names), f"{where} imports {package}"


def test_command_line_lists_its_commands():
    out = subprocess.run([sys.executable, "-m", "batchnorm.cli", "--help"], capture_output=True, text=True, check=True)
    assert "bench cpu" in out.stdout
    wrong = subprocess.run([sys.executable, "-m", "batchnorm.cli", "nonsense"], capture_output=True, text=True)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("batchnorm: there is no command 'nonsense'; ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("tarin", "'tarin'; did you mean 'train'?"),
        ("trian runs/mine --data images", "'trian'; did you mean 'train'?"),
        (
            "reproduce fig9",
            "'reproduce fig9'; did you mean 'reproduce fig1' or 'reproduce fig2' or 'reproduce fig4'?",
        ),
        ("reprodcue fig1 --steps 5", "'reprodcue fig1'; did you mean 'reproduce fig1'?"),
        ("reprodcue", "'reprodcue'; did you mean 'reproduce'?"),
        ("bench nonsense", "'bench nonsense'; 'batchnorm bench' lists its commands"),
        ("nonsense bench", "'nonsense'; 'batchnorm' lists all commands"),
    ],
)
def test_a_mistyped_command_gets_one_line(words, says, capsys):
    assert main(words.split()) == 2
    assert capsys.readouterr() == ("", f"batchnorm: there is no command {says}\n")


def test_what_the_system_refuses_is_one_sentence(tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "images/train/a").mkdir(parents=True)
    (tmp_path / "images/train/a/1.jpg").touch()
    assert main(["shard", str(tmp_path / "images"), str(tmp_path / "file/shards")]) == 2
    assert capsys.readouterr().err == f"batchnorm shard: {tmp_path}/file: file exists\n"


def test_positional_arguments_have_names(capsys):
    for command, usage in (("shard", "FOLDER OUT"), ("fold", "MODULE:FUNCTION"), ("evaluate", "RUN...")):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert usage in capsys.readouterr().out


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"batchnorm {bn.__version__}\n"


def test_version_is_stated_once():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {bn.__version__}" in changelog
    assert f'version: "{bn.__version__}"' in (ROOT / "CITATION.cff").read_text()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert f"Example: batchnorm {command} {COMMANDS[command].example}" in " ".join(text.split())
    assert not [mark for mark in ("``", "options options", "Beyond the paper:", "Paper:") if mark in text]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_of_a_command_is_one_that_it_takes(command):
    module, _, function = COMMANDS[command].function.partition(":")

    @wraps(getattr(import_module(module), function))
    def nothing(*given, **named):
        """Take the command's arguments and do nothing."""

    _call(nothing, command, COMMANDS[command].example.split())


@pytest.mark.parametrize("words", [[], ["train", "--help"], ["describe", "inception"]])
def test_output_that_nobody_reads_any_more(words):
    reading, writing = os.pipe()
    os.close(reading)
    words = [sys.executable, "-m", "batchnorm", *words]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_names_every_word():
    missing = [name for name in bn.__all__ if f"``{name}" not in bn.__doc__]
    assert not missing
