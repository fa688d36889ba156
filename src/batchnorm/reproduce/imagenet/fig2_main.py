"""``python -m batchnorm.reproduce.imagenet.fig2_main``: the command without the packages that ``batchnorm`` needs."""

from __future__ import annotations

import sys
from typing import get_args

from .fig2 import Fig2, fig2
from .fig2_plan import Group
from .plain import call, parser_of


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = parser_of(Fig2)
    parser.add_argument("--group", nargs="+", default=(), choices=get_args(Group))
    return call(fig2, Fig2(**vars(parser.parse_args(arguments))))


if __name__ == "__main__":
    sys.exit(main())
