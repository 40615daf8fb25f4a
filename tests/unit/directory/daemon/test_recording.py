"""Recording beside a bare directory: what went, why, and what a live prompt is told."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from directory.analytics.log import AccessLog
from directory.analytics.reader import LogReader
from directory.analytics.record import Access, Eviction, chain
from directory.core.actions import MoreToClose, SubmitCopy
from directory.core.closing import Closing
from directory.core.directory import Directory
from directory.core.errors import BadMessage
from directory.core.events import (
    Asked,
    Body,
    CloseMore,
    CopyDone,
    Event,
    Evict,
    Flush,
    Insert,
    Match,
    PoolClosed,
    PoolRegistered,
)
from directory.core.namespace import NamespaceKey
from directory.core.node import Node
from directory.core.tokens import pack_pages, pack_tokens
from directory.daemon.explaining import Explainer
from directory.daemon.recording import Recording
from directory.daemon.tree_report import tree_report
from directory.protocol.admin import AdminExplain, AdminTree
from directory.protocol.ended import Ended, unsound

PAGE = 4
KEY = NamespaceKey()


class Rig:
    """A directory with a recording that listens, a clock, and movers that copy at once."""

    def __init__(self, folder: Path | None = None, *, host_pages: int = 0) -> None:
        self.now_us = 1_000_000
        self.folder = folder
        log = AccessLog(folder) if folder is not None else None
        self.recording = Recording(
            log, host_bytes=64 * host_pages, now_us=self.now_us, clock=lambda: self.now_us
        )
        self.directory = Directory(host_bytes=64 * host_pages, segment_bytes=64 * 64)
        self.directory.tree.tap = self.recording.tap
        self.pages = 0
        self.spans = 0
        self.seqs = 0

    def tell(self, event: Event) -> list[Any]:
        self.now_us += 1_000
        self.recording.event = event
        actions = self.directory.handle(event)
        for action in list(actions):
            if isinstance(action, SubmitCopy):
                actions += self.tell(CopyDone(action.op, "ok"))
        return actions

    def register(self, name: str) -> int:
        (action,) = self.tell(PoolRegistered(0, self.now_us, name, b"f", PAGE, 64, 64, "thin"))
        pool: int = action.pool
        self.recording.pool_came(self.directory.pools[pool], self.now_us)
        return pool

    def ask(self, pool: int, body: Body) -> list[Any]:
        self.seqs += 1
        return self.tell(Asked(pool, self.seqs, self.now_us, body))

    def insert(self, pool: int, letters: str, key: NamespaceKey = KEY) -> None:
        pages = pack_pages(range(self.pages, self.pages + len(letters)))
        self.pages += len(letters)
        self.spans += 1
        self.ask(pool, Insert("r", 0, key, tokens_of(letters), pages, self.spans, 0, (0, 0)))

    def settle(self) -> None:
        while (ready_us := self.recording.ready_us) is not None:
            self.now_us = max(self.now_us, ready_us)
            self.recording.work(self.now_us, lambda: False)

    def explain(
        self, letters: str, tail: int = 1, instance: str = "a", key: NamespaceKey = KEY
    ) -> list[tuple[str, int, int]]:
        tokens = tokens_of(letters) + pack_tokens([0] * tail)
        question = AdminExplain(tokens, key, instance)
        self.report = Explainer(self.directory, self.recording, question).report()
        return [(s.verdict, s.first_token, s.tokens) for s in self.report.stretches]

    def frames(self) -> list[Any]:
        assert self.folder is not None
        self.settle()
        self.recording.close(self.now_us)
        return list(LogReader(self.folder))


def tokens_of(letters: str) -> bytes:
    return pack_tokens([ord(letter) for letter in letters for _ in range(PAGE)])


def ended(**fields: Any) -> Ended:
    return Ended(**{"request": "r", "attempt": 0, "namespace": KEY, "kind": "request",
                    "prompt_tokens": 13, **fields})  # fmt: skip


def test_what_is_given_up_is_logged_with_its_digest_its_place_and_the_reason(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    pool = rig.register("a")
    rig.insert(pool, "ABCD")
    rig.ask(pool, Evict(2))
    rig.ask(pool, Flush("pool"))
    rig.insert(pool, "XY")
    rig.tell(PoolClosed(pool, rig.now_us))
    gone = [frame for frame in rig.frames() if isinstance(frame, Eviction)]
    whole, other = chain(tokens_of("ABCD"), 4 * PAGE), chain(tokens_of("XY"), 4 * PAGE)
    assert [(each.digest, each.pages, each.reason, each.instance) for each in gone] == [
        (whole[2], 2, "capacity", "a"),
        (whole[0], 2, "flush", "a"),
        (other[0], 2, "pool_gone", "a"),
    ]
    assert {each.tier for each in gone} == {"device"}
    sums = {(line.reason, line.pages) for line in rig.recording.sums.given_up()}
    assert sums == {("capacity", 2), ("flush", 2), ("pool_gone", 2)}


def test_what_a_pool_had_is_told_to_be_its_own_to_the_last_bit(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.directory.closing = Closing(rig.directory.tree, rig.directory.leases, 1)
    pool, other = rig.register("a"), rig.register("b")
    for letter in "ABC":
        rig.insert(pool, letter)
    rig.insert(other, "D")
    actions = rig.tell(PoolClosed(pool, rig.now_us))
    while any(isinstance(action, MoreToClose) for action in actions):
        # Over and over, as for every rank of a group.
        rig.recording.pool_went(pool, rig.now_us)
        actions = rig.tell(CloseMore())
    rig.ask(other, Evict(1))
    gone = [frame for frame in rig.frames() if isinstance(frame, Eviction)]
    assert [(each.pages, each.reason, each.instance) for each in gone] == [
        *[(1, "pool_gone", "a")] * 3,
        (1, "capacity", "b"),
    ]


def test_the_host_tier_s_evictions_are_told_apart_from_those_of_pools(tmp_path: Path) -> None:
    rig = Rig(tmp_path, host_pages=4)
    pool = rig.register("a")
    rig.insert(pool, "ABCD")
    rig.insert(pool, "WXYZ")
    gone = [frame for frame in rig.frames() if isinstance(frame, Eviction)]
    assert sum(each.pages for each in gone if each.tier == "host") == 4
    assert [each.tier for each in gone] == ["host"] * len(gone)


def test_pages_that_went_while_a_request_lived_are_counted_in_its_record(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    pool = rig.register("a")
    rig.insert(pool, "ABCD")
    rig.ask(pool, Evict(1))
    began_us = rig.now_us + 500
    rig.ask(pool, Evict(2))
    age_us = rig.now_us - began_us
    rig.recording.ended(rig.directory.pools[pool], ended(age_us=age_us), rig.now_us)
    (access,) = [frame for frame in rig.frames() if isinstance(frame, Access)]
    assert (access.evicted_device, access.evicted_host) == (2, 0)
    assert access.at_us == rig.recording.wall_us(began_us)


@pytest.mark.parametrize(
    "fields",
    [
        {"hit": (14, 0, 0, 0)},
        {"hit": (-1, 0, 0, 0)},
        {"age_us": 1 << 60},
        {"request": "r" * 300},
        {"lookups": -1},
    ],
)
def test_a_report_that_cannot_be_true_is_counted_and_leaves_no_trace(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    rig = Rig(tmp_path)
    pool = rig.register("a")
    assert unsound(ended(**fields))
    rig.recording.ended(rig.directory.pools[pool], ended(**fields), rig.now_us)
    assert rig.recording.refused == 1
    assert rig.recording.sums.served() == ()
    assert not [frame for frame in rig.frames() if isinstance(frame, Access)]


def test_a_defect_of_the_log_ends_the_log_and_nothing_else(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    pool = rig.directory.pools[rig.register("a")]
    rig.recording.chains = None  # type: ignore[assignment]
    rig.recording.ended(pool, ended(), rig.now_us)
    rig.recording.work(rig.now_us, lambda: False)
    assert rig.recording.log_report() is None
    assert rig.recording.ready_us is None
    rig.recording.ended(pool, ended(), rig.now_us)
    assert rig.recording.sums.served()[0].requests == 2


def test_a_live_prompt_is_told_where_each_part_is_or_why_it_is_nowhere(tmp_path: Path) -> None:
    rig = Rig(tmp_path, host_pages=3)
    a, b = rig.register("a"), rig.register("b")
    rig.insert(b, "ABC")
    rig.insert(a, "A")
    assert rig.explain("ABCZ") == [
        ("own", 0, 4), ("peer", 4, 8), ("never_seen", 12, 4), ("partial_tail", 16, 1),
    ]  # fmt: skip
    assert rig.explain("ABX")[-2:] == [("diverged", 8, 4), ("partial_tail", 12, 1)]
    rig.ask(b, Flush("pool"))
    assert rig.explain("ABC") == [("own", 0, 4), ("host", 4, 8), ("partial_tail", 12, 1)]
    rig.ask(b, Flush("host"))
    rig.settle()
    assert rig.explain("ABC") == [("own", 0, 4), ("evicted", 4, 8), ("partial_tail", 12, 1)]
    detail = rig.report.stretches[1].detail
    assert detail.startswith("from the host tier at ")
    assert detail.endswith("(flush, lru)")
    salted = NamespaceKey(cache_salt="x")
    assert rig.explain("A", key=salted) == [("other_namespace", 0, 4), ("partial_tail", 4, 1)]
    assert "cache_salt: 'absent' here" not in rig.report.stretches[0].detail
    assert "'x'" not in rig.report.stretches[0].detail
    assert rig.explain("AB", tail=0) == [("own", 0, 4), ("partial_tail", 4, 4)]


def test_what_is_only_on_its_way_to_the_host_tier_is_not_restorable_now(tmp_path: Path) -> None:
    rig = Rig(tmp_path, host_pages=3)
    a = rig.register("a")
    rig.insert(a, "ABC")
    rig.ask(a, Match("r", 0, KEY, tokens_of("ABC")))  # a lease: what is flushed drains
    rig.ask(a, Flush("host"))
    found = rig.explain("ABC", instance="")
    assert found[0][0] == "peer"


def test_asking_changes_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, host_pages=4)
    pool = rig.register("a")
    rig.insert(pool, "ABCD")
    rig.insert(pool, "ABXY")
    before = rig.directory.figures(), list(rig.directory.pools[pool].order)
    rig.explain("ABCDEF")
    tree_report(rig.directory, rig.recording, AdminTree())
    assert (rig.directory.figures(), list(rig.directory.pools[pool].order)) == before
    assert rig.directory.check() == []


def test_an_instance_that_is_not_here_is_named_with_those_that_are(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    with pytest.raises(BadMessage, match="no engine is registered"):
        rig.explain("A", instance="")
    rig.register("a")
    with pytest.raises(BadMessage, match=r"no instance 'z' .*\(there are: a\)"):
        rig.explain("A", instance="z")


def test_the_largest_parts_of_the_tree_are_named_with_their_ancestors() -> None:
    rig = Rig()
    pool = rig.register("a")
    rig.insert(pool, "AB" + "C" * 5)
    rig.insert(pool, "AB" + "D" * 3)
    rig.insert(pool, "Z")
    report = tree_report(rig.directory, rig.recording, AdminTree(nodes_max=2))
    (space,) = report.spaces
    assert [(node.depth, node.start, node.pages, node.below) for node in space.nodes] == [
        (0, 0, 2, 8),
        (1, 2, 5, 0),
    ]
    assert (report.nodes, report.nodes_left_out) == (4, 2)
    assert space.nodes[1].digest == f"{chain(tokens_of('AB' + 'C' * 5), 4 * PAGE)[-1]:016x}"
    assert [place for place, *_ in space.nodes[0].places] == ["a"]
    wide = tree_report(rig.directory, rig.recording, AdminTree(pages_min=4))
    assert [node.pages for node in wide.spaces[0].nodes] == [2, 5]


def test_a_generation_that_has_ended_is_not_taken_for_the_one_that_lives(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.directory.closing = Closing(rig.directory.tree, rig.directory.leases, 1)
    pool = rig.register("a")
    for letter in "ABC":
        rig.insert(pool, letter)
    rig.tell(PoolClosed(pool, rig.now_us))
    with pytest.raises(BadMessage, match=r"there are: none"):
        rig.explain("A", instance="a")
    rig.insert(rig.register("a"), "D")

    def places(instance: str = "") -> list[str]:
        report = tree_report(rig.directory, rig.recording, AdminTree(instance=instance))
        return [place for each in report.spaces for n in each.nodes for place, *_ in n.places]

    assert sorted(places()) == ["a", "a (closing)", "a (closing)"]
    assert places("a") == ["a"]


def test_what_goes_is_named_by_its_path_whatever_splits_and_merges_came_before(
    tmp_path: Path,
) -> None:
    chance = random.Random(7)
    rig = Rig(tmp_path, host_pages=8)
    expected: list[tuple[int, int]] = []

    def tap(node: Node, place: int, sign: int) -> None:
        if sign < 0:
            path = b"".join(above.edge for above in node.path())
            until = len(path) - len(node.edge) + node.space.page_key
            expected.append((chain(path[:until], node.space.page_key)[-1], node.page_count))
        rig.recording.tap(node, place, sign)

    rig.directory.tree.tap = tap
    pools = [rig.register("a"), rig.register("b")]
    for step in range(400):
        letters = "".join(chance.choices("AB", k=chance.randrange(1, 7)))
        rig.insert(chance.choice(pools), letters)
        if chance.random() < 0.6:
            rig.ask(chance.choice(pools), Evict(chance.randrange(1, 6)))
        if step % 97 == 0:
            rig.ask(chance.choice(pools), Flush("pool"))
        if chance.random() < 0.3:
            rig.settle()
    gone = [(each.digest, each.pages) for each in rig.frames() if isinstance(each, Eviction)]
    assert gone == expected
    assert len(set(gone)) > 20


def test_nodes_of_a_new_tree_are_not_taken_for_those_of_the_last(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.directory.tree.tap = rig.recording.watch()
    pool = rig.register("a")
    rig.insert(pool, "AB")
    rig.insert(pool, "AC")
    rig.ask(pool, Evict(1))
    rig.settle()
    rig.directory = Directory(segment_bytes=64 * 64)
    rig.directory.tree.tap = rig.recording.watch()
    pool = rig.register("a")
    rig.insert(pool, "XB")
    rig.insert(pool, "XC")
    rig.ask(pool, Evict(1))
    gone = [each.digest for each in rig.frames() if isinstance(each, Eviction)]
    assert gone == [
        chain(tokens_of("AB"), 4 * PAGE)[-1],
        chain(tokens_of("XB"), 4 * PAGE)[-1],
    ]
