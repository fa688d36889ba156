"""``python -m batchnorm``, and ``torchrun -m batchnorm``."""

import sys

from .cli import main

sys.exit(main())
