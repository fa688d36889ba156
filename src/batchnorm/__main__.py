"""Run the command line as ``python -m batchnorm`` or ``torchrun -m batchnorm``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
