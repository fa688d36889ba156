"""Test the documentation: its code runs, its commands exist, and its reference and map of the paper are complete."""

import importlib.util
import inspect
import re
import shlex
import shutil
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from public import WORDS
from safetensors.torch import save_file
from training import striped_folder

from batchnorm.cli import COMMANDS, main
from batchnorm.network_factory import make_network

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def with_python():
    return [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", with_python(), ids=lambda page: page.name)
def test_code_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scope = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), scope)


def commands():
    """Yield the ``batchnorm`` command lines in the pages' code blocks without a language, and in code spans."""
    for page in PAGES:
        text = page.read_text()
        lines = [line for block in blocks(page, "") for line in block.replace("\\\n", " ").splitlines()]
        lines += re.findall(r"`(batchnorm [^`]+)`", BLOCK.sub("", text))
        for line in lines:
            if found := re.search(r"(?:^|-m )batchnorm (\w.*)$", line):
                yield page.name, found[1]


@pytest.mark.parametrize("page", sorted({page for page, _ in commands()}))
def test_commands_and_their_options_exist(page, capsys):
    helps = {}
    for line in [line for name, line in commands() if name == page]:
        words = shlex.split(line)
        command = next((c for n in (2, 1) if (c := " ".join(words[:n])) in COMMANDS), None)
        assert command or words[0] in ("COMMAND", "bench", "reproduce"), line
        options = [word for word in words if word.startswith("-") and word != "--help"]
        if command and options:
            if command not in helps:
                with pytest.raises(SystemExit):
                    main([*command.split(), "--help"])
                helps[command] = capsys.readouterr().out
            missing = [word for word in options if not re.search(rf"(?<![\w-]){word}(?![\w-])", helps[command])]
            assert not missing, line


def test_every_command_has_a_line():
    listed = re.findall(r"^\| `batchnorm ([^`]+)` \| (.*) \|$", (DOCS / "commands.md").read_text(), re.MULTILINE)
    assert listed == [(name, command.does) for name, command in COMMANDS.items()]


def line_of(page, start):
    return next(line for name, line in commands() if name == page and line.startswith(start))


def test_from_images_to_a_file(tmp_path, monkeypatch, capsys):
    """Run the commands of "Train your own network" on a few small images, then use the run as other guides do."""
    monkeypatch.chdir(tmp_path)
    page = DOCS / "train.md"
    (tmp_path / "mynet.py").write_text(next(block for block in blocks(page, "") if "def build" in block))
    images = striped_folder(tmp_path / "images")
    next((images / "val").rglob("*.png")).rename("photo.jpg")
    shutil.rmtree(images / "val")
    shutil.copytree(images, "new-images")
    shutil.rmtree(tmp_path / "new-images/train/class0")
    (tmp_path / "photos").mkdir()
    shutil.copy("photo.jpg", "photos")
    save_file(make_network("mynet.py:build")[0].state_dict(), "net.safetensors")
    _, *lines = (line.removeprefix("batchnorm ") for line in blocks(page, "")[0].splitlines())
    lines += [line_of("fine-tuning.md", "train"), line_of("ship.md", "fold mynet"), line_of("monitor.md", "report")]
    lines += [line_of("ship.md", "predict").replace("runs/bn-x5", "runs/mynet-build-insert --trust")]
    for line in lines:
        words = shlex.split(re.sub(r"--epochs \d+", "--epochs 1", line))
        assert main(words) == 0, capsys.readouterr().err
    printed = capsys.readouterr()
    assert "starting from runs/mynet-build-insert: 18 of 20 tensors loaded; 11.weight, 11.bias init" in printed.out
    assert {path.name for path in tmp_path.iterdir()} >= {"net.onnx", "predictions.csv", "report.html"}


def test_images_to_shards(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    striped_folder(tmp_path / "DOWNLOADS")
    assert main(shlex.split(line_of("imagenet.md", "shard"))) == 0
    assert capsys.readouterr().out.startswith("train: ")


def test_commands_that_need_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line_of("imagenet.md", "describe inception --size 64"))) == 0
    assert capsys.readouterr().out.endswith("at 64 px the first max pool is left out\n")
    published = shlex.quote(f"{ROOT}/results/fig4")  # the path may contain spaces
    assert main(shlex.split(line_of("fig4.md", "reproduce fig4 --results").replace("RESULTS", published))) == 0
    assert (tmp_path / "runs/fig4/fig4.md").exists()


ARGS = re.compile(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", re.MULTILINE)
ARG = re.compile(r"^    (\w+):", re.MULTILINE)
EXAMPLE = re.compile(r"^>>> (?:.+\n?)+|(?<=\n\n)    (?:.+\n?)+", re.MULTILINE)  # with output, or an indented block


def is_result(word, thing):
    """Return whether a class is a function's result, which needs no Args section because users do not construct it."""
    deep = word.rpartition(".")[0] not in ("batchnorm", "batchnorm.ops")
    return inspect.isclass(thing) and deep and (is_dataclass(thing) or issubclass(thing, tuple | Exception))


def made_by_a_function(thing):
    return "made by :func:" in inspect.getdoc(thing)


@pytest.mark.parametrize("word", [w for w, t in WORDS.items() if not is_result(w, t) and not made_by_a_function(t)])
def test_every_argument_is_described(word):
    doc = inspect.getdoc(WORDS[word])
    if other := re.search(r"arguments are those of :(?:class|func):`(\w+)`", doc):
        doc += inspect.getdoc(getattr(inspect.getmodule(WORDS[word]), other[1]))
    names = {name for section in ARGS.findall(doc) for name in ARG.findall(section)}
    assert set(inspect.signature(WORDS[word]).parameters) <= names


@pytest.mark.parametrize("word", WORDS)
def test_every_public_word_has_an_example(word):
    thing, examples = WORDS[word], "".join(EXAMPLE.findall(inspect.getdoc(WORDS[word])))
    assert examples
    if not is_result(word, thing) and not made_by_a_function(thing):
        assert f"{word.rpartition('.')[2]}(" in examples


def test_the_reference_has_every_exported_word():
    pages = "".join((DOCS / f"{name}.md").read_text() for name in ("api", "ops", "packages"))
    shown = {path.rpartition(".")[2] for path in re.findall(r"^::: (\S+)$", pages, re.MULTILINE)}
    assert {word.rpartition(".")[2] for word in WORDS} <= shown


@pytest.fixture(scope="module")
def paper_map():
    spec = importlib.util.spec_from_file_location("paper_map", DOCS / "paper_map.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_map_of_the_paper_is_current(paper_map):
    assert paper_map.PAGE.read_text() == paper_map.page(), "run python docs/paper_map.py"


def test_the_map_names_code_tests_and_commands_that_exist(paper_map):
    rows = [row for rows in paper_map.SECTIONS.values() for row in rows]
    for row in rows:
        assert row.note or (row.tests and row.tags), row.says
        for tag in row.tags:
            assert paper_map.symbols(row._replace(tags=(tag,))), f"{row.says}: no docstring carries {tag!r}"
        for path, _, test in (name.partition("::") for name in row.tests):
            assert f"\ndef {test}(" in (ROOT / "tests" / path).read_text(), test
        for command in row.commands:
            assert any(f"{command} ".startswith(f"{name} ") for name in COMMANDS), command
    assert set(paper_map.TAGGED) == {name for row in rows for name in paper_map.symbols(row)}


def test_every_table_has_rows():
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        assert not re.search(r"^\|[-|: ]+\|\n(?!\|)", page.read_text(), re.MULTILINE), page
