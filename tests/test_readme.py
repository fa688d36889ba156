"""Test that README's Python example runs, links in README and the documentation work, and tables are up to date."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import onnx
import onnxruntime
import pytest
import torch
import zoo
from blocks import Bottleneck
from torch import nn

ROOT = Path(__file__).parents[1]


def run_blocks(path):
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
    assert blocks
    scope = {}
    for block in blocks:
        exec(compile(block, str(path), "exec"), scope)
    return scope


def small_resnet():
    """Return a small version of torchvision's ResNet-50, with its stem, blocks and head."""
    shortcut = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4))
    stem = [nn.Conv2d(3, 4, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 1000)]
    return nn.Sequential(*stem, nn.MaxPool2d(2), Bottleneck(shortcut), Bottleneck(), *head)


def check_session(folder):
    scope = run_blocks(ROOT / "README.md")
    net, images = scope["net"], scope["images"]
    assert net.report.summary.startswith("convert: ")
    written = str(folder / "resnet50.onnx")
    assert not any(node.op_type == "BatchNormalization" for node in onnx.load(written).graph.node)
    session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    torch.testing.assert_close(torch.as_tensor(scores), net(images).detach(), rtol=1e-3, atol=1e-3)


def test_readme_session_converts_trains_folds_and_exports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models = SimpleNamespace(resnet50=small_resnet)
    monkeypatch.setitem(sys.modules, "torchvision", SimpleNamespace(models=models))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    check_session(tmp_path)


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_readme_session_on_torchvisions_own_network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        zoo.import_torchvision()
    except (ImportError, RuntimeError, OSError) as error:
        pytest.skip(f"needs torchvision: {error}")
    check_session(tmp_path)


def anchors(page):
    """Return the anchors that GitHub makes from a page's headings, and those of the site's API reference."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = (re.sub(r"\]\([^)]*\)", "", heading) for heading in re.findall(r"^#+ (.*)", text, re.MULTILINE))
    made = {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}
    return made | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
    *sorted((ROOT / "docs").glob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_point_at_files_and_headings(page):
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_cells_are_short():
    text = re.sub(r"\]\([^)]*\)", "]", (ROOT / "README.md").read_text())
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) > 40
    assert not [cell for row in rows for cell in row.strip("|").split("|") if len(cell) > 110]


def test_the_first_paragraph_has_the_measured_speedups():
    rows = json.loads((ROOT / "results/networks-h200.json").read_text())["rows"]
    here = [row for row in rows if (row["network"], row["batch"]) == ("torchvision:resnet50", 256)]
    eager, compiled = (next(row["speedup"] for row in here if row["mode"] == mode) for mode in ("eager", "compiled"))
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f'{eager:.2f} times as fast as the original ("stock") network in eager mode' in text
    assert f"{compiled:.2f} times as fast if both are under `torch.compile`" in text


def test_tables_are_what_the_result_files_say():
    from batchnorm.report.summary import pages

    for page, text in pages(ROOT).items():
        assert text == page.read_text(), f"{page.name}: run python -m batchnorm.report.summary"
