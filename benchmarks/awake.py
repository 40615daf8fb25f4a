"""Cores that do not fall asleep, and processes that have one before all else.

Owns the processes that keep cores awake, by running where nothing else does; they give way all the
time: from one that only computes, a core may be taken no sooner than at the kernel's next tick,
milliseconds after somebody was woken there. Where a core sleeps
between two things, its waking up is the larger part of what a seldom asked question takes, and
whatever keeps it awake a little longer seems to make things faster.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import ExitStack, suppress

PROGRAM = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
parent, give_way = int(sys.argv[2]), os.sched_yield
while os.getppid() == parent:
    for _ in range(100_000):
        give_way()
"""


def keep_awake(stack: ExitStack, cores: Iterable[int]) -> None:
    """Keep these cores awake until the stack is unwound."""
    for core in cores:
        command = [sys.executable, "-c", PROGRAM, str(core), str(os.getpid())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.kill)


def before_all_else(pid: int, core: int, priority: int = 1) -> None:
    """Give a process a core for as long as it lives, before all else there of a lower priority,
    where that is allowed.

    What it starts later does not have that; its own threads do. The kernel stops those who have it
    where they never pause: 50 ms of each second.
    """
    for task in map(int, os.listdir(f"/proc/{pid}/task")):
        os.sched_setaffinity(task, {core})
        with suppress(PermissionError):
            policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
            os.sched_setscheduler(task, policy, os.sched_param(priority))
