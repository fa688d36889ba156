"""Read a sitting's options by argparse: for machines without the packages that the ``batchnorm`` command needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ...errors import JobsFailedError, sentence
from .session import Sitting

Options = TypeVar("Options", bound=Sitting)


def parser_of(kind: type[Sitting]) -> argparse.ArgumentParser:
    """Return a parser of the options that all sittings have; a command adds its own.

    Beyond the paper: running it.
    """
    parser = argparse.ArgumentParser(description=kind.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "results", "plan"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--out", type=Path, default=kind.out)
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=kind.jobs)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--device", default=kind.device)
    parser.add_argument("--precision", default=kind.precision, choices=("auto", "bf16", "fp32"))
    parser.add_argument("--cache", default=kind.cache, choices=("none", "device"))
    parser.add_argument("--workers", type=int, default=kind.workers)
    parser.add_argument("--commit")
    return parser


def call(function: Callable[[Options], object], options: Options) -> int:
    """Call a command and return its exit status: 0, 1 with a sentence on what was wrong, 130 where it was stopped.

    Beyond the paper: running it.
    """
    try:
        function(options)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (JobsFailedError, OSError, ValueError) as error:
        print(f"{function.__name__}: {sentence(error)}", file=sys.stderr)
        return 1
    return 0
