"""Run resident.cu on the CPU: compiled by g++ with emulated.hpp, given the arguments of a real launch."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path

from batchnorm.ops.cuda import resident

HERE = Path(__file__).parent
SOURCE = Path(resident.__file__).parent / "resident.cu"
ENTRY = """
#include "{source}"
template <class T> T& argument(void** all, int i) {{ return *(T*)all[i]; }}
extern "C" void run(unsigned programs, void** a) {{ launch(programs, [&] {{ {call}; }}); }}
"""


def call_of(name):
    """The kernel's call, its pointers by type as declared."""
    text = SOURCE.read_text()
    declared = text[text.index(f" {name}(") :].split("(", 1)[1].split(") {", 1)[0]
    types = [" ".join(one.split()).rpartition(" ")[0] for one in declared.split(",")]
    return f"{name}({', '.join(f'argument<{t}>(a, {i})' for i, t in enumerate(types))})"


class Emulated:
    """What nvrtc.Kernel is on a device."""

    def __init__(self, library):
        self.run = library.run

    def __call__(self, programs, arguments, stream):
        self.run(programs, arguments)


def compiler(folder):
    """Return what stands in for nvrtc.load, keeping what it compiles in a folder."""

    @cache
    def load(file, name, definitions, threads, shared, device):
        assert file == SOURCE.name
        target = folder / f"{name}-{abs(hash(definitions))}"
        target.with_suffix(".cpp").write_text(ENTRY.format(source=SOURCE, call=call_of(name)))
        flags = [f"-D{key}={value}" for key, value in definitions]
        flags += [f'-DEMULATED="{HERE / "emulated.hpp"}"', "-Wno-unknown-pragmas", "-ffp-contract=off"]
        command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", *flags]
        subprocess.run([*command, target.with_suffix(".cpp"), "-o", target.with_suffix(".so")], check=True)
        return Emulated(ctypes.CDLL(str(target.with_suffix(".so"))))

    return load
