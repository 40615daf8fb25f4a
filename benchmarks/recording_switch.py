"""A daemon beside itself: what is told of it on for a moment, off for another, in random order.

Owns the paced load and one start of it. Two daemons that run the same program differ by more than
what is measured, for where their memory lies, and more starts than there is time for would be
needed to see through that; so here is one daemon, of which log, events and metrics are taken off
and put on again (switched_daemon.py). A turn is a moment, for the speed of a machine drifts: a
round is many of them, in random order, and its matches are compared as one. What is on does its
work as often as if it had been on all the time. Requests end all the time, off or on; scheduler and
daemon have a core each and come before all else, and whoever publishes is stopped while it is off.
"""

from __future__ import annotations

import math
import mmap
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Final

from benchmarks.alternating import RESAMPLES, SURE_PERCENT, Ratio, Start
from benchmarks.recording_sides import (
    ENDS_AT_ONCE,
    SIDES,
    Found,
    Paced,
    Part,
    Side,
    Told,
    kept_by,
    pin,
    places_for,
    subscribe,
)
from benchmarks.switched_daemon import (
    COUNT,
    COUNT_AT,
    FILE_BYTES,
    IS_AT,
    LOOK,
    OFF,
    ON,
    SETTLED,
    WANTED_AT,
)

GAP_S: Final = 0.005
"""A match comes within so long of the request's end before it; then the next request ends."""
TIMES: Final = 20
"""Matches of a turn that count: a twentieth of a second."""
WAKING_TIMES: Final = 2
"""Matches before them: the switch is over by then."""
TURNS: Final = 6
"""Turns a side has in a round."""
SETTLING_TIMES: Final = 600
"""Matches before a round, some two seconds of them: an empty queue is worked off at once, while
one that has what a load leaves in it is broken off again and again, as ever by then."""
WARM_ROUNDS: Final = 2
"""Rounds that do not count: the first seconds of a daemon are slower ones."""
SEEN_S: Final = 0.0002
"""So often it is looked whether a state has been reached, and..."""
LOOK_EVERY_S: Final = 0.05
"""...so often the daemon is woken to look: what it does then counts as being asked by somebody."""
SETTLED_S: Final = 20.0
PUBLISHERS: Final = (b"directory.daemon.kv_main", b"directory.daemon.metrics_main")


