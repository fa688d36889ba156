"""Let Ctrl-C end the ``batchnorm`` command quietly while it imports torch, which takes about a second.

The package imports this module first, because torch is imported before the command's own code can run.
"""

from __future__ import annotations

import os
import signal
import sys
from itertools import pairwise
from pathlib import Path


def _is_command() -> bool:
    """Return whether this process was started as ``batchnorm`` or ``python -m batchnorm``.

    ``sys.argv`` is not enough: multiprocessing sets it in child processes, too.
    """
    program = sys.argv[0] if sys.argv else ""
    if program == "-m":  # the package that follows -m is being imported
        return ("-m", "batchnorm") in pairwise(sys.orig_argv)
    return Path(program).stem == "batchnorm" and program in sys.orig_argv[1:]


def _exit(*_: object) -> None:
    os._exit(130)


def raise_keyboard_interrupt() -> None:
    """From now on, let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# If the parent process made this process ignore Ctrl-C, leave that as it is.
if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _exit)
