"""Test ``batchnorm fold``."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from networks import scramble_
from safetensors.torch import save_file

from batchnorm.cli import main
from batchnorm.data.augment import IMAGENET_MEAN, IMAGENET_STD
from batchnorm.train import checkpoint
from batchnorm.train.fold_command import fold

FACTORY = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())

def with_example():
    return net(), torch.zeros(2, 3, 8, 8)

def nothing():
    return None
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "mynets.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mynets", raising=False)
    return tmp_path


def weights(folder, suffix):
    sys.path.insert(0, str(folder))
    import mynets

    sys.path.remove(str(folder))
    net = scramble_(mynets.net())
    path = folder / f"w.{suffix}"
    save_file(net.state_dict(), path) if suffix == "safetensors" else torch.save(net.state_dict(), path)
    return net.eval(), path


def test_from_the_shell(folder):
    net, _ = weights(folder, "safetensors")
    words = ["fold", "mynets:with_example", "--weights", "w.safetensors", "-o", "net.onnx"]
    done = subprocess.run([sys.executable, "-m", "batchnorm.cli", *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fold: 1 of 1 batch norm folded, relative error" in done.stdout
    assert "size: 520 bytes of parameters and buffers before folding, 448 after," in done.stdout
    # On a slow machine, export prints its progress. There must be no other output on stderr, such as torch.onnx's notes
    # about missing packages.
    assert [line for line in done.stderr.splitlines() if not line.startswith("export: ")] == []
    import onnxruntime

    x = torch.randn(5, 3, 8, 8)
    session = onnxruntime.InferenceSession(str(folder / "net.onnx"), providers=["CPUExecutionProvider"])
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.as_tensor(out), net(x).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("suffix", "prefix"), [("safetensors", ""), ("pt", ""), ("pt", "module._orig_mod.")])
def test_weights_and_shape(folder, suffix, prefix, capsys):
    net, path = weights(folder, suffix)
    if prefix:
        torch.save({f"{prefix}{name}": value for name, value in net.state_dict().items()}, path)
    fold("mynets:net", folder / "net.pt2", weights=path, input=(1, 3, 8, 8))
    said = capsys.readouterr()
    assert "net.pt2: relative error" in said.out
    assert said.err == ""
    x = torch.randn(3, 3, 8, 8)
    program = torch.export.load(folder / "net.pt2").module()
    torch.testing.assert_close(program(x), net(x), rtol=1e-4, atol=1e-5)


def test_a_network_that_was_never_trained_gets_a_warning(folder, capsys):
    fold("mynets:with_example", folder / "net.pt2")
    assert "mynets:with_example have counted no training batches: if the network is not trained, add --weights" in (
        capsys.readouterr().err
    )
    assert (folder / "net.pt2").exists()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("mynets", "give MODULE:FUNCTION"),
        ("runs/typo", "'runs/typo' is neither the folder of a run nor a function: give MODULE:FUNCTION"),
        ("mynets:missing", "cannot make a network from mynets:missing"),
        ("nowhere:net", "cannot make a network from nowhere:net"),
        ("mynets:nothing", r"returned NoneType, not a torch\.nn\.Module"),
        ("mynets:net", "--input 1 3 224 224"),
    ],
)
def test_mistakes_get_a_sentence(folder, factory, message):
    with pytest.raises(ValueError, match=message):
        fold(factory, folder / "net.onnx")


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ("1 4 8 8", "fails on --input 1 4 8 8: Given groups=1"),
        ("1 3 2 2", "Kernel size can't be greater"),
        ("3", "fails on --input 3"),
        ("0 3 8 8", "--input 0 3 8 8 is not a batch shape"),
    ],
)
def test_a_wrong_shape_gets_one_sentence(folder, shape, says, capsys):
    assert main(["fold", "mynets:net", "-o", "net.pt2", "--input", *shape.split()]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert "Traceback" not in error
    assert not (folder / "net.pt2").exists()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        (
            "w.pt",
            {"model": torch.zeros(2)},
            "does not fit mynets:with_example: 7 entries not in the file (0.weight, 0.bias, 1.weight, ...); 1",
        ),
        ("w.pt", {"model": {}}, "w.pt holds dicts (model) instead of tensors: save only the dict that is"),
        ("w.pt", {"0.weight": torch.zeros(2)}, "1 entry with a different shape (0.weight)"),
        ("w.pt", torch.zeros(2), "holds a Tensor, not a state dict: save net.state_dict()"),
        ("w.pt", torch.nn.ReLU(), "w.pt holds objects other than tensors"),
        ("w.pt", b"other bytes", "or was not written by torch.save"),
        ("w.safetensors", b"other bytes", "w.safetensors cannot be read as a state dict"),
    ],
)
def test_weights_of_something_else_get_one_sentence(folder, file, content, says, capsys):
    if isinstance(content, bytes):
        (folder / file).write_bytes(content)
    else:
        torch.save(content, folder / file)
    assert main(["fold", "mynets:with_example", "-o", "net.pt2", "--weights", file]) == 2
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def check_metadata(metadata):
    values = {name: json.loads(text) for name, text in metadata.items()}
    assert values == {
        "classes": ["class0", "class1", "class2"],
        "size": 32,
        "mean": list(IMAGENET_MEAN),
        "std": list(IMAGENET_STD),
        "crop": 0.875,
    }


def test_fold_writes_a_run_as_onnx(run, finished, files, tmp_path, capsys):
    onnxruntime = pytest.importorskip("onnxruntime")
    assert main(["fold", str(finished), "-o", str(tmp_path / "net.onnx")]) == 0
    assert "net.onnx: relative error" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    check_metadata(session.get_modelmeta().custom_metadata_map)
    (scores,) = session.run(None, {session.get_inputs()[0].name: run.preprocessing(files).numpy()})
    probabilities = torch.from_numpy(scores).softmax(1)
    torch.testing.assert_close(probabilities, run.predict(files).probabilities, rtol=1e-3, atol=1e-5)


def test_fold_writes_a_run_as_pt2(run, finished, files, tmp_path):
    assert main(["fold", str(finished), "-o", str(tmp_path / "net.pt2")]) == 0
    metadata = dict.fromkeys(("classes", "size", "mean", "std", "crop"), "")
    program = torch.export.load(tmp_path / "net.pt2", extra_files=metadata).module()
    check_metadata(metadata)
    probabilities = program(run.preprocessing(files)).softmax(1)
    torch.testing.assert_close(probabilities, run.predict(files).probabilities, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("suffix", ["onnx", "pt2"])
def test_class_names_that_are_not_utf_8(finished, tmp_path, suffix):
    pytest.importorskip("onnxruntime")
    run, names = shutil.copytree(finished, tmp_path / "run"), ["caf\udce9", "gr\xfcn", "red"]
    saved = checkpoint.load_latest(run / "final")
    checkpoint.save(run / "final", saved.step, saved.model, {**saved.state, "classes": names})
    output = tmp_path / f"net.{suffix}"
    assert main(["fold", str(run), "-o", str(output)]) == 0
    if suffix == "onnx":
        metadata = pytest.importorskip("onnxruntime").InferenceSession(output).get_modelmeta().custom_metadata_map
    else:
        metadata = {"classes": ""}
        torch.export.load(output, extra_files=metadata)
    assert json.loads(metadata["classes"]) == names


def test_fold_of_a_run_takes_no_weights(finished, tmp_path, refusal):
    words = ["fold", finished, "-o", tmp_path / "net.pt2", "--input", 1, 3, 32, 32]
    assert "is a folder, so it must be a run, which has its own weights and image size" in refusal(*words)
