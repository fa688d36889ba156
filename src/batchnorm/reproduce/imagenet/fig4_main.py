"""``python -m batchnorm.reproduce.imagenet.fig4_main``: the command without the packages that ``batchnorm`` needs."""

from __future__ import annotations

import sys
from pathlib import Path

from .fig4 import Fig4, fig4
from .plain import call, parser_of


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = parser_of(Fig4)
    parser.add_argument("--runs", nargs="+", type=Path, default=(), metavar="RUN")
    return call(fig4, Fig4(**vars(parser.parse_args(arguments))))


if __name__ == "__main__":
    sys.exit(main())
