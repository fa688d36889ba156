"""The benchmark of the kernels resumes where an earlier session stopped."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from batchnorm import ops
from batchnorm.bench.kernel_rows import all_layers, code_of, digest, earlier_rows, key_of, short_list
from batchnorm.bench.kernels_report import write
from batchnorm.ops.cuda import resident

MACHINE = {"device": "some GPU", "torch": "2.11"}
LAYER = short_list()[0]
PROCESSORS = 132


def row(channels_last, residual, kernels=None):
    given = LAYER, channels_last, torch.bfloat16, residual
    us = {"batchnorm": [1.0, 2.0], "eager": [3.0, 4.0], "compile": [2.0, 3.0]}
    key = key_of(*given)
    form = dict(zip(("layout", "dtype", "op"), key[-3:], strict=True))
    return key, {
        **LAYER._asdict(), **form, "megabytes": 51.0, "limit_us": [0.5, 1.0], "us": us,
        "kernels": kernels or digest(*given, PROCESSORS),
    }  # fmt: skip


def test_rows_of_the_same_kernels_are_kept_by_what_they_measure(tmp_path):
    path = tmp_path / "results" / "kernels.json"
    assert earlier_rows(path, MACHINE, PROCESSORS) == {}
    (key, kept), (other, stale) = row(True, False), row(False, True, "of other kernels")
    assert len({key, other, key_of(LAYER, True, torch.float32, False)}) == 3
    write({"hardware": MACHINE, "rows": {key: kept, other: stale}}, path)
    assert earlier_rows(path, MACHINE, PROCESSORS) == {key: kept}
    report = json.loads(path.read_text())
    assert [entry["layers"] for entry in report["summary"]] == [1, 1]
    assert report["bars"]


def test_results_of_another_machine_are_not_overwritten(tmp_path):
    path = tmp_path / "kernels.json"
    write({"hardware": {"device": "another GPU"}, "rows": {}}, path)
    with pytest.raises(ValueError, match=r"another GPU.*choose another --out"):
        earlier_rows(path, MACHINE, PROCESSORS)


def test_digest_knows_the_kernels_and_which_of_them_a_layer_gets(monkeypatch, tmp_path):
    given = LAYER, True, torch.bfloat16, False, PROCESSORS
    found = {digest(*given), digest(LAYER, False, *given[2:])}
    digest.cache_clear()
    assert digest(*given) in found
    # Choose another kernel.
    monkeypatch.setattr(resident, "choose", lambda *_: None)
    digest.cache_clear()
    found.add(digest(*given))
    shutil.copytree(Path(ops.__file__).parent, tmp_path / "ops")
    monkeypatch.setattr(ops, "__file__", str(tmp_path / "ops" / "__init__.py"))
    files = [path for path in (tmp_path / "ops" / "cuda").rglob("*") if path.suffix in (".py", ".cu")]
    assert {"resident.cu", "launch.py", "schedule.py", "tile.py"} <= {path.name for path in files}
    for path in files:
        with path.open("a") as file:
            file.write("\nint other;\n" if path.suffix == ".cu" else "\nOTHER = 1\n")
        digest.cache_clear()
        found.add(digest(*given))
    digest.cache_clear()
    # Each file changes the digest, except schedule.py: only the kernel that it chooses is part of the digest.
    assert len(found) == 3 + len(files) - 1


@pytest.mark.parametrize(
    ("name", "one", "same", "other"),
    [
        ("a.cu", "int a; // why\nint b;", "int a;\n\n/* how\nlong */ int b;", "int a; int c;"),
        (
            "a.py",
            '"""Doc."""\nimport a\n\ndef f():\n    """Doc."""\n    return 1  # why\n',
            "from b import c\ndef f(): return 1",
            "def f(): return 2",
        ),
    ],
)
def test_code_is_what_is_left_without_comments_docstrings_and_imports(tmp_path, name, one, same, other):
    found = []
    for text in (one, same, other):
        (tmp_path / name).write_text(text)
        found.append(code_of(tmp_path / name))
    assert found[0] == found[1] != found[2]


def test_layers_are_distinct():
    assert len(set(all_layers())) == len(all_layers()) == 66
    assert set(short_list()) <= set(all_layers())
