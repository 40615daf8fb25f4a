"""A process that ends with the one that started it, however that ends.

    python -m tests.sglang.tied MODULE ARGUMENTS...

Runs a module as `python -m` does. The tie is the kernel's, and outlives the exec. Runs in SGLang's
environments.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        raise SystemExit("the parent is gone")


if __name__ == "__main__":
    die_with_parent()
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:]])
