"""Test that all private names of torch that the library uses are listed in torch_internals.txt, once, and still exist.

A new version of torch may drop any of them without notice, so run this test first after an upgrade. CI also runs it
with torch's nightly build.
"""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
LINES = [
    line.split("#")[0].strip()
    for line in (ROOT / "tests" / "torch_internals.txt").read_text().splitlines()
    if line.split("#")[0].strip()
]
LISTED = [line for line in LINES if ": " not in line]
HEADERS = {header: names.split() for header, names in (line.split(": ") for line in LINES if ": " in line)}
INCLUDE = Path(torch.__file__).parent / "include"
TREES = [ast.parse(path.read_text()) for path in sorted((ROOT / "src").rglob("*.py"))]
OWNERS = (nn.Conv2d(1, 1, 1), nn.SyncBatchNorm(1), torch.empty(0), torch.optim.SGD([torch.empty(0)]))
# Check only these names: the objects' other private names are also names of this library's own attributes.
SINGLE = {"_orig_mod": torch.compile(nn.ReLU()), "_schema": torch.ops.aten.relu.default}


def is_private(name):
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node):
    """Return the parts of ``a.b.c``, or an empty list for anything else."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return [node.id, *reversed(parts)] if isinstance(node, ast.Name) else []


def imported(tree):
    """Map each name that a file imports from torch, or looks up in sys.modules, to its full name in torch."""
    names = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(attr="get") as get, [ast.Constant(module)])):
                names |= {name: module} if dotted(get) == ["sys", "modules", "get"] else {}
        if isinstance(node, ast.Import):
            firsts = [a.name.partition(".")[0] for a in node.names]
            names |= {
                a.asname or first: a.name if a.asname else first for a, first in zip(node.names, firsts, strict=True)
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return {name: full for name, full in names.items() if full.split(".")[0] == "torch"}


def names_in(tree):
    """Return the private names of torch's modules that a file imports, reaches through an import, or has as strings."""
    aliases = imported(tree)
    found = set(aliases.values())
    for node in ast.walk(tree):
        match node:
            case ast.Constant(str(text)) if re.fullmatch(r"torch(\.\w+)+", text):
                found.add(text)
                continue
            case ast.Call(ast.Name("getattr"), [owner, ast.Constant(attribute), *_]):
                first, *rest = *dotted(owner), attribute
            case _:
                first, *rest = dotted(node) or [""]
        if first in aliases and rest:
            found.add(".".join([aliases[first], *rest]))
    return set(filter(is_private, found))


def attributes_in(tree):
    """Return the private attributes of torch's objects that a file reads, overrides, or names in a string."""
    known = {name for owner in OWNERS for name in dir(owner) if is_private(name)} | SINGLE.keys()
    own = {node.attr for node in ast.walk(tree) if dotted(node)[:1] == ["self"] and isinstance(node.ctx, ast.Store)}
    where = {ast.Attribute: "attr", ast.Constant: "value", ast.FunctionDef: "name"}
    named = {getattr(node, where[type(node)]) for node in ast.walk(tree) if type(node) in where}
    return {f"*.{name}" for name in named & known - own}


def test_every_private_name_is_listed():
    used = {name for tree in TREES for name in names_in(tree)}
    used = {name for name in used if not any(other.startswith(f"{name}.") for other in used)}
    used |= {name for tree in TREES for name in attributes_in(tree)}
    assert sorted(used) == sorted(LISTED)


def resolve(name):
    """Return the object of a dotted name: import the longest prefix that is a module, then get attributes."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


CPP_HEADER = re.compile(r"^#include [<\"]((?:torch|ATen|c10)/.*)[>\"]", re.MULTILINE)
CPP_NAME = re.compile(
    r"(?<=\.)_\w+|[\w:]*(?:\b(?:impl|detail)::|torch::autograd::|THP|TH_ERRORS|\bpython_error\b)[\w:]*"
)


def test_every_private_cpp_name_and_header_is_listed():
    files = [path for kind in ("cpp", "cu", "c") for path in (ROOT / "src").rglob(f"*.{kind}")]
    code = "\n".join(re.sub("//.*", "", path.read_text()) for path in files)
    names = set(CPP_NAME.findall(code))
    attributes = {node.attr for tree in TREES for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {name for name in attributes if name.startswith("aoti_")}  # called through ctypes
    assert sorted(names) == sorted(name for names in HEADERS.values() for name in names)
    private = {header for header in CPP_HEADER.findall(code) if re.search("/(csrc|impl|detail)/", header)}
    assert private <= set(HEADERS)


@pytest.mark.parametrize("header", HEADERS)
def test_the_header_still_has_its_names(header):
    text = (INCLUDE / header).read_text()
    for name in HEADERS[header]:
        assert all(re.search(rf"\b{part}\b", text) for part in name.split("::")), name


@pytest.mark.parametrize("name", LISTED)
def test_it_still_exists(name):
    if name.startswith("*."):
        assert any(hasattr(owner, name[2:]) for owner in (*OWNERS, SINGLE.get(name[2:])))
    elif "_cuda_" in name and not torch.backends.cuda.is_built():
        pytest.skip("this build of torch has no CUDA")
    else:
        resolve(name)


def test_torch_fx_still_names_constants_so():
    constant = torch.ones(1)
    graph = torch.fx.symbolic_trace(lambda x: x + constant).graph
    (target,) = (node.target for node in graph.nodes if node.op == "get_attr")
    assert target.startswith("_tensor_constant")  # see create_node in graph/symbolic.py
