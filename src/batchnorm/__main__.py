"""Run the command line as ``python -m batchnorm`` or ``torchrun -m batchnorm``."""

import atexit
import os
import sys

from .cli import main

if __name__ == "__main__":
    status = main()
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        # If a thread of torch.distributed needs Python while the interpreter shuts down, the process is aborted, and
        # torchrun reports that a finished run has failed. So leave out the interpreter's shutdown.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
