"""Options of one run, all drawn from its seed: sizes, speeds and the rates of every fault.

Owns the drawing. The same seed gives the same options on every machine; `without` and `smaller`
make the variants that the shrinker tries.
"""

from __future__ import annotations

import random
from typing import Final

import msgspec

FAULTS: Final = (
    "loss",
    "duplicate",
    "late",
    "full",
    "reconnect",
    "crash",
    "stop",
    "daemon_restart",
    "daemon_stop",
    "mover_death",
    "mover_stop",
    "give_up",
    "orphan",
    "copy_failure",
    "copy_slow",
    "forward_slow",
    "abort",
    "retract",
    "flush_pool",
    "flush_host",
    "epoch_bump",
    "overshoot",
    "tight_deadlines",
    "dead_boot",
    "rank_lag",
)
"""Kinds of trouble. Each is on in about half of the seeds, at a rate drawn anew."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that one run depends on. Times are microseconds of simulated time."""

    seed: int
    modes: tuple[str, ...]
    layouts: tuple[str, ...]
    fingerprints: tuple[int, ...]
    pool_pages: tuple[int, ...]
    page_size: int
    layers: int
    host_pages: int
    segment_pages: int
    requests: int
    documents: int
    document_pages: int
    branches: int
    turns: float
    namespaces: int
    output_pages: int
    chunk_pages: int
    running_max: int
    waiting_max: int
    launched_max: int
    hold_locks: bool
    match_again: bool
    publish_early: float
    current_share: float
    check_every: int
    audit_every: int
    safety_us: int
    steps_max: int
    arrival_us: int
    forward_us: int
    network_us: int
    copy_us: int
    poll_us: int
    slice_bytes: int
    submissions_max: int
    call_ms: int
    restore_ms: int
    fence_ms: int
    misses_max: int
    live_us: int
    rates: dict[str, float]
    # Stored runs (regressions/) have none of what follows: a new option stands last, and its
    # default leaves everything as it was before there was one.
    kept_bytes: int = 0
    """Answers that the daemon keeps for a client (0: as many as the product does)."""
    portion: int = 0
    """Pages given up by one message, and requests in one part of a list (0: as the product)."""
    warm: float = 0.0
    """Share of the daemon's restarts that take the host tier up again (0: there is no journal)."""
    damage: float = 0.0
    """Share of those that find their journal damaged."""
    log_bytes: int = 0
    """Length of a log that is compacted (0: as the product)."""
    world_sizes: tuple[int, ...] = ()
    """Ranks of each scheduler (empty: one each)."""
    closed_a_step: int = 0
    """Leases and nodes of pools that have ended that one event takes out (0: as the product)."""
    page_damage: float = 0.0
    """Host pages that are found damaged, times a second. No seed draws it: tests ask for it."""

    @property
    def host_cells(self) -> int:
        """Length of the host tier: its pages have a shard for every rank."""
        return self.host_pages * self.layers * max(self.world_sizes, default=1)

    @property
    def segment_cells(self) -> int:
        """Length of a segment of the host tier."""
        return self.segment_pages * self.layers * max(self.world_sizes, default=1)

    def world_size(self, index: int) -> int:
        """Ranks of a scheduler."""
        return self.world_sizes[index] if self.world_sizes else 1

    def rate(self, fault: str) -> float:
        """Rate of a fault: a share of occasions, or (for faults in time) events a second."""
        return self.rates.get(fault, 0.0)

    def without(self, fault: str) -> Options:
        """The same without one kind of fault."""
        rates = {name: rate for name, rate in self.rates.items() if name != fault}
        return msgspec.structs.replace(self, rates=rates)

    def smaller(self, *, schedulers: int | None = None, requests: int | None = None) -> Options:
        """The same with only the first schedulers, or with fewer requests."""
        count = len(self.modes) if schedulers is None else schedulers
        return msgspec.structs.replace(
            self,
            modes=self.modes[:count],
            layouts=self.layouts[:count],
            fingerprints=self.fingerprints[:count],
            pool_pages=self.pool_pages[:count],
            world_sizes=self.world_sizes[:count],
            requests=self.requests if requests is None else requests,
        )

    def lines(self) -> list[str]:
        """Name and value of every option, one a line."""
        facts = msgspec.to_builtins(self)
        return [f"{name} = {value}" for name, value in facts.items()]


