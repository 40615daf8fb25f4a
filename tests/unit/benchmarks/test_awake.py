"""What keeps a core awake gives way to all else, and ends with whoever wanted it."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress

from benchmarks.awake import before_all_else, keep_awake

DEADLINE_S = 60.0


def spinners() -> dict[int, int]:
    """Children that run when nothing else does, with the core each is bound to."""
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as listed:
        children = [int(child) for child in listed.read().split()]
    found = {}
    for child in children:
        with suppress(ProcessLookupError):  # an earlier test's, which ends just now
            if os.sched_getscheduler(child) == os.SCHED_IDLE:
                found[child] = min(os.sched_getaffinity(child))
    return found


def test_each_core_has_one_until_the_end() -> None:
    before = set(spinners())
    cores = sorted(os.sched_getaffinity(0))[:2]
    with ExitStack() as stack:
        keep_awake(stack, cores)
        give_up = time.monotonic() + DEADLINE_S
        while len(spinners().keys() - before) < len(cores) and time.monotonic() < give_up:
            time.sleep(0.01)
        mine = {child: core for child, core in spinners().items() if child not in before}
        assert sorted(mine.values()) == cores
    assert set(spinners()) == before


def test_a_process_has_a_core_before_all_else_and_what_it_starts_does_not() -> None:
    program = "import os, sys; sys.stdin.read(1); os.fork() or os._exit(os.sched_getscheduler(0)); "
    program += "os._exit(os.waitstatus_to_exitcode(os.wait()[1]))"
    core = max(os.sched_getaffinity(0))
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    try:
        before_all_else(process.pid, core)
        assert os.sched_getaffinity(process.pid) == {core}
        allowed = os.sched_getscheduler(process.pid) & ~os.SCHED_RESET_ON_FORK
        assert allowed in (os.SCHED_FIFO, os.SCHED_OTHER), "without the right to it, as before"
        process.communicate(b"x", DEADLINE_S)
        assert process.returncode == os.SCHED_OTHER
    finally:
        process.kill()
        process.wait()
