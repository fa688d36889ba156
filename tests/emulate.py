"""Run CUDA files on the CPU: g++ compiles them with emulated.hpp, and they take the arguments of a real launch."""

import ctypes
import hashlib
import os
import re
import subprocess
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ENTRY = """
#include "{source}"
template <class T> T& argument(void** all, int i) {{ return *(T*)all[i]; }}
extern "C" void run(unsigned programs, void** a) {{ launch(programs, [&] {{ {call}; }}); }}
"""


def call_of(file, name):
    """Return C++ code that calls the kernel with arguments of the declared types."""
    text = file.read_text()
    declared = re.search(rf"__launch_bounds__\([^)]*\) {name}\((.*?)\) {{", text, re.DOTALL)[1]
    types = [" ".join(one.split()).rpartition(" ")[0] for one in declared.split(",")]
    return f"{name}({', '.join(f'argument<{t}>(a, {i})' for i, t in enumerate(types))})"


class Emulated:
    """An emulated kernel with the interface of driver.Kernel."""

    def __init__(self, library):
        self.run = library.run

    def __call__(self, programs, arguments, stream):
        self.run(programs, arguments)


FLAGS = ["-std=c++20", "-O1", "-fPIC", "-pthread", "-ffp-contract=off"]
# Parsing the standard headers takes half of the compilation time, so precompile them once. This fails with old
# compilers, which do not support _Float16.
HEADERS = [line for line in (HERE / "emulated.hpp").read_text().splitlines() if line.startswith("#include <")]
HEADERS = "\n".join([*HEADERS, "using Half = _Float16;", ""])


def written(file, text):
    """Write a file atomically, because another process may write it at the same time."""
    unfinished = file.with_suffix(f".{os.getpid()}")
    unfinished.write_text(text)
    os.replace(unfinished, file)
    return file


def built(file, flags):
    """Build ``file`` with g++ unless it exists; another process may build it at the same time."""
    if not file.exists():
        unfinished = file.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", *FLAGS, *flags, "-o", unfinished], check=True, capture_output=True, text=True)
        os.replace(unfinished, file)
    return file


def compiler(folder):
    """Return an emulation of driver.load that caches compiled files in a folder, which processes may share."""
    headers = written(folder / "headers.hpp", HEADERS)
    built(folder / "headers.hpp.gch", ["-x", "c++-header", headers])

    @cache
    def load(file, name, definitions, threads, shared, device, cooperative=False):
        flags = [f"-D{key}={value}" for key, value in definitions]
        flags += [f'-DEMULATED="{HERE / "emulated.hpp"}"', "-Wno-unknown-pragmas", "-shared", "-include", str(headers)]
        entry = ENTRY.format(source=file, call=call_of(file, name))
        target = folder / f"{name}-{hashlib.sha256(repr(definitions).encode()).hexdigest()[:16]}.so"
        return Emulated(ctypes.CDLL(str(built(target, [*flags, written(target.with_suffix(".cpp"), entry)]))))

    return load
