"""The storm: random operations by several schedulers on one directory, from one seed.

Strategy: prompts come from a skewed tree of shared prefixes with unique tails (so that they share,
split and diverge), some of them in namespaces that are used once; pools and host tier are far too
small for them. Each operation is one step of one scheduler or the end of one copy. After every
operation the acting scheduler's pages are counted; every `check_every` operations the directory
and every mirror are walked; at the end everything is let go and accounted for. Node count and
memory are sampled: over a long run both have to level off. In the scenario "hot-prefix" every
prompt is one hot prefix and a suffix that never comes again.
"""

from __future__ import annotations

import os
import random
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal, NamedTuple

from directory.core.actions import AnyReply, SubmitCopy
from directory.core.events import Flush, Mode, Outcome
from directory.core.ids import HOST, PoolId
from directory.core.namespace import Fingerprint, NamespaceKey
from scheduler_shim.own_tree import MirroredTree
from scheduler_shim.request import Phase, Request
from tests.storm.actor import TOKENS_PER_PAGE, Actor, Prompt
from tests.storm.world import Violation, World

Scenario = Literal["mixed", "hot-prefix"]

SAMPLES: Final = 100
REQUESTS_PER_ACTOR_MAX: Final = 6
COPIES_MAX: Final = 64
NODES_MARGIN: Final = 0.10
MEMORY_MARGIN: Final = 0.05
MEMORY_MARGIN_BYTES: Final = 4 << 20
"""Noise of the allocator that no run is long enough to average out."""


class Sample(NamedTuple):
    """State after so many operations."""

    operations: int
    nodes: int
    spaces: int
    memory_bytes: int


