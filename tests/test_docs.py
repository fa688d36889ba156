"""Test the documentation: its code runs, its commands exist, and its reference and map of the paper are complete."""

import importlib.util
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest
from public import WORDS
from safetensors.torch import save_file
from training import environment, striped_folder

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


def command_lines(page):
    """Yield the lines with ``batchnorm`` commands in a page's code blocks without a language."""
    for block in blocks(page, ""):
        for line in block.replace("\\\n", " ").splitlines():
            if re.search(r"(?:^|-m )batchnorm \w", line):
                yield line


def commands():
    """Yield the ``batchnorm`` commands of all pages, from :func:`command_lines` and from code spans."""
    for page in PAGES:
        for line in [*command_lines(page), *re.findall(r"`(batchnorm \w[^`]+)`", BLOCK.sub("", page.read_text()))]:
            yield page.name, re.sub(r"^(.* -m )?batchnorm ", "", line)


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


# The commands in code blocks, as pairs of a page and a command's first words, in the order in which the tests below
# run them. A pair may match several commands.
OWN_NETWORK = [
    *(("train.md", f"batchnorm {start}") for start in ("train", "predict", "fold", "compare")),
    ("fine-tuning.md", "batchnorm train"),
    ("ship.md", "batchnorm fold mynet"),
    ("monitor.md", "batchnorm report"),
]
SHARD, TRAIN = ("imagenet.md", "batchnorm shard"), ("imagenet.md", "batchnorm train")
TRAINED = [
    *(("imagenet.md", f"batchnorm {start}") for start in ("evaluate", "report", "predict", "fold", "bench input")),
    ("diagnose.md", "batchnorm diagnose"),
    ("ship.md", "batchnorm predict runs/bn-x5"),
]
MNIST = [("reproduce.md", "batchnorm reproduce fig1"), ("reproduce.md", "batchnorm reproduce placement")]
SEVERAL_RANKS = [("gpus.md", "torchrun --nproc-per-node"), ("gpus.md", "torchrun --nnodes")]
PUBLISHED = [(f"fig{n}.md", f"batchnorm reproduce fig{n} --results") for n in (2, 4)]
NOT_RUN = [  # the first is like the one in imagenet.md; the others take too long, and tests/reproduce runs their code
    ("ship.md", "batchnorm fold runs/bn-x5"),
    ("index.md", "batchnorm reproduce fig1"),
    ("fig2.md", "batchnorm reproduce fig2 --data DIR"),
    ("fig2.md", "batchnorm reproduce fig2 --plan dropout"),
    ("fig4.md", "batchnorm reproduce fig4 --data DIR"),
    ("fig4.md", "batchnorm reproduce fig4 --plan"),
]
SMALLER = {  # what the tests change in these commands, so that they take seconds on a CPU
    r"--epochs \d+": "--epochs 1",
    r"--steps \d+": "--steps 20 --processes 1",
    r"--workers \d+": "--workers 0",
    r"--batch-size \d+": "--batch-size 8",
    r"--recipe bn-x30": r"\g<0> --width 0.04 --size 32 --epochs 1 --device cpu",
    r"--size 64": r"\g<0> --workers 0",
    r"^batchnorm compare": r"\g<0> --rates 0.03 --seeds 2 --jobs 2",
    r"--nproc-per-node 8": "--nproc-per-node 2",
    r"--nnodes 4": "--nnodes 1",
    r"HOST:29500": "localhost:0",
    r"/shared/": "",
    r"(fig\d) --results RESULTS": r"\1 --results RESULTS/\1",
}


def lines_of(place):
    page, start = place
    return [line for line in command_lines(DOCS / page) if line.startswith(start)]


def smaller(line):
    """Return the words of a command line, with smaller sizes."""
    for pattern, replacement in SMALLER.items():
        line = re.sub(pattern, replacement, line)
    return shlex.split(line)


def run(places, capsys):
    printed = ""
    for line in [line for place in places for line in lines_of(place)]:
        status, (out, err) = main(smaller(line)[1:]), capsys.readouterr()
        assert status == 0, f"{line}: {err}"
        printed += out
    return printed


def test_every_command_in_a_code_block_is_run_or_listed():
    listed = [*OWN_NETWORK, SHARD, TRAIN, *TRAINED, *MNIST, *SEVERAL_RANKS, *PUBLISHED, *NOT_RUN]
    assert all(lines_of(place) for place in listed)
    found = {line for place in listed for line in lines_of(place)}
    assert {line for page in PAGES for line in command_lines(page)} - found == set()


