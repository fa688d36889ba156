"""Test that commands report mistakes before any work, and need only the packages that they list."""

import dataclasses
import errno
import inspect
import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest
import torch
from training import striped_folder

from batchnorm.cli import COMMANDS, main
from batchnorm.optional_packages import EXTRAS
from batchnorm.reproduce.imagenet.result_files import KEYS

OPTIONAL = {module for modules in EXTRAS.values() for module in modules}
NET = """
from torch import nn
def make(): return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
def needs(x): return x
def classifier(classes): return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, classes))
number = 3
"""


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def block(patch, modules):
    """Make packages impossible to import, even if they have already been imported."""
    homes = {*modules, *({"torch.utils.tensorboard"} if "tensorboard" in modules else ())}
    loaded = [name for name in sys.modules if any(name.startswith(f"{home}.") for home in homes)]
    for name in {*homes, *loaded}:
        patch.setitem(sys.modules, name, None)


def refused(words, capsys):
    """Run a command that must fail with an error, and return the error message in one line."""
    try:
        status = main(words)
    except SystemExit as stop:  # tyro exits on an invalid option
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2, out + err
    assert not out
    assert not {*"╭│╰─"} & {*err}, "box characters make an error hard to copy"
    return " ".join(err.split())


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train --data no --normalize foo", "Expected one of ('as-is', 'insert', 'convert', 'remove')."),
        ("train --recipe bn-x5 --data no --log-every 0", "log_every=0: must be 1 or more"),
        ("train --recipe bn-x5 --data no --estimate-batches 0", "estimate_batches=0: must be 1 or more"),
        ("train --recipe bn-x5 --data no --decay-epochs 0", "decay_epochs=0.0: must be above 0"),
        ("train --recipe bn-x5 --data no --epochs inf", "epochs=inf: must be at most 3.4e+38"),
        ("train --recipe bn-x5 --data no --dropout 2", "dropout=2.0: must be from 0 to 1"),
        ("train --recipe bn-x5 --data no --device cpu --graph True", "captures CUDA graphs"),
        (["train", "--recipe", "bn-x5", "--data", "no", "--name", ""], "name is empty"),
        ("train --recipe bn-x5 --data no --name ../x", "name='../x': must be the name of a folder in runs/"),
        ("compare --network torchvision:resnet18 --data no --name /x", "name='/x': must be the name of a folder in"),
        ("fold net:make -o net.pt2 --input 99999999999999999999", "the network fails on --input"),
        (
            "fold net:needs -o net.pt2",
            "without arguments: missing a required argument: 'x'; give its arguments default values",
        ),
        ("fold net:number -o net.pt2", "number is of type int; give a function that returns a network"),
        ("fold ..net:make -o net.pt2", "is not the name of a function"),
        ("evaluate no --data no --workers=-1", "workers=-1: must be 0 or more"),
        ("describe inception --classes 0", "classes=0: must be from 1"),
        ("reproduce fig3 --data no", "there is no command 'reproduce fig3'; 'reproduce fig2' makes Figure 3"),
        ("reproduce fig1 --rate 1e300", "rate=1e+300: must be at most 3.4e+38"),
        ("reproduce fig1 --batch-size 70000", "batch_size=70000: must be from 2 to 60000"),
        ("reproduce fig1 --seed=-1", "seed=-1: must be from 0"),
        ("reproduce comparison --marks", "marks is empty"),
        ("reproduce comparison --marks 10 5", "in increasing order"),
        ("reproduce section2 --rates", "rates is empty"),
        ("reproduce optimizers --batch 1", "batch=1: must be from 2"),
        ("reproduce placement --std nan", "std=nan: must be above 0"),
        ("reproduce scale --factors 0", "factors=0.0: must be above 0"),
        ("reproduce jacobian --examples 0", "examples=0: must be 1 or more"),
        ("reproduce saturation --steps 10 --points 11", "points=11: must be from 1 to 10"),
        ("reproduce init --stds 0.1 0.1", "stds contains duplicates"),
        ("reproduce fig2 --data no --device gpu", "device='gpu' is unknown"),
        ("reproduce fig4 --data no --minutes nan", "minutes=nan: must be 0 or more"),
        ("bench cpu --threads 0", "threads=0: must be 1 or more"),
        ("bench algorithm2 --batches 0", "batches=0: must be 1 or more"),
        ("bench fig1 --rounds 0", "rounds=0: must be 1 or more"),
        ("bench monitor --steps 0", "steps=0: must be 1 or more"),
        ("bench memory --batch 0", "batch=0: must be 1 or more"),
        ("bench input --workers 0", "workers=0: must be 1 or more"),
        ("bench crops --images 0", "images=0: must be 1 or more"),
        ("bench train --batches", "batches is empty"),
        ("bench kernels --jobs=-1", "jobs=-1: must be 0 or more"),
    ],
)
def test_options_that_cannot_be_used(command, says, capsys, tmp_path):
    Path("net.py").write_text(NET)
    assert says in refused(command if isinstance(command, list) else command.split(), capsys)
    assert {path.name for path in tmp_path.iterdir()} <= {"net.py", "__pycache__"}


