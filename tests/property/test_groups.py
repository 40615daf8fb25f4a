"""Groups under random pace: every rank of a group is told the same, and every byte is its own.

Strategy: two groups of two to four ranks run programs drawn in advance; a drawn schedule says which
rank does its next step and which shard of which copy ends, how. Ranks may be any number of steps
apart, shards end in any order that their fences allow. Every restored page is compared with the
rank's own shard of that path, and `check()` holds after every event. At rest all ranks of a group
have the same answers, free pages and spans.
"""

from __future__ import annotations

import random
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from directory.core.events import Mode, MoverLost, Outcome
from tests.unit.directory.core.ranks import Group, Step, evict, fetch, land, publish
from tests.unit.directory.core.world import World

STEPS = 14
PAGES = 6
OUTCOMES: tuple[Outcome, ...] = ("ok", "ok", "ok", "ok", "void", "failed")
Pace = Literal["any", "one ahead"]


def program(rng: random.Random) -> list[Step]:
    """Steps over few paths in small pools, so that pages are given up and filled again often."""
    steps: list[Step] = []
    for _ in range(STEPS):
        path = [rng.choice((1, 2)) for _ in range(rng.randrange(1, 4))]
        kind = rng.choice(("publish", "publish", "fetch", "fetch", "evict"))
        if kind == "publish":
            steps.append(publish(*path))
        elif kind == "evict":
            steps.append(evict(rng.randrange(1, PAGES)))
        else:
            steps += [fetch(*path), *([publish(7)] if rng.random() < 0.3 else []), land]
    return steps


def run(seed: int, ranks: int, modes: tuple[Mode, Mode], pace: Pace) -> World:
    """Run both groups' programs to their end and check them at rest."""
    rng = random.Random(seed)
    world = World(host_pages=rng.choice((0, 4, 16)) * ranks, segment_pages=4 * ranks)
    groups = [
        Group(world, name, ranks, mode, pages=PAGES) for name, mode in zip("gh", modes, strict=True)
    ]
    for group in groups:
        group.program = program(rng)
    # "one ahead": the same rank always leads and the others come long after it.
    weights = [1.0] * ranks if pace == "any" else [1.0] + [0.05] * (ranks - 1)
    while True:
        ready = [op for op in world.copies if world.ready(op)]
        unfinished = [g for g in groups if any(r.done < len(g.program) for r in g.ranks)]
        if not unfinished and not ready:
            break
        if ready and (not unfinished or rng.random() < 0.4):
            if rng.random() < 0.02:
                world.copies.clear()
                world.send(MoverLost(0))
            else:
                world.finish(rng.choice(ready), rng.choice(OUTCOMES))
            continue
        (rank,) = rng.choices(range(ranks), weights)
        rng.choice(unfinished).advance(rank)
    assert not world.copies
    for group in groups:
        group.check()
    assert not world.directory.tree.filling
    return world


@pytest.mark.timeout(600)
@given(
    seed=st.integers(0, 1 << 32),
    ranks=st.integers(2, 4),
    modes=st.sampled_from([("thin", "thin"), ("mirrored", "mirrored"), ("thin", "mirrored")]),
    pace=st.sampled_from(["any", "one ahead"]),
)
@settings(max_examples=150)
def test_all_ranks_see_the_same_answers_and_their_own_bytes_at_any_pace_f107(
    seed: int, ranks: int, modes: tuple[Mode, Mode], pace: Pace
) -> None:
    run(seed, ranks, modes, pace)


def test_the_runs_reach_what_they_are_about() -> None:
    total: dict[str, int] = {}
    for seed in range(40):
        for name, count in run(
            seed, 2, ("thin", "mirrored"), "one ahead"
        ).directory.counters.items():
            total[name] = total.get(name, 0) + count
    for name in ("host_pages_restored", "peer_pages_restored", "restores_lost", "backup_void"):
        assert total[name] > 0, total
