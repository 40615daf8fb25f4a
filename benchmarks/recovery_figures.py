"""What bench_recovery finds out: the figures of each question, and the targets among them.

Owns names, units and limits; it measures nothing. The names stand in the JSON, all beside each
other: no two questions have one in common.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from benchmarks.recovery_node import Ticks
from benchmarks.report import percentile

GONE_MS_MAX: Final = 100.0
WARM_HIT_S_MAX: Final = 5.0
PAGES_BACK_MIN: Final = 0.999
REPUBLISH_S_MAX: Final = 2.0
TICK_MS_P999_MAX: Final = 5.0
TICK_TIMES_CONTROL_MAX: Final = 3.0


class Target(NamedTuple):
    """One line of the verdict."""

    name: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        """Whether the target is met."""
        return self.value >= self.limit if self.at_least else self.value <= self.limit


class Deaths(msgspec.Struct, frozen=True):
    """Milliseconds from a scheduler's SIGKILL until the daemon has nothing of it."""

    scheduler_gone_ms_p99: float
    scheduler_gone_ms_p50: float
    scheduler_kills: int

    def targets(self) -> list[Target]:
        """Every target beside what was measured."""
        return [Target("scheduler_gone_ms_p99", self.scheduler_gone_ms_p99, GONE_MS_MAX)]


class Mirror(msgspec.Struct, frozen=True):
    """Milliseconds from the daemon's SIGKILL to an answer of the mirror: the longest of all
    rounds. `hung`: from its SIGSTOP."""

    mirror_answer_ms: float
    mirror_answer_hung_ms: float
    deadline_ms: float
    mirror_rounds: int

    def targets(self) -> list[Target]:
        """Every target beside what was measured."""
        return [Target("mirror_answer_ms", self.mirror_answer_ms, self.deadline_ms)]


class WarmStarts(msgspec.Struct, frozen=True):
    """Seconds from the start of a daemon's process until it was ready, and until the first warm
    page was in a pool (the longest of all rounds); the least share of pages that was back."""

    warm_hit_s: float
    pages_back: float
    warm_starts_s: tuple[float, ...]
    warm_ready_s: tuple[float, ...]
    host_tier_bytes: int
    host_page_bytes: int
    host_pages: int

    def targets(self) -> list[Target]:
        """Every target beside what was measured."""
        return [
            Target("warm_hit_s", self.warm_hit_s, WARM_HIT_S_MAX),
            Target("pages_back", self.pages_back, PAGES_BACK_MIN, at_least=True),
        ]


class Returns(msgspec.Struct, frozen=True):
    """A full pool that a new daemon is told of (`republish_s`: the longest of all rounds), and the
    ticks of its scheduler meanwhile, all rounds together, beside those of the idle control.

    `cpu`: what the scheduler's thread had of a core. Of the longest tick of each round: `waited`,
    how long another thread had the core that it could have used (None where the kernel does not
    say); what is neither is the machine's beneath. `in_ticks`: all ticks together. `stolen`: what
    the machine beneath took from the cores that may be used, by the kernel's own account, in
    hundredths of a second; ticks and waits together.
    """

    republish_s: float
    tick_ms_p999: float
    tick_ms_max: float
    control_tick_ms_p999: float
    control_tick_ms_max: float
    tick_cpu_ms_p999: float
    tick_cpu_ms_max: float
    control_tick_cpu_ms_p999: float
    control_tick_cpu_ms_max: float
    tick_ms_p50: float
    control_tick_ms_p50: float
    tick_longest_ms: tuple[float, ...]
    tick_longest_cpu_ms: tuple[float, ...]
    tick_longest_waited_ms: tuple[float | None, ...]
    control_tick_longest_ms: tuple[float, ...]
    control_tick_longest_cpu_ms: tuple[float, ...]
    control_tick_longest_waited_ms: tuple[float | None, ...]
    republications_s: tuple[float, ...]
    controls_s: tuple[float, ...]
    ticks: int
    control_ticks: int
    in_ticks_ms: float
    control_in_ticks_ms: float
    stolen_ms: float
    control_stolen_ms: float
    pool_pages: int
    pool_spans: int

    def targets(self) -> list[Target]:
        """Every target beside what was measured."""
        limit = TICK_TIMES_CONTROL_MAX * self.control_tick_ms_max
        return [
            Target("republish_s", self.republish_s, REPUBLISH_S_MAX),
            Target("tick_ms_p999", self.tick_ms_p999, TICK_MS_P999_MAX),
            Target("tick_ms_max", self.tick_ms_max, limit),
        ]

    def lines(self) -> list[str]:
        """For the reader: what the longest tick of each round consisted of."""
        rounds = zip(
            self.tick_longest_ms, self.tick_longest_cpu_ms, self.tick_longest_waited_ms,
            self.control_tick_longest_ms, self.control_tick_longest_cpu_ms,
            self.control_tick_longest_waited_ms, strict=True,
        )  # fmt: skip
        told = ["longest tick of each round, ms (of a core, waited for one) beside the control's:"]
        told += [f"  {_parts(*of[:3])}   {_parts(*of[3:])}" for of in rounds]
        told.append(
            f"all ticks {self.in_ticks_ms:.4g} ms beside {self.control_in_ticks_ms:.4g}; "
            f"stolen from the cores {self.stolen_ms:.4g} ms in {sum(self.republications_s):.3g} s "
            f"beside {self.control_stolen_ms:.4g} in {sum(self.controls_s):.3g}"
        )
        return told