@pytest.mark.parametrize("name", ["kernels", "train", "counters"])
def test_benchmarks_that_need_a_gpu_say_so(name, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda program: program)
    assert refused(["bench", name], capsys).endswith("needs a CUDA device, but torch finds none")
    assert not list(tmp_path.iterdir())


CLAIMS = [name for name in COMMANDS if name.startswith("reproduce") and "fig" not in name]
BENCHES = [f"bench {name}" for name in ("cpu", "algorithm2", "fig1", "monitor", "memory", "input", "crops")]
OTHERS = ["evaluate run --data data", "report run", "reproduce fig1"]


@pytest.mark.parametrize("command", [*CLAIMS, *BENCHES, *OTHERS])
def test_an_output_that_cannot_be_written_is_found_first(command, capsys):
    Path("file").touch()
    assert ": file" in refused([*command.split(), "--out", "file/x"], capsys)


def test_a_full_disk_is_one_sentence(capsys, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text('{"step": 1, "accuracy": 0.5}\n')
    assert refused(["report", "run"], capsys) == "batchnorm report: report.html: no space left on device"


@pytest.mark.parametrize("name", ["fig2", "fig4"])
@pytest.mark.parametrize("content", ["{", "[1]", "{}", json.dumps({**dict.fromkeys(KEYS), "recipe": 1, "crops": 1})])
def test_a_damaged_result_file_is_named(name, content, capsys):
    run = {"fig2": "rate-0.005-inception", "fig4": "bn-x30-large-init"}[name]
    Path("results").mkdir()
    Path(f"results/{run}.json").write_text(content)
    assert f"results/{run}.json" in refused(["reproduce", name, "--results", "results"], capsys)


@pytest.mark.parametrize("text", ["x = [", "", "train = 3", "train = {}\ngroup = [1]", "[train]\n[[group]]\nruns = 1"])
def test_a_plan_that_is_none(text, capsys):
    Path("plan.toml").write_text(text)
    Path("results").mkdir()
    Path("results/a.json").write_text("{}")
    words = ["reproduce", "fig2", "--results", "results", "--plan", "plan.toml"]
    assert refused(words, capsys).startswith("batchnorm reproduce fig2: plan.toml: ")


def test_the_needs_are_those_of_commands():
    assert OPTIONAL.issuperset(module for command in COMMANDS.values() for module in command.needs)


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        *((name, command.needs) for name, command in COMMANDS.items() if command.needs),
        ("fold net:make -o net.onnx --input 2 2", ("onnx", "onnxscript", "onnxruntime")),
        ("fold net:make -o net.pt2 --weights net.safetensors", ("safetensors",)),
        ("shard images shards --short-side 8", ("PIL",)),
        ("reproduce fig2 --data images", ("PIL", "safetensors")),
        ("reproduce fig4 --data images", ("PIL", "safetensors")),
    ],
)
def test_what_is_missing_is_said_first(command, missing, monkeypatch, capsys, tmp_path):
    block(monkeypatch, OPTIONAL)
    said = refused(command.split(), capsys)
    names = ["pillow" if module == "PIL" else module for module in missing]
    absent = said.partition(" not installed; ")[0]
    assert all(name in absent for name in names)
    assert f"run: pip install {' '.join(names)}, or pip install '.[" in said
    assert not list(tmp_path.iterdir())


def test_tensorboard_is_needed_if_asked_for(monkeypatch, capsys):
    block(monkeypatch, {"tensorboard"})
    words = ["train", "--recipe", "bn-x5", "--data", "no", "--device", "cpu", "--tensorboard"]
    assert "tensorboard is not installed" in refused(words, capsys)


def test_help_needs_nothing(monkeypatch, capsys):
    block(monkeypatch, OPTIONAL)
    with pytest.raises(SystemExit) as stop:
        main(["reproduce", "fig1", "--help"])
    assert stop.value.code == 0


