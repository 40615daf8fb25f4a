"""Whatever happens while a mirror is told anew, in the end the daemon knows just what it has.

Strategy: a scheduler without a daemon serves prompts that share beginnings, in a pool so small that
it evicts. Its daemon comes back and its requests go on: they find, publish, evict and flush between
any two steps of the republication, of which each is cut off after a drawn number of reports, in the
middle of a path or of the slots that are passed over, or because a look for answers or the making
of a path took its time, as drawn; so is how often answers are looked for. The daemon refuses what
it does not understand, which loses it again; so it must not be lost, and page by page both trees
must be the same at the end. Every step of either side is followed by its own walk over all
invariants.
"""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from directory.core.events import Insert, Mode
from directory.core.ids import Place
from directory.core.tree import Tree
from scheduler_shim.own_tree import MirroredTree
from scheduler_shim.republish import HEAR_AT, SLOTS_A_LOOK, STEP_US_MIN, Republisher
from scheduler_shim.way import Way
from tests.unit.scheduler_shim.support import Cluster, FakeDaemon, Node, tokens

PAGES = 3 * SLOTS_A_LOOK


def held(tree: Tree, place: Place) -> dict[bytes, int]:
    """The page of every path of whole pages that a place has."""
    found: dict[bytes, int] = {}
    for node in tree.nodes.values():
        residency = node.at(place)
        if residency is None:
            continue
        path = b"".join(above.edge for above in node.path())
        key, last = node.space.page_key, len(path)
        for number, page in enumerate(reversed(memoryview(residency.pages).cast("I"))):
            found[path[: last - number * key]] = page
    return found


CHATS = 4


class Story:
    """One scheduler on its way back. `mode`: as what it registers again."""

    def __init__(self, seed: int, mode: Mode) -> None:
        self.draw = random.Random(seed)
        self.daemon = FakeDaemon()
        self.cluster = Cluster(self.daemon)
        self.node: Node = self.cluster.add("a", mode, page_count=PAGES)
        self.number = 0
        self.steps = 0
        self.cut = 1
        self.chats: dict[int, list[int]] = {}

    def prompt(self) -> bytes:
        """The next turn of a chat, a page or two longer, an early part of it, or another prompt."""
        draw, kind = self.draw, self.draw.random()
        if kind < 0.2:
            return tokens(*(draw.randrange(3) for _ in range(draw.randrange(1, 9))), 9)
        number = draw.randrange(CHATS)
        chat = self.chats.setdefault(number, [number])
        if kind < 0.4:
            return tokens(*chat[: draw.randrange(len(chat)) + 1], draw.randrange(3))
        chat += [draw.randrange(3) for _ in range(draw.randrange(1, 3))]
        if len(chat) > PAGES // 2:
            del chat[PAGES // 8 :]
        return tokens(*chat)

    def serve(self) -> None:
        """A request to its end."""
        self.number += 1
        record = self.node.serve(self.number, self.prompt())
        assert (record.error, record.wrong) == ("", 0)

    def run(self) -> None:
        """Lose the daemon, serve without, come back amid requests, and compare."""
        node, daemon, draw = self.node, self.daemon, self.draw
        for _ in range(draw.randrange(6)):
            self.serve()
        daemon.die()
        node.tick()
        for _ in range(draw.randrange(1, 100)):
            self.serve()
        tries = len(node.dial.tries_us)
        daemon.restart()
        traffic = draw.choice((0.0, 0.3, 0.9))
        while node.scheduler.client is None:
            self.steps += 1
            assert self.steps < 5_000, "it comes to an end while requests go on"
            self.cut = draw.randrange(1, 6)
            daemon.clock_us += draw.choice((STEP_US_MIN, 5_000))
            if draw.random() < traffic:
                if draw.random() < 0.05:
                    node.scheduler.flush()
                self.serve()
            else:
                node.tick()
            daemon.run()
        node.settle()
        daemon.run()
        assert len(node.dial.tries_us) == tries + 1, "nothing that was said was refused"
        assert node.scheduler.counters["degraded"] == 1, node.scheduler.last_loss
        there = held(daemon.directory.tree, node.link_pool)
        tree = node.scheduler.room.tree
        if isinstance(tree, MirroredTree):
            assert there == held(tree.mirror._tree, tree.mirror.pool.place)
        assert len(there) == node.scheduler.pages.tree
        for _ in range(5):  # and goes on knowing it
            self.serve()
            daemon.run()
        node.check()

    def close(self) -> None:
        """Give everything back."""
        self.cluster.close()
        self.daemon.close()


@settings(max_examples=30)
@given(st.integers(0, 1 << 32), st.sampled_from(["mirrored", "thin"]))
def test_the_daemon_knows_page_by_page_what_the_mirror_has(seed: int, mode: Mode) -> None:
    story = Story(seed, mode)
    say = Republisher._say

    def cut_off(self: Republisher, report: Insert, fresh: int) -> None:
        say(self, report, fresh)
        story.daemon.clock_us += STEP_US_MIN // story.cut

    def slow(what: type[object], name: str) -> Any:
        """Now and then it takes the time of a step."""
        done = getattr(what, name)

        def slowly(*arguments: object) -> object:
            story.daemon.clock_us += story.draw.choice((0, 0, STEP_US_MIN))
            return done(*arguments)

        return patch.object(what, name, slowly)

    hear_at = story.draw.randrange(1, HEAR_AT + 1)
    with (
        patch.object(Republisher, "_say", cut_off),
        slow(Republisher, "take"),
        slow(Way, "__init__"),
        patch("scheduler_shim.republish.HEAR_AT", hear_at),
    ):
        try:
            story.run()
        finally:
            story.close()
