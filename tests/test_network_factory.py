"""Test building networks from the names that users type."""

import sys
from importlib import import_module

import pytest
import zoo
from torch import nn

from batchnorm.network_factory import check_function, make_network

SOURCE = """
from torch import nn
from helper import WIDTH

def build(classes=2):
    return nn.Linear(WIDTH, classes)

def with_example():
    import torch
    return nn.Linear(WIDTH, 1), torch.zeros(1, WIDTH)

def library_style(num_classes=1000):
    return nn.Linear(WIDTH, num_classes)

def wide(width):
    return nn.Linear(width, width)

def deep(classes, depth):
    return nn.Linear(depth, classes)

def nothing(classes):
    return classes

made = nn.Linear(WIDTH, 2)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with mynet.py, which imports its neighbor helper.py."""
    (tmp_path / "mynet.py").write_text(SOURCE)
    (tmp_path / "helper.py").write_text("WIDTH = 3")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("mynet", "helper"):
        sys.modules.pop(name, None)


def test_a_function_of_a_module_or_a_file(folder, tmp_path_factory, monkeypatch):
    assert make_network("mynet:build", 5)[0].out_features == 5
    assert make_network("mynet:build")[0].out_features == 2
    assert make_network("mynet:library_style", 5)[0].out_features == 5
    net, example = make_network("mynet.py:with_example", 5)  # with_example takes no number of classes
    assert net(example).shape == (1, 1)
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert make_network(f"{folder}/mynet.py:build", 4)[0].out_features == 4


def test_a_file_runs_once_unless_it_changes(tmp_path, capsys):
    file, text = tmp_path / "told.py", "print('ran')\nfrom torch import nn\n\ndef build():\n    return nn.Identity()\n"
    file.write_text(text)
    check_function(f"{file}:build")
    assert isinstance(make_network(f"{file}:build")[0], nn.Identity)
    assert capsys.readouterr().out == "ran\n"
    file.write_text(text.replace("Identity", "Flatten"))
    assert isinstance(make_network(f"{file}:build")[0], nn.Flatten)
    assert capsys.readouterr().out == "ran\n"


def test_files_of_one_name_in_different_folders(folder, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mynet.py").write_text("from torch import nn\n\ndef build():\n    return nn.Identity()")
    first = make_network("mynet.py:build")[0]
    assert isinstance(make_network("other/mynet.py:build")[0], nn.Identity)
    assert isinstance(make_network("mynet.py:build")[0], type(first))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mynet", "'mynet' is not the name of a function: write MODULE:FUNCTION"),
        ("mynet:missing", "cannot make a network from mynet:missing"),
        ("absent.py:build", "cannot make a network from absent.py:build: .*absent.py is not a file"),
        ("mynet:nothing", "mynet:nothing returned int, not a torch.nn.Module"),
        ("mynet:made", "made is of type Linear; give a function that returns a network"),
        ("mynet:WIDTH", "WIDTH is of type int; give a function that returns a network"),
        (
            "mynet:wide",
            "without arguments: missing a required argument: 'width'; if this argument is the number of"
            " classes, name it 'classes'; if not, give it a default value",
        ),
        (
            "mynet:deep",
            "with classes= alone: missing a required argument: 'depth'; give its other arguments default values",
        ),
    ],
)
def test_a_name_that_leads_to_no_network(folder, name, says):
    with pytest.raises(ValueError, match=says):
        make_network(name, 3)


def test_functions_of_the_standard_library_are_not_called():
    with pytest.raises(ValueError, match="os:abort: 'os' is a module of Python's standard library"):
        make_network("os:abort")


def test_a_library_that_was_built_for_another_torch(folder, monkeypatch):
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text(
        'raise RuntimeError("operator torchvision::nms does not exist\\nmore")'
    )
    monkeypatch.syspath_prepend(folder)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        ValueError, match=r"torchvision cannot be imported \(operator torchvision::nms does not exist\)"
    ):
        make_network("torchvision:resnet18")


@pytest.mark.zoo
@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_a_misspelled_network_of_a_library(library):
    try:
        zoo.import_torchvision()
        import_module(library)
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"needs {library}: {error}")
    with pytest.raises(ValueError, match=r"did you mean .*resnet18"):
        make_network(f"{library}:resnet-18")