SMALL = {
    "fold": "net:make -o net.pt2 --input 2 2",
    "train": "--recipe bn-x5 --data images --out trained --device cpu --width 0.04 --workers 0 --batch-size 8 --size 32"
    " --max-steps 1 --estimate-batches 1",
    "evaluate": "trained --data images --device cpu --workers 0",
    "predict": "trained images/val --device cpu",
    "describe": "inception --size 32 --classes 2",
    "shard": "images shards",
    "report": "trained",
    "reproduce fig1": "--steps 1 --processes 1",
    "reproduce section2": "--bias-steps 2 --steps 1 --rates 0.1 --processes 1",
    "bench monitor": "--steps 1 --rounds 1",
    "bench input": "images --images 8 --rounds 1 --workers 1 --size 32",
    "bench crops": "--size 32 --width 0.04 --images 1 --batch-size 8 --workers 0 --rounds 1 --device cpu --crops 1",
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Run each command of SMALL without the packages that it does not need; return the folder and the outputs."""
    folder, said = tmp_path_factory.mktemp("small"), {}
    striped_folder(folder / "images")
    (folder / "net.py").write_text(NET)
    for command, words in SMALL.items():
        needs = set(COMMANDS[command].needs)
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as out:
            patch.chdir(folder)
            patch.setattr("batchnorm.bench.input._workers_rate.__defaults__", (0.0,))
            block(patch, OPTIONAL - needs - ({"PIL"} if "matplotlib" in needs else set()))  # matplotlib needs PIL
            assert main([*command.split(), *words.split()]) == 0, command
        said[command] = out.getvalue()
    return folder, said


def test_commands_need_no_other_packages(ran):
    folder, _ = ran
    assert {path.name for path in folder.iterdir()} >= {"runs", "trained", "shards", "net.pt2", "report.html"}
    assert not (folder / "results").exists()


def test_a_claim_prints_its_finding(ran):
    paper, measured, grows, stays, result, picture = ran[1]["reproduce section2"].splitlines()
    assert paper.startswith("the paper: b will grow indefinitely while the loss remains fixed")
    assert measured.startswith("measured: b's norm grows to ")
    assert grows.startswith("confirmed: b grows and the loss does not change")
    assert stays.startswith("confirmed: b does not grow")
    assert result == "result: runs/section2/section2.json"
    assert picture == "picture: runs/section2/section2.png"


def test_figure_1_prints_its_finding(ran):
    out = ran[1]["reproduce fig1"]
    assert "test accuracy at step 1: " in out
    assert 'the paper: "The batch-normalized network enjoys the higher test accuracy."' in out


def test_help_fills_its_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    for command, told in (
        ("bench networks", "returns a classifier, or a classifier and an example batch."),
        ("train", "runs/compare-NAME; an unfinished run is resumed"),
    ):
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        assert told in capsys.readouterr().out


WITHOUT_TYRO = """
import sys
sys.modules["tyro"] = None
from batchnorm.cli import COMMANDS, main
for command in COMMANDS:
    try:
        main([*command.split(), "--help"])
    except SystemExit as stop:
        assert stop.code == 0, command
for command in sys.argv[1:]:
    assert main(command.split()) == 0, command
assert main("reproduce comparison --marks".split()) == 2
"""


def test_every_command_works_without_tyro(ran, tmp_path):
    shutil.copytree(ran[0] / "images", tmp_path / "images")
    shutil.copytree(ran[0] / "trained", tmp_path / "trained")
    Path("net.py").write_text(NET)
    words = [f"{c} {SMALL[c]}" for c in ("fold", "evaluate", "predict", "report", "reproduce section2", "bench input")]
    words.append(f"train {SMALL['train']} --max-steps 2 --graph False --per-activation 5a 5b --out again")
    own = "--data images --device cpu --workers 0 --batch-size 8 --size 32 --max-steps 1 --estimate-batches 1"
    words.append(f"train --network net.py:classifier --out own {own}")
    done = subprocess.run([sys.executable, "-c", WITHOUT_TYRO, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert done.stderr.endswith("batchnorm reproduce comparison: marks is empty: give at least one number\n")
    for command in COMMANDS:
        assert f"usage: batchnorm {command} [-h]" in done.stdout
    assert json.loads(Path("again/recipe.json").read_text())["per_activation"] == ["5a", "5b"]
    assert json.loads(Path("own/recipe.json").read_text())["factory"] == "net.py:classifier"


def default_out(function):
    kinds = [kind for name, kind in get_type_hints(function).items() if name != "return"]
    if len(kinds) == 1 and dataclasses.is_dataclass(kinds[0]):
        return next((field.default for field in dataclasses.fields(kinds[0]) if field.name == "out"), None)
    out = inspect.signature(function).parameters.get("out")
    return None if out is None else out.default


@pytest.mark.parametrize("command", COMMANDS)
def test_published_results_are_not_overwritten_by_default(command):
    module, _, function = COMMANDS[command][0].partition(":")
    out = default_out(getattr(import_module(module), function))
    assert not isinstance(out, Path) or out.parts[0] != "results"


def test_errors_name_options_not_classes(capsys):
    with pytest.raises(SystemExit):
        main(["reproduce", "fig1", "--steps", "-5"])
    said = capsys.readouterr().err
    assert "\nsteps=-5: must be 1 or more\n" in said
    assert "Fig1:" not in said
