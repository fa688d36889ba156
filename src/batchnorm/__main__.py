"""``python -m batchnorm``, and ``torchrun -m batchnorm``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
