"""What gaps between tokens to expect beside prompts that come at a pace: SGLang's loop, played.

    python -m benchmarks.sglang_gpu.gaps_model [--pass-ms 22]

Owns a model of one engine's loop, in milliseconds: whoever of the queue can be admitted is computed
in one pass before anything decodes, else what decodes has a step. A prompt can be admitted at once
(its prefix is in the pool, or loaded within the pass), or when a restore over a bus that takes one
at a time has landed, which is seen between two batches. It measures nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from benchmarks.report import table

Kind = Literal["none", "held", "stepped", "within"]
"""Moves nothing; restores while a prompt is held back; the same, and what decodes has a step before
a restored prompt is computed (offers.py); loads within the pass, as HiCache does."""
KINDS: Final[tuple[Kind, ...]] = ("none", "held", "stepped", "within")
STEP_MS: Final = 4.8
BESIDE: Final = 1.03
"""A step beside a copy, times one alone (bench_copy)."""
RESTORE_MS: Final = 20.5
LANDING_MS: Final = 0.4
ANSWER_MS: Final = 0.5
LOAD_MS: Final = 4.5
"""Of HiCache's thread, a load (`init_load_back` in the results)."""
MORE_MS: Final = 1.0
"""Of a pass, for each prompt but the first."""
PACES: Final = (2.0, 1.5, 1.3, 1.1, 1.05, 1.0)
"""Times what a pass over one prompt and a step take."""
SPREAD: Final = (0.94, 1.09)
"""Of passes."""
SECONDS: Final = 30.0


@dataclass
class Engine:
    """One engine and what waits for it; all times in ms."""

    kind: Kind
    pass_ms: float
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    now: float = 0.0
    bus_free: float = 0.0
    bus_busy: float = 0.0
    waiting: int = 0
    asked: list[float] = field(default_factory=list)
    landing: list[float] = field(default_factory=list)
    passed: bool = False
    tokens: list[float] = field(default_factory=list)
    computed: int = 0

    def loop(self) -> None:
        """One batch: a pass if anybody can be admitted, else a step."""
        count = self._admitted()
        self.passed = count > 0
        self.computed += count
        if not count:
            beside = BESIDE if self.bus_free > self.now else 1.0
            self.now += STEP_MS * beside * self.draw.uniform(0.99, 1.02)
            self.tokens.append(self.now)
            return
        took = (self.pass_ms + MORE_MS * (count - 1)) * self.draw.uniform(*SPREAD)
        if self.kind == "within":
            took = LOAD_MS * count + max(took, RESTORE_MS * count)
            self.bus_busy += RESTORE_MS * count
        self.now += took

    def _admitted(self) -> int:
        """Who is computed now. Restores are asked for, sent and seen between two batches."""
        if self.kind in ("none", "within"):
            count, self.waiting = self.waiting, 0
            return count
        ready = [at for at in self.landing if at <= self.now]
        for at in [at for at in self.asked if at <= self.now]:
            self.asked.remove(at)
            self.bus_free = max(self.bus_free, self.now + ANSWER_MS) + RESTORE_MS
            self.bus_busy += RESTORE_MS
            self.landing.append(self.bus_free + LANDING_MS)
        self.asked += [self.now + ANSWER_MS] * self.waiting
        self.waiting = 0
        if self.kind == "stepped" and self.passed:
            return 0
        self.landing = [at for at in self.landing if at not in ready]
        return len(ready)


@dataclass(frozen=True)
class Expected:
    """What came of it. `bus`: the part of the time in which it is busy."""

    p50: float
    p99: float
    bus: float
    tokens: int


def play(kind: Kind, every_ms: float, pass_ms: float, seconds: float = SECONDS) -> Expected | None:
    """So many seconds of prompts, one each so many ms; None where nothing decodes any more."""
    engine, due = Engine(kind, pass_ms), 0.0
    while engine.now < 1e3 * seconds:
        while due <= engine.now:
            engine.waiting += 1
            due += every_ms
        engine.loop()
    gaps = sorted(b - a for a, b in zip(engine.tokens, engine.tokens[1:], strict=False))
    if len(gaps) < seconds:
        return None
    return Expected(
        statistics.median(gaps), gaps[int(0.99 * len(gaps))], engine.bus_busy / engine.now,
        len(gaps),
    )  # fmt: skip


def full_ms(pass_ms: float) -> float:
    """What a pass over one prompt and a step take."""
    return pass_ms * statistics.fmean(SPREAD) + STEP_MS


def rows(paces: Sequence[float], pass_ms: float) -> list[list[str]]:
    """A row a pace: the bus of who moves something, then p50 / p99 of each kind."""
    found = []
    for pace in paces:
        every = pace * full_ms(pass_ms)
        played = {kind: play(kind, every, pass_ms) for kind in KINDS}
        bus = next(one.bus for one in (played["stepped"], played["held"]) if one is not None)
        cells = [
            f"{one.p50:.1f} / {one.p99:.1f}" if one else "nothing decodes"
            for one in played.values()
        ]
        found.append([f"{pace} ({every:.1f})", f"{bus:.2f}", *cells])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pass-ms", type=float, default=22.0)
    options = parser.parse_args()
    print(table(["pace (ms)", "bus", *KINDS], rows(PACES, options.pass_ms)))


if __name__ == "__main__":
    main()