def test_from_images_to_a_file(tmp_path, monkeypatch, capsys):
    """Run the commands of "Train your own network" on a few small images, then use the run as other guides do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mynet.py").write_text(next(block for block in blocks(DOCS / "train.md", "") if "def build" in block))
    images = striped_folder(tmp_path / "images")
    next((images / "val").rglob("*.png")).rename("photo.jpg")
    shutil.rmtree(images / "val")
    shutil.copytree(images, "new-images")
    shutil.rmtree(tmp_path / "new-images/train/class0")
    save_file(make_network("mynet.py:build")[0].state_dict(), "net.safetensors")
    printed = run(OWN_NETWORK, capsys)
    assert "starting from runs/mynet-build-insert: 18 of 20 tensors loaded; 11.weight, 11.bias init" in printed
    assert {path.name for path in tmp_path.iterdir()} >= {"net.onnx", "report.html"}
    assert (tmp_path / "runs/compare-mynet-build/report.html").exists()


def test_from_downloads_to_a_file(tmp_path, monkeypatch, capsys):
    """Run the commands of "Train the paper's network on ImageNet", then use the run as other guides do."""
    monkeypatch.chdir(tmp_path)
    images = striped_folder(tmp_path / "images")
    shutil.copytree(images, "DOWNLOADS")
    (tmp_path / "photos").mkdir()
    for name in ("photo.jpg", "photos/photo.jpg"):
        shutil.copy(images / "val/class0/0.png", name)
    for line in lines_of(SHARD):
        shutil.rmtree("imagenet", ignore_errors=True)
        assert main(smaller(line)[1:]) == 0
    run([TRAIN], capsys)
    for name in ("runs/bn-x5", "runs/mine"):
        shutil.copytree("runs/bn-x30", name)
    printed = run(TRAINED, capsys)
    assert "12 images, 144 crops of each" in printed
    assert "a GPU that trains on 20000 images/s needs" in printed
    assert {path.name for path in tmp_path.iterdir()} >= {"net.onnx", "predictions.csv", "report.html"}


@pytest.mark.dist
def test_several_ranks(tmp_path):
    striped_folder(tmp_path / "imagenet")
    for line in [line for place in SEVERAL_RANKS for line in lines_of(place)]:
        words = [sys.executable, "-m", "torch.distributed.run", *smaller(line)[1:]]
        done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "on 2 x cpu" in done.stdout
    assert (tmp_path / "runs/bn-x30/result.json").exists()
    assert (tmp_path / "run/result.json").exists()


def test_short_runs_of_the_mnist_experiments(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(MNIST, capsys)
    assert {path.name for path in (tmp_path / "runs").rglob("*.png")} == {"fig1.png", "placement.png"}


def test_commands_that_need_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = next(line for page, line in commands() if page == "imagenet.md" and line.startswith("describe inception --"))
    assert main(shlex.split(line)) == 0
    assert capsys.readouterr().out.endswith("at 64 px the first max pool is left out\n")
    shutil.copytree(ROOT / "results", "RESULTS")
    run(PUBLISHED, capsys)
    assert (tmp_path / "runs/fig2/fig2.md").exists()
    assert (tmp_path / "runs/fig4/fig4.md").exists()


ARGS = re.compile(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", re.MULTILINE)
ARG = re.compile(r"^    (\w+):", re.MULTILINE)
# A doctest with its output, or an indented block.
EXAMPLE = re.compile(r"^>>> (?:.+\n?)+|(?<=\n\n)    (?:.+\n?)+", re.MULTILINE)


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
            assert paper_map.symbols(row._replace(tags=(tag,))), f"{row.says}: the tag {tag!r} selects no code"
        for path, _, test in (name.partition("::") for name in row.tests):
            assert f"\ndef {test}(" in (ROOT / "tests" / path).read_text(), test
        for command in row.commands:
            assert any(f"{command} ".startswith(f"{name} ") for name in COMMANDS), command
    assert set(paper_map.TAGGED) == {name for row in rows for name in paper_map.symbols(row)}


def test_every_table_has_rows():
    for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"]:
        assert not re.search(r"^\|[-|: ]+\|\n(?!\|)", page.read_text(), re.MULTILINE), page
