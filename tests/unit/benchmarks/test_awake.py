"""What keeps a core awake gives way to all else, and ends with whoever wanted it."""

import os
import time
from contextlib import ExitStack

from benchmarks.awake import keep_awake

DEADLINE_S = 20.0


def spinners() -> dict[int, int]:
    """Children that run when nothing else does, with the core each is bound to."""
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as listed:
        children = [int(child) for child in listed.read().split()]
    return {
        child: min(os.sched_getaffinity(child))
        for child in children
        if os.sched_getscheduler(child) == os.SCHED_IDLE
    }


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
