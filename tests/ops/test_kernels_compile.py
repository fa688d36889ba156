"""Test that kernels compile, which needs no GPU; Triton's interpreter also runs kernels that do not compile."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton's compiler")
def test_kernels_compile_for_hopper():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "compiled 72" in done.stdout
