"""``python -m batchnorm.reproduce.fig2``: the command without the packages that the ``batchnorm`` command needs."""

from __future__ import annotations

import sys
from typing import get_args

from ..planned.plain import call, parser_of
from .command import Fig2, fig2
from .plan import Group


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = parser_of(Fig2)
    parser.add_argument("--group", nargs="+", default=(), choices=get_args(Group))
    return call(fig2, Fig2(**vars(parser.parse_args(arguments))))


if __name__ == "__main__":
    sys.exit(main())
