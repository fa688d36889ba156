"""``python -m batchnorm.reproduce.fig2``: the command without the packages that the ``batchnorm`` command needs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import get_args

from ...errors import sentence
from .command import Fig2, fig2
from .plan import Group


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description=Fig2.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("data", "results", "plan"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--out", type=Path, default=Fig2.out)
    parser.add_argument("--group", nargs="+", default=(), choices=get_args(Group))
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=Fig2.jobs)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--device", default=Fig2.device)
    parser.add_argument("--precision", default=Fig2.precision, choices=("auto", "bf16", "fp32"))
    parser.add_argument("--cache", default=Fig2.cache, choices=("none", "device"))
    parser.add_argument("--workers", type=int, default=Fig2.workers)
    parser.add_argument("--commit")
    try:
        fig2(Fig2(**vars(parser.parse_args(arguments))))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"fig2: {sentence(error)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
