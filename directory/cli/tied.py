"""Run a `treecored` command that ends with its parent: `python -m directory.cli.tied PARENT ARGS`.

Owns the parent-death signal of the process it runs in. A driver that is killed cannot clean up
after itself; the kernel then asks its daemon to shut down. It must do nothing else.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tie_to(parent: int) -> bool:
    """Ask for SIGTERM at the parent's death; say whether that parent still lives."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    return os.getppid() == parent


def main(arguments: list[str]) -> None:
    """Tie this process to its parent, then run the command line."""
    if not tie_to(int(arguments[0])):
        raise SystemExit(1)
    from directory.cli.main import app

    app(args=arguments[1:], prog_name="treecored")


if __name__ == "__main__":
    main(sys.argv[1:])
