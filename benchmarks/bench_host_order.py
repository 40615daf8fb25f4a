"""Which page the host tier gives up first: block hits of real requests under several orders.

    python -m benchmarks.bench_host_order TRACE [--users N] [--requests N] [--coarse N]

Owns a model, not the daemon: `schedulers` pools that evict least recently used leaves, one host
tier behind them with write-through backups, random routing. A prompt hits what its own pool holds
and beyond that what the tier or another pool has. A leaf at the tier that no pool holds too (the
only copy) goes before a copy of what a pool has unless `spared` of its age is more than the copy's:
0 gives up copies first whatever their age, 1 is least recently used alone.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Final

import click

from benchmarks.report import table
from directory.analytics.conversations import LoopOptions
from directory.analytics.record import Access
from directory.analytics.source import Source
from directory.analytics.traces import BlockOptions

SPARED: Final = (0.0, 0.1, 0.25, 0.5, 1.0)
POOLS: Final = (0.01, 0.03)
"""All pools together, of the different blocks."""
TIERS: Final = (0.5, 1.0, 2.0, 4.0)
"""The tier, in all pools together."""
SEED: Final = 7
COPY, ONLY = 0, 1

Entry = tuple[int, int, int]
"""Last use, minus depth, block."""


class Block:
    """A block at the tier."""

    __slots__ = ("above", "below", "depth", "tick")

    def __init__(self, above: int | None, depth: int, tick: int) -> None:
        self.above = above
        self.below = 0
        self.depth = depth
        self.tick = tick


class Tier:
    """The host tier. `pools_of`: how many pools hold a block, where any does."""

    def __init__(self, room: int, spared: float, pools_of: dict[int, int]) -> None:
        self.room = room
        self.spared = spared
        self.blocks: dict[int, Block] = {}
        self._pools_of = pools_of
        self._leaves: tuple[list[Entry], list[Entry]] = ([], [])

    def use(self, path: Iterable[int], tick: int) -> None:
        """Mark what of a path is here as used."""
        for name in path:
            block = self.blocks.get(name)
            if block is None:
                return
            block.tick = tick

    def file(self, name: int) -> None:
        """A block may have become a leaf, or a copy, or the only copy."""
        block = self.blocks.get(name)
        if block is not None and not block.below:
            entry = (block.tick, -block.depth, name)
            heappush(self._leaves[ONLY if name not in self._pools_of else COPY], entry)

    def back_up(self, path: Sequence[int], tick: int) -> None:
        """Take what of a path is not here yet."""
        for depth, name in enumerate(path):
            if name in self.blocks:
                continue
            above = path[depth - 1] if depth else None
            if above is not None:
                self.blocks[above].below += 1
            while len(self.blocks) >= self.room:
                if not self._give_up(tick):
                    if above is not None:
                        self.blocks[above].below -= 1
                        self.file(above)
                    return
            self.blocks[name] = Block(above, depth, tick)
            self.file(name)

    def _give_up(self, now: int) -> bool:
        copy, only = self._head(COPY), self._head(ONLY)
        if copy is None and only is None:
            return False
        if copy is None or (only is not None and now - copy[0] < self.spared * (now - only[0])):
            copy = only
            heappop(self._leaves[ONLY])
        else:
            heappop(self._leaves[COPY])
        assert copy is not None
        gone = self.blocks.pop(copy[2])
        if gone.above is not None:
            self.blocks[gone.above].below -= 1
            self.file(gone.above)
        return True

    def _head(self, kind: int) -> Entry | None:
        leaves = self._leaves[kind]
        while leaves:
            tick, depth, name = leaves[0]
            block = self.blocks.get(name)
            if block is None or block.below or (name not in self._pools_of) != kind:
                heappop(leaves)
            elif block.tick != tick:
                heappop(leaves)
                heappush(leaves, (block.tick, depth, name))
            else:
                return leaves[0]
        return None


def hits(
    paths: Sequence[Sequence[int]], schedulers: int, pool: int, tier: int, spared: float
) -> tuple[float, float]:
    """Block hit ratio: in all, and out of the tier or another pool."""
    pools: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(schedulers)]
    pools_of: dict[int, int] = {}
    host = Tier(tier, spared, pools_of)
    draw = random.Random(SEED)
    asked = own = beyond = 0
    for tick, whole in enumerate(paths, 1):
        path = whole[:pool]
        mine = pools[draw.randrange(schedulers)]
        asked += len(path)
        held = next((n for n, name in enumerate(path) if name not in mine), len(path))
        more = held
        while more < len(path) and (path[more] in host.blocks or path[more] in pools_of):
            more += 1
        own += held
        beyond += more - held
        host.use(path[:more], tick)
        # The root last: what is evicted first is the end of the path used longest ago.
        for name in reversed(path):
            if name in mine:
                mine.move_to_end(name)
            else:
                mine[name] = None
                pools_of[name] = pools_of.get(name, 0) + 1
                host.file(name)
        while len(mine) > pool:
            name, _ = mine.popitem(last=False)
            if pools_of[name] == 1:
                del pools_of[name]
                host.file(name)
            else:
                pools_of[name] -= 1
        host.back_up(path, tick)
    return (own + beyond) / asked, beyond / asked


def read(trace: Path, requests: int | None, users: int, coarse: int) -> list[list[int]]:
    """The prompts as paths of blocks: every `coarse`-th of a prompt's."""
    options = BlockOptions(limit=requests)
    source = Source(trace, options=options, loop=LoopOptions(users=users))
    paths = []
    for frame in source.frames():
        if isinstance(frame, Access):
            whole = frame.path
            paths.append([whole[n] for n in range(coarse - 1, len(whole), coarse)])
    return [path for path in paths if path]


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, exists=True))
@click.option("--requests", type=int)
@click.option("--users", default=32, show_default=True, help="Of a trace of conversations.")
@click.option("--coarse", default=1, show_default=True, help="Blocks of the trace that are one.")
@click.option("--schedulers", default=4, show_default=True)
@click.option("--pools", multiple=True, type=float, default=POOLS, show_default=True)
def main(
    trace: Path,
    requests: int | None,
    users: int,
    coarse: int,
    schedulers: int,
    pools: tuple[float, ...],
) -> None:
    """One row a size of pools and tier, one column an order."""
    paths = read(trace, requests, users, coarse)
    different = len({name for path in paths for name in path})
    click.echo(f"{len(paths):,} requests, {different:,} different blocks, {schedulers} schedulers")
    rows: list[list[object]] = []
    for share in pools:
        pool = max(8, round(share * different / schedulers))
        for times in TIERS:
            found = [
                hits(paths, schedulers, pool, round(times * pool * schedulers), spared)
                for spared in SPARED
            ]
            cells = [f"{100 * whole:.2f} ({100 * beyond:.2f})" for whole, beyond in found]
            rows.append([f"{share:.3f}", f"{pool:,}", times, *cells])
            click.echo(str(rows[-1]), err=True)
    click.echo(table(["pools", "blocks each", "tier", *(str(s) for s in SPARED)], rows))


if __name__ == "__main__":
    main()