class Storm:
    """One run. `figures` takes a line every `figures_every` operations."""

    def __init__(
        self,
        seed: int,
        *,
        operations: int,
        schedulers: int = 8,
        scenario: Scenario = "mixed",
        host_pages: int = 512,
        check_every: int = 5_000,
        figures: Callable[[str], None] = lambda _: None,
        figures_every: int = 100_000,
    ) -> None:
        self.chance = random.Random(seed)
        self.operations = operations
        self.check_every = check_every
        self.scenario = scenario
        self.world = World(host_pages)
        self.world.on_answer = self._on_answer
        self.world.on_copy_ended = self._on_copy_ended
        self.samples: list[Sample] = []
        self.did: dict[str, int] = {}
        self._figures = figures
        self._figures_every = figures_every
        self._unique = 1 << 20
        models = [Fingerprint(model=name, page_size=TOKENS_PER_PAGE) for name in ("one", "two")]
        self.actors: list[Actor] = []
        self._by_pool: dict[PoolId, Actor] = {}
        for number in range(schedulers):
            mode: Mode = "thin" if number % 2 else "mirrored"
            # Every fourth scheduler runs another model: it must share with its like only.
            model = models[number % 4 == 3]
            self._add(Actor(self.world, f"s{number}", mode, model.encode(), 64 + 32 * (number % 3)))

    def run(self) -> None:
        """All operations, then the end; raises `Violation` at the first thing that is wrong."""
        began = time.monotonic()
        every = max(1, self.operations // SAMPLES)
        for number in range(1, self.operations + 1):
            self.world.now = number
            self._step()
            if number % self.check_every == 0:
                self._check_all()
            if number % every == 0:
                self.samples.append(self._sample(number))
            if number % self._figures_every == 0:
                self._figures(self._line(number, time.monotonic() - began))
        self._end()

    def levels(self) -> list[str]:
        """What has not levelled off: the last quarter of the run against its second quarter."""
        quarter = len(self.samples) // 4
        second, last = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        found = []
        for name in ("nodes", "spaces"):
            before = sum(getattr(sample, name) for sample in second) / quarter
            after = sum(getattr(sample, name) for sample in last) / quarter
            if after > before * (1 + NODES_MARGIN) + 1:
                found.append(f"{name} went from {before:.0f} to {after:.0f} on average")
        before = max(sample.memory_bytes for sample in second)
        after = max(sample.memory_bytes for sample in last)
        if after > before * (1 + MEMORY_MARGIN) + MEMORY_MARGIN_BYTES:
            found.append(f"memory went from {before:.0f} to {after:.0f} bytes at most")
        return found

    def outcome(self) -> str:
        """A line that is equal for equal runs."""
        facts = sorted({**self.world.directory.counters, **self.did}.items())
        return f"{self.world.log:08x} " + " ".join(f"{name}={value}" for name, value in facts)

    # One operation.

    def _step(self) -> None:
        draw = self.chance.random()
        world = self.world
        if world.copies and (draw < 0.2 or len(world.copies) > COPIES_MAX):
            self._end_copy()
            return
        actor = self.chance.choice(self.actors)
        if draw < 0.9:
            self._serve(actor)
        elif draw < 0.94:
            self._did("evict")
            actor.evict(self.chance.randint(1, 8))
        elif draw < 0.975:
            self._abort(actor)
        elif draw < 0.996:
            self._did("split")
            self._split(actor)
        elif draw < 0.9975:
            self._did("flush")
            actor.flush()
        elif draw < 0.9976:
            self._did("flush_host")
            actor.direct.call(Flush("host"))
        elif draw < 0.998:
            self._did("mover_lost")
            world.lose_mover()
        elif draw < 0.999:
            self._did("reconnect")
            del self._by_pool[actor.pool]
            actor.reconnect()
            self._by_pool[actor.pool] = actor
            world.forget_memories()
        else:
            self._did("death")
            actor = self._kill(actor)
        actor.check_pages()

    def _serve(self, actor: Actor) -> None:
        """A new request, or the next step of one that is there."""
        waiting = [r for r in actor.requests.values() if r.phase is not Phase.RESTORING]
        new = len(actor.requests) < REQUESTS_PER_ACTOR_MAX
        if new and (not waiting or self.chance.random() < 0.3):
            self._did("match")
            request = actor.begin(self._prompt())
            # Unique suffixes are to go by: there, an operation is a request's whole life.
            while self.scenario == "hot-prefix" and request.number in actor.requests:
                if request.phase is Phase.RESTORING:
                    break
                self._advance(actor, request)
        elif waiting:
            self._advance(actor, self.chance.choice(waiting))

    def _advance(self, actor: Actor, request: Request) -> None:
        if request.phase is Phase.ADMITTED and request.reach > len(request.row):
            request.phase = Phase.COMPUTING  # whatever becomes of it, it is tried once
            self._did("restore")
            actor.restore(request)
        elif request.tree_pages < request.prompt_pages:
            self._did("insert")
            if not actor.compute(request, self.chance.randint(1, 4)):
                self._did("retract")
                actor.end(request)
        else:
            self._did("finish")
            actor.end(request)

    def _split(self, actor: Actor) -> None:
        """Cut a node of the actor's at a random page, by matching so far and no further."""
        pool = self.world.directory.pools[actor.pool]
        if not pool.nodes or len(actor.requests) >= REQUESTS_PER_ACTOR_MAX:
            return
        node = pool.nodes[self.chance.choice(list(pool.nodes))]
        tokens = b"".join(part.edge for part in node.path())
        key = node.space.page_key
        cut = key * self.chance.randint(1, len(tokens) // key)
        pages = array("I", tokens[:cut])[::TOKENS_PER_PAGE]
        actor.end(actor.begin(self._make(node.space.key, tuple(pages))))

    def _abort(self, actor: Actor) -> None:
        if actor.requests:
            self._did("abort")
            actor.end(actor.requests[self.chance.choice(list(actor.requests))])

    def _end_copy(self) -> None:
        op = self.chance.choice(list(self.world.copies))
        draw = self.chance.random()
        wanted: Outcome = "ok" if draw < 0.9 else "void" if draw < 0.95 else "failed"
        self._did(f"copy_{wanted}")
        self.world.end_copy(op, wanted)

    def _kill(self, actor: Actor) -> Actor:
        """The process dies; another one registers under its name at once."""
        at = self.actors.index(actor)
        del self._by_pool[actor.pool]
        actor.die()
        modes: tuple[Mode, Mode] = ("mirrored", "thin")
        mode = self.chance.choice(modes)
        heir = Actor(self.world, actor.instance, mode, actor.fingerprint, actor.page_count)
        self.actors[at] = heir
        self._by_pool[heir.pool] = heir
        self.world.forget_memories()
        return heir

    # Prompts.

    def _prompt(self) -> Prompt:
        chance = self.chance
        if self.scenario == "hot-prefix":
            tail = (self._fresh() for _ in range(chance.randint(1, 3)))
            return self._make(NamespaceKey(), (1, 2, 3, 4, *tail))
        system = int(chance.paretovariate(1.0)) % 40
        pages = [1_000 + 10 * system + at for at in range(1 + system % 5)]
        if chance.random() < 0.7:
            document = int(chance.paretovariate(0.7)) % 200
            pages += [10_000 + 10 * document + at for at in range(1 + document % 8)]
        pages += [self._fresh() for _ in range(chance.choice((0, 0, 1, 1, 2, 4, 7)))]
        draw = chance.random()
        key = NamespaceKey()
        if draw < 0.05:
            key = NamespaceKey(cache_salt=f"once-{self._fresh()}")
        elif draw < 0.3:
            key = NamespaceKey(
                weight_epoch=chance.randint(0, 1), extra_key=chance.choice((None, ""))
            )
        return self._make(key, tuple(pages))

    def _fresh(self) -> int:
        self._unique += 1
        return self._unique

    def _make(self, key: NamespaceKey, pages: tuple[int, ...]) -> Prompt:
        tokens = array("I", (page for page in pages for _ in range(TOKENS_PER_PAGE))).tobytes()
        return Prompt(key, tokens, _contents(key, pages))

    # Events.

    def _on_answer(self, pool: PoolId, seq: int, reply: AnyReply) -> None:
        actor = self._by_pool.get(pool)
        if actor is None:
            raise Violation(f"an answer for pool {pool}, which is gone: {reply}")
        actor.on_answer(seq, reply)
        actor.check_pages()

    def _on_copy_ended(self, copy: SubmitCopy) -> None:
        for actor in self.actors:
            if actor.quarantined:
                actor.free_quarantined()

    def _add(self, actor: Actor) -> None:
        self.actors.append(actor)
        self._by_pool[actor.pool] = actor

    # Checks and figures.

    def _check_all(self) -> None:
        found = self.world.directory.check()
        for actor in self.actors:
            actor.check_pages()
            found += [f"{actor.instance}: {problem}" for problem in actor.check()]
            if isinstance(actor.tree, MirroredTree):
                mine, known = actor.tree.mirror.pool, self.world.directory.pools[actor.pool]
                if mine.owned != known.owned or mine.spans.keys() != known.spans.keys():
                    found.append(f"{actor.instance}: mirror and directory differ")
        if found:
            raise Violation("\n".join(found[:20]))

    def _end(self) -> None:
        """Let everything go, and look where every page is."""
        world = self.world
        while world.copies:
            world.end_copy(next(iter(world.copies)), "ok")
        for actor in self.actors:
            for request in list(actor.requests.values()):
                actor.end(request)
        while world.copies:
            world.end_copy(next(iter(world.copies)), "ok")
        world.let_end()
        self._check_all()
        directory = world.directory
        problems = [
            f"{actor.instance}: {actor!r} holds {actor.fills} {actor.quarantined}"
            for actor in self.actors
            if actor.fills
            or actor.quarantined
            or actor.allocator.free_count + actor.tree.pages != actor.page_count
        ]
        for name, left in (
            ("leases", len(directory.leases)),
            ("host locks", directory.host.locked_pages),
            ("pool locks", sum(pool.locked_pages for pool in directory.pools.values())),
            ("copies", len(directory.transfers.copies)),
            ("pools that should be gone", len(directory.pools) - len(self.actors)),
        ):
            if left:
                problems.append(f"{left} {name} are left")
        for actor in self.actors:
            actor.die()
        self._by_pool.clear()
        extra = Actor(world, "last", "mirrored", b"last", 8)
        extra.direct.call(Flush("host"))
        extra.die()
        world.let_end()
        world.forget_memories()
        if world.memories:
            problems.append(f"pools {list(world.memories)} are not forgotten")
        tree = directory.tree
        if tree.nodes or tree.spaces or tree.places.keys() != {HOST}:
            problems.append(f"{len(tree.nodes)} nodes, {len(tree.spaces)} roots are left")
        problems += directory.check()
        if problems:
            raise Violation("\n".join(problems[:20]))

    def _sample(self, number: int) -> Sample:
        tree = self.world.directory.tree
        return Sample(number, len(tree.nodes), len(tree.spaces), _memory_bytes())

    def _line(self, number: int, seconds: float) -> str:
        now = self._sample(number)
        return (
            f"{number:>9,} operations  {now.nodes:>6,} nodes  {now.spaces:>4} namespaces  "
            f"{now.memory_bytes / 2**20:7.1f} MiB  {number / seconds:>8,.0f} operations/s"
        )

    def _did(self, what: str) -> None:
        self.did[what] = self.did.get(what, 0) + 1


def _contents(key: NamespaceKey, pages: tuple[int, ...]) -> tuple[int, ...]:
    """What the pages of a path must hold: each follows from all before it and the namespace."""
    name = (key.weight_epoch, key.cache_salt or "", key.cache_salt is None, key.extra_key is None)
    value = int.from_bytes(repr(name).encode(), "little") % (1 << 61)
    contents = []
    for page in pages:
        value = (value * 0x9E3779B97F4A7C15 + page) % ((1 << 61) - 1)
        contents.append(value)
    return tuple(contents)


def _memory_bytes() -> int:
    """Resident memory of this process."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
