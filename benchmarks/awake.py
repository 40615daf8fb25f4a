"""Cores that do not fall asleep: something that gives way to all else runs on each.

Owns the processes that do so. Where a core sleeps between two things, its waking up is the larger
part of what a seldom asked question takes, and whatever keeps it awake a little longer seems to
make things faster.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack

PROGRAM = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent = int(sys.argv[2])
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""


def keep_awake(stack: ExitStack, cores: Iterable[int]) -> None:
    """Keep these cores awake until the stack is unwound."""
    for core in cores:
        command = [sys.executable, "-c", PROGRAM, str(core), str(os.getpid())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.kill)