class SwitchedSide(Side):
    """One daemon with all that is told of it on or off."""

    def __init__(self, stack: ExitStack, on: Told) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="t"))
        place = Path(folder) / "switch"
        place.write_bytes(bytes([ON, ON]).ljust(FILE_BYTES, b"\0"))
        with place.open("r+b") as file:
            self._file = stack.enter_context(mmap.mmap(file.fileno(), FILE_BYTES))
        super().__init__(
            stack,
            *on.flags,
            scrape=on.scrape,
            program=("benchmarks.switched_daemon", str(place)),
        )
        self.each = 1
        self.cpu_us = dict.fromkeys(SIDES, 0.0)
        self.counted = dict.fromkeys(SIDES, 0)
        """Processor time of the daemon, and matches that count, by side."""
        self.turns = dict.fromkeys(SIDES, 0)
        """Turns by side. The pauses of a turn are those of the other sides' turn of that number."""
        self.after_work: list[float] = []
        self.shifts: list[float] = []
        """By round: of the matches with everything on the share that came right after other work,
        and by how much the median of all is above that of the others."""
        self.turn_of = ""
        """Whose turn it is, or was last."""
        self.counted_s = 0.0
        self._seen: list[tuple[float, bool]] = []
        self._on = on
        self._publishers = [child for child in self.children() if _publishes(child)]

    def round(self, order: random.Random) -> dict[str, list[float]]:
        """Microseconds of each of some matches by side, whose turns are mixed."""
        self.settle()
        with self.before_all_else():
            for _ in range(SETTLING_TIMES):
                self._paced()
        found: dict[str, list[float]] = {side: [] for side in SIDES}
        self._seen.clear()
        for _ in range(TURNS):
            for side in order.sample(SIDES, len(SIDES)):
                found[side] += self.switched_turn(side)
        others = [us for us, after in self._seen if not after]
        self.after_work.append(1 - len(others) / len(self._seen))
        self.shifts.append(statistics.median(found["on"]) / statistics.median(others) - 1)
        return found

    def switched_turn(self, side: str) -> list[float]:
        """Microseconds of each of a few matches, with everything on or off."""
        on = side == "on"
        self.turn_of = side
        self.turns[side] += 1
        self.chance = random.Random(self.turns[side])
        told_before = self.told
        self._put(on=on)
        with self.before_all_else():
            for _ in range(WAKING_TIMES):
                self._paced()
            begun, used_us = time.monotonic(), self.daemon.cpu_us()
            taken, worked = [], [self._worked()]
            for _ in range(TIMES):
                taken.append(self._paced())
                worked.append(self._worked())
            self.cpu_us[side] += self.daemon.cpu_us() - used_us
        self.counted_s += time.monotonic() - begun
        self.counted[side] += TIMES
        if on:
            after = [before != now for before, now in pairwise(worked)]
            self._seen += zip(taken, after, strict=True)
        else:
            self.told = told_before  # nobody was told of these
        return taken

    def settle(self) -> None:
        """Everything on, and nothing waits."""
        self._put(on=True)
        self._want(SETTLED)
        self._want(ON)

    def _worked(self) -> int:
        times: int = COUNT.unpack_from(self._file, COUNT_AT)[0]
        return times

    def _paced(self) -> float:
        return self.match(self.chance.random() * GAP_S)

    def _put(self, *, on: bool) -> None:
        self.paths = on and self._on.folder is not None
        self.scrape = self._on.scrape if on else ""
        if on:
            self._signal_publishers(signal.SIGCONT)
            self._want(ON)
        else:
            self._want(OFF)
            self._signal_publishers(signal.SIGSTOP)

    def _want(self, state: int) -> None:
        self._file[WANTED_AT] = state
        give_up = time.monotonic() + SETTLED_S
        again = 0.0
        while self._file[IS_AT] != state:
            now = time.monotonic()
            if now > give_up:
                raise RuntimeError(f"the daemon does not come to state {state}")
            if now > again:
                self.daemon.process.send_signal(LOOK)
                again = now + LOOK_EVERY_S
            time.sleep(SEEN_S)

    def _signal_publishers(self, number: signal.Signals) -> None:
        for child in self._publishers:
            os.kill(child, number)


def measure(rounds: int, seed: int, parts: Collection[Part]) -> Found:
    """One start of a daemon under the paced load."""
    with ExitStack() as stack:
        on = places_for(stack, parts)
        side = SwitchedSide(stack, on)
        subscriber = subscribe(stack, on.events)
        pin(stack, [side], subscriber)
        for _ in range(ENDS_AT_ONCE):
            side.end()
        order = random.Random(seed)
        found = [side.round(order) for _ in range(WARM_ROUNDS + rounds)][WARM_ROUNDS:]
        cpu = {name: side.cpu_us[name] / side.counted[name] for name in SIDES}
        side.settle()
        kept = kept_by(side, on.folder, subscriber)
        paced = Paced(
            sum(side.counted.values()) / side.counted_s,
            statistics.fmean(side.after_work),
            statistics.fmean(side.shifts),
        )
    return Found(found, kept, cpu, paced)


def _publishes(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return any(program in command for program in PUBLISHERS)


def compare_by_round(starts: Sequence[Start], side: str, *bases: str, seed: int = 1) -> Ratio:
    """One side to others, taken together: the mean of the middle half of the rounds' ratios of
    medians. A round is over in seconds and all of it is one daemon's, so they are compared one by
    one; in a few of them the machine did something else meanwhile. The interval is that of a
    bootstrap of starts, and of rounds within them."""
    ratios = [
        [
            math.log(
                statistics.median(found[side])
                / statistics.geometric_mean(statistics.median(found[base]) for base in bases)
            )
            for found in start
        ]
        for start in starts
    ]
    chance = random.Random(seed)
    seen = sorted(
        _middle(
            [
                ratio
                for rounds in chance.choices(ratios, k=len(ratios))
                for ratio in chance.choices(rounds, k=len(rounds))
            ]
        )
        for _ in range(RESAMPLES)
    )
    tail = RESAMPLES * (100 - SURE_PERCENT) // 200
    whole = _middle([ratio for rounds in ratios for ratio in rounds])
    return Ratio(whole, seen[tail], seen[-1 - tail])


def _middle(ratios: list[float]) -> float:
    """`ratios`: logarithms."""
    cut = len(ratios) // 4
    return math.exp(statistics.fmean(sorted(ratios)[cut : len(ratios) - cut]))
