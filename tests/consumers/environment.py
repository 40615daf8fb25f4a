"""The environment of the consumers: `.consumers/` (280 MB), made once for a table of packages.

    python -m tests.consumers.environment

Owns the table of what is installed, and the folder.
"""

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / ".consumers"
STAMP = HOME / "stamp"
PYTHON = HOME / "bin" / "python"
INSTALLS: tuple[tuple[str, ...], ...] = (
    ("radixview==0.1.0", "pydantic", "uvloop"),
    # Its dependencies are those of a whole serving stack; the indexer needs two of them.
    ("--no-deps", "ai-dynamo-runtime==1.6.1"),
)
"""Calls of pip, in order."""


def build() -> Path:
    """Make the environment if it is missing or out of date; returns its interpreter."""
    wanted = hashlib.sha256(repr((INSTALLS, sys.version)).encode()).hexdigest()
    with HOME.with_name(".consumers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (STAMP.is_file() and STAMP.read_text() == wanted):
            shutil.rmtree(HOME, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(HOME)], check=True)
            for arguments in INSTALLS:
                subprocess.run(
                    [PYTHON, "-m", "pip", "-q", "--disable-pip-version-check", "install",
                     *arguments],
                    check=True,
                )  # fmt: skip
            STAMP.write_text(wanted)
    return PYTHON


if __name__ == "__main__":
    build()
