"""Test that docstrings cite every implemented part of the paper.

Docstrings of exported names must cite a part or say that the name goes beyond the paper. No other docstring may say
that its name goes beyond the paper.
"""

import ast
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

from public import WORDS

import batchnorm as bn

SOURCE = Path(bn.__file__).parent
TAG = re.compile(r"^(Paper|Beyond the paper): \S", re.MULTILINE)

PARTS = [
    *("Sec. 1", "Sec. 2", "Sec. 3, gradients", "Sec. 3.1", "Sec. 3.2", "Sec. 3.3", "Sec. 3.4", "Sec. 4.1", "Sec. 4.2"),
    *("Sec. 5", "Sec. 4.2.1", "Sec. 4.2.2", "Sec. 4.2.3", "Appendix", "Fig. 1", "Fig. 2", "Fig. 3", "Fig. 4"),
    *("Alg. 1", "Alg. 2, l. 1-5", "Alg. 2, l. 8-10", "Alg. 2, l. 11"),
]


def public_objects():
    for info in pkgutil.walk_packages(bn.__path__, "batchnorm."):
        if ".triton" in info.name:
            continue
        module = importlib.import_module(info.name)
        for name, thing in vars(module).items():
            if name.startswith("_") or getattr(thing, "__module__", None) != info.name:
                continue
            if inspect.isclass(thing) or inspect.isfunction(thing):
                yield f"{info.name}.{name}", thing


def test_exported_names_carry_a_tag():
    missing = [name for name, thing in WORDS.items() if not TAG.search(inspect.getdoc(thing) or "")]
    assert not missing


def test_only_exported_names_go_beyond_the_paper():
    exported = {f"{thing.__module__}.{thing.__qualname__}" for thing in WORDS.values()}
    found = set()
    for path in SOURCE.rglob("*.py"):
        module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                doc = ast.get_docstring(node) or ""
                found |= {f"{module}.{node.name}"} if re.search("^Beyond the paper:", doc, re.MULTILINE) else set()
    assert found
    assert found <= exported


def test_every_part_has_code():
    text = "\n".join(inspect.getdoc(thing) or "" for _, thing in public_objects())
    tags = re.findall(r"^Paper: (.*)$", text, re.MULTILINE)
    for part in PARTS:
        assert any(part in tag for tag in tags), part