def draw(seed: int) -> Options:
    """Draw all options of a seed."""
    rng = random.Random(f"{seed}/options")
    count = rng.choice((1, 2, 2, 2, 3, 3, 4, 5, 6, 8))
    all_modes = rng.choice(("mixed", "mixed", "mirrored", "thin"))
    modes = tuple(
        rng.choice(("mirrored", "thin")) if all_modes == "mixed" else all_modes
        for _ in range(count)
    )
    page_size = rng.choice((1, 1, 2, 3, 4, 8, 16))
    document_pages = rng.choice((2, 3, 5, 8, 12))
    output_pages = rng.choice((0, 1, 2, 3))
    longest = document_pages + output_pages + 2
    tightness = rng.choice((1.0, 1.2, 1.6, 3.0))
    pool_pages = tuple(
        max(longest, round(longest * tightness * rng.uniform(0.8, 1.6))) for _ in range(count)
    )
    total_pages = sum(pool_pages)
    shares = (0.0, 0.15, 0.5, 1.0, 1.0, 2.0, 2.0)
    host_pages = int(rng.choice(shares) * total_pages)
    return Options(
        seed=seed,
        modes=modes,
        layouts=tuple(rng.choice(("layer_first", "page_first")) for _ in range(count)),
        fingerprints=tuple(
            int(rng.random() < 0.2) if rng.random() < 0.4 else 0 for _ in range(count)
        ),
        pool_pages=pool_pages,
        page_size=page_size,
        layers=rng.choice((1, 1, 2, 3)),
        host_pages=host_pages,
        segment_pages=rng.choice((3, 8, 64)),
        requests=rng.choice((80, 120, 160)) // count + 2,
        documents=rng.choice((1, 2, 4, 6)),
        document_pages=document_pages,
        branches=rng.choice((1, 2, 4)),
        turns=rng.choice((0.0, 0.3, 0.7)),
        namespaces=rng.choice((1, 1, 2, 4)),
        output_pages=output_pages,
        chunk_pages=rng.choice((1, 2, 4, 16)),
        running_max=rng.choice((1, 2, 3, 5)),
        waiting_max=rng.choice((1, 2, 4)),
        launched_max=rng.choice((1, 2, 2)),
        hold_locks=rng.random() < 0.5,
        match_again=rng.random() < 0.5,
        publish_early=rng.choice((0.0, 0.5, 1.0)),
        current_share=rng.choice((0.0, 0.3, 0.7)),
        check_every=rng.choice((2, 10, 40, 100)),
        audit_every=rng.choice((3, 15, 60, 200)),
        safety_us=rng.choice((1_000_000, 3_000_000)),
        steps_max=40_000,
        arrival_us=rng.choice((3_000, 10_000, 30_000)),
        forward_us=rng.choice((500, 3_000, 20_000)),
        network_us=rng.choice((50, 300, 3_000)),
        copy_us=rng.choice((200, 4_000, 30_000)),
        poll_us=rng.choice((200, 1_000, 3_000)),
        slice_bytes=rng.choice((1, 2, 8, 1_000)),
        submissions_max=rng.choice((1, 2, 4)),
        call_ms=rng.choice((900, 2_000)),
        restore_ms=rng.choice((2_000, 20_000)),
        fence_ms=rng.choice((200, 5_000)),
        misses_max=rng.choice((1, 3)),
        live_us=rng.choice((50_000, 300_000, 1_000_000)),
        rates=_draw_rates(rng),
        # Drawn last, so that a seed keeps what it drew before there were these.
        kept_bytes=rng.choice((0, 0, 1, 60, 300)),
        portion=rng.choice((0, 0, 1, 2, 5)),
        warm=rng.choice((0.0, 0.5, 0.9, 1.0)),
        damage=rng.choice((0.0, 0.0, 0.5)),
        log_bytes=rng.choice((0, 600, 3_000)),
        world_sizes=_draw_ranks(rng, count),
        closed_a_step=rng.choice((0, 1, 1, 3)),
    )


def _draw_ranks(rng: random.Random, count: int) -> tuple[int, ...]:
    """One seed in three has groups; a group shares with groups of its own size only."""
    if rng.random() < 0.67:
        return ()
    most = rng.choice((2, 2, 3))
    return tuple(most if rng.random() < 0.7 else 1 for _ in range(count))


def _draw_rates(rng: random.Random) -> dict[str, float]:
    if rng.random() < 0.1:
        return {}
    calm = rng.choice((0.15, 0.5, 0.8))
    rates: dict[str, float] = {}
    for fault in FAULTS:
        rate = 10 ** rng.uniform(-2.5, -0.7)
        if fault in IN_TIME:
            rate = 10 ** rng.uniform(-0.5, 0.9)
        if rng.random() < calm:
            rates[fault] = round(rate, 5)
    return rates


IN_TIME: Final = (
    "reconnect",
    "crash",
    "stop",
    "daemon_restart",
    "daemon_stop",
    "mover_death",
    "mover_stop",
    "give_up",
    "flush_pool",
    "flush_host",
    "epoch_bump",
)
"""Faults in time: events a second over the whole node; the others are shares of occasions."""