class Round(NamedTuple):
    """A return or its control: how many seconds it took, its ticks, and what was stolen (ms)."""

    seconds: float
    ticks: Ticks
    stolen_ms: float


def returns(rounds: list[Round], controls: list[Round], *, pages: int, spans: int) -> Returns:
    """The figures of all returns and of their controls."""
    ticks, control = _all(rounds), _all(controls)
    longest, control_longest = ([of.ticks.longest for of in each] for each in (rounds, controls))
    return Returns(
        republish_s=max(of.seconds for of in rounds),
        tick_ms_p999=percentile(ticks.wall_us, 99.9) / 1e3,
        tick_ms_max=max(ticks.wall_us) / 1e3,
        control_tick_ms_p999=percentile(control.wall_us, 99.9) / 1e3,
        control_tick_ms_max=max(control.wall_us) / 1e3,
        tick_cpu_ms_p999=percentile(ticks.cpu_us, 99.9) / 1e3,
        tick_cpu_ms_max=max(ticks.cpu_us) / 1e3,
        control_tick_cpu_ms_p999=percentile(control.cpu_us, 99.9) / 1e3,
        control_tick_cpu_ms_max=max(control.cpu_us) / 1e3,
        tick_ms_p50=percentile(ticks.wall_us, 50) / 1e3,
        control_tick_ms_p50=percentile(control.wall_us, 50) / 1e3,
        tick_longest_ms=tuple(tick.wall_us / 1e3 for tick in longest),
        tick_longest_cpu_ms=tuple(tick.cpu_us / 1e3 for tick in longest),
        tick_longest_waited_ms=tuple(_ms(tick.waited_us) for tick in longest),
        control_tick_longest_ms=tuple(tick.wall_us / 1e3 for tick in control_longest),
        control_tick_longest_cpu_ms=tuple(tick.cpu_us / 1e3 for tick in control_longest),
        control_tick_longest_waited_ms=tuple(_ms(tick.waited_us) for tick in control_longest),
        republications_s=tuple(of.seconds for of in rounds),
        controls_s=tuple(of.seconds for of in controls),
        ticks=len(ticks.wall_us),
        control_ticks=len(control.wall_us),
        in_ticks_ms=sum(ticks.wall_us) / 1e3,
        control_in_ticks_ms=sum(control.wall_us) / 1e3,
        stolen_ms=sum(of.stolen_ms for of in rounds),
        control_stolen_ms=sum(of.stolen_ms for of in controls),
        pool_pages=pages,
        pool_spans=spans,
    )


def _all(rounds: list[Round]) -> Ticks:
    together = Ticks([], [], [])
    for of in rounds:
        together.wall_us.extend(of.ticks.wall_us)
        together.cpu_us.extend(of.ticks.cpu_us)
        together.waited_us.extend(of.ticks.waited_us)
    return together


def _ms(us: float | None) -> float | None:
    return None if us is None else us / 1e3


def _parts(wall: float | None, cpu: float | None, waited: float | None) -> str:
    return f"{wall:.3f} ({cpu:.3f}, {'unknown' if waited is None else f'{waited:.3f}'})"
