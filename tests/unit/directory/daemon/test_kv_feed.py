"""When the daemon hands its notes on, and what it does when nobody takes them."""

import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import zmq

from directory.core import limits
from directory.core.ids import HOST
from directory.core.namespace import NamespaceKey
from directory.core.node import Node, Space
from directory.daemon import kv_feed
from directory.daemon.config import Settings
from directory.daemon.kv_feed import join_taps, open_feed
from directory.daemon.loop import Loop
from directory.daemon.runtime import StartError
from directory.kvevents.records import AnyRecord, Begin, Changed, Opened, Whole, decode
from tests.integration.daemon.support import wait_until
from tests.unit.directory.core.world import Scheduler, World

WAIT_MS = 10_000


class Rig:
    """A feed over a world, a clock that stands, and a reader in the publisher's place."""

    def __init__(self, folder: Path) -> None:
        self.now_us = 1_000_000
        self.counters: Counter[str] = Counter()
        settings = Settings(kv_events="tcp://127.0.0.1:5557")
        feed = open_feed(settings, folder, self.counters)
        assert feed is not None
        self.feed = feed
        self.loop = Loop()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.reader = self.context.socket(zmq.PULL)
        self.reader.setsockopt(zmq.RCVHWM, 1)
        self.where = f"ipc://{folder}/{kv_feed.SOCKET_NAME}"
        self.world = World()
        self.world.directory.tree.tap = feed.watch(self.world.directory)

    def begin(self) -> list[AnyRecord]:
        """Start, and read what is told at first."""
        self.feed.start(self.loop)
        self.reader.connect(self.where)
        told = self.until_whole()
        self.turn(kv_feed.EVERY_US)
        return told

    def until_whole(self) -> list[AnyRecord]:
        """Go on until everything was told."""
        told: list[AnyRecord] = []
        for _ in range(1_000):
            self.now_us += kv_feed.RETRY_US
            self.feed.on_time(idle=True)
            if self.reader.poll(10):
                told += decode(self.reader.recv())
            if told and isinstance(told[-1], Whole):
                return told
        raise AssertionError("nobody was told everything")

    def turn(self, after_us: int = 0, *, idle: bool = True) -> bool:
        """One turn of the loop; whether something was handed on in it."""
        self.now_us += after_us
        return self.feed.on_time(idle=idle)

    def read(self) -> list[AnyRecord]:
        """The next message."""
        assert self.reader.poll(WAIT_MS), "nothing was handed on"
        return list(decode(self.reader.recv()))

    @property
    def writable(self) -> bool:
        """Whether the feed's socket takes anything."""
        socket = self.feed._feed
        assert socket is not None
        return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)

    @property
    def handed_on(self) -> int:
        return self.counters["kv_records"]


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(kv_feed, "PROGRAM", "tests.unit.directory.daemon.waiting_program")
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        rig = Rig(Path(folder))
        monkeypatch.setattr(kv_feed, "now_us", lambda: rig.now_us)
        yield rig
        rig.feed.close()
        rig.context.destroy(linger=0)
        rig.loop.close()
        assert os.listdir(folder) == []


def test_without_the_setting_there_is_no_feed(tmp_path: Path) -> None:
    assert open_feed(Settings(), tmp_path, Counter()) is None


def test_changes_are_handed_on_once_clients_are_quiet(rig: Rig) -> None:
    rig.begin()
    before = rig.handed_on
    assert rig.feed.due_us() is None
    Scheduler(rig.world, "a").publish([1, 2])
    assert not rig.turn(idle=False)
    assert not rig.turn(kv_feed.QUIET_US - 1)
    assert rig.handed_on == before
    assert rig.feed.due_us() == rig.now_us + 1
    assert rig.turn(1)
    assert not rig.turn(1)
    assert Changed in {type(record) for record in rig.read()}
    assert rig.feed.due_us() is None


def test_changes_are_handed_on_together_and_not_soon_after_the_last_ones(rig: Rig) -> None:
    rig.begin()
    a = Scheduler(rig.world, "a")
    a.publish([1])
    rig.turn(idle=False)
    rig.turn(kv_feed.QUIET_US)
    rig.read()
    before, due_us = rig.handed_on, rig.now_us + kv_feed.EVERY_US
    for token in range(2, 6):
        a.publish([token])
        rig.turn(1_000, idle=False)
        rig.turn(kv_feed.QUIET_US)
    assert rig.handed_on == before
    assert rig.feed.due_us() == due_us
    rig.turn(due_us - rig.now_us)
    changed = [record for record in rig.read() if isinstance(record, Changed)]
    assert len(changed) == 4
    assert rig.feed.due_us() is None


def test_what_is_more_than_a_message_goes_on_in_the_turns_that_follow(rig: Rig) -> None:
    rig.begin()
    before = rig.handed_on
    a = Scheduler(rig.world, "a")
    for token in range(2 * limits.KV_EVENTS_RECORDS_A_MESSAGE):
        a.publish([token])
    rig.turn(idle=False)
    rig.turn(kv_feed.WAIT_US_MAX - 1, idle=False)
    assert rig.handed_on == before
    handed: list[int] = []
    while not handed or handed[-1]:
        earlier = rig.handed_on
        rig.turn(1, idle=False)
        handed.append(rig.handed_on - earlier)
        if handed[-1]:
            rig.read()
    assert len(handed) > 2
    assert max(handed) == limits.KV_EVENTS_RECORDS_A_MESSAGE
    assert rig.feed.due_us() is None


def test_everything_is_told_anew_a_little_at_a_time_though_clients_never_pause(rig: Rig) -> None:
    rig.begin()
    a = Scheduler(rig.world, "a", pages=256)
    for token in range(200):
        a.publish([token])
    capture = rig.feed._capture
    assert capture is not None
    capture.lose()
    told: list[AnyRecord] = []
    handed: list[int] = []
    for _ in range(2_000):
        earlier = rig.handed_on
        rig.turn(1_000, idle=False)
        handed.append(rig.handed_on - earlier)
        if handed[-1]:
            told += rig.read()
        if told and isinstance(told[-1], Whole):
            break
    assert isinstance(told[-1], Whole)
    assert max(handed) <= limits.KV_EVENTS_RECORDS_A_MESSAGE
    walked = [at for at, count in enumerate(handed) if count]
    assert len(walked) >= 200 // limits.KV_EVENTS_NODES_A_STEP
    gaps = [later - earlier for earlier, later in pairwise(walked[:-2])]
    assert kv_feed.WALK_US // 1_000 <= min(gaps) <= max(gaps) < kv_feed.WAIT_US_MAX // 1_000


def test_changes_do_not_wait_for_ever_for_clients_to_be_quiet(rig: Rig) -> None:
    rig.begin()
    before = rig.handed_on
    Scheduler(rig.world, "a").publish([1, 2])
    rig.turn(idle=False)
    for _ in range(kv_feed.WAIT_US_MAX // 1_000 - 1):
        rig.turn(1_000, idle=False)
    assert rig.handed_on == before
    rig.turn(1_000, idle=False)
    assert rig.handed_on > before


def test_a_publisher_that_takes_nothing_is_tried_again_later_and_loses_nothing(rig: Rig) -> None:
    rig.begin()
    # As if its queues were full: there is nothing that a message could be put into.
    rig.reader.close(linger=0)
    wait_until(lambda: not rig.writable)
    a = Scheduler(rig.world, "a")
    for token in range(20):
        a.publish([token])
    for _ in range(200):
        assert not rig.turn(kv_feed.RETRY_US), "nothing was handed on"
    due = rig.feed.due_us()
    assert due is not None
    assert due > rig.now_us
    rig.reader = rig.context.socket(zmq.PULL)
    rig.reader.connect(rig.where)
    told = 0
    while told < 20:
        rig.turn(kv_feed.RETRY_US)
        if rig.reader.poll(10):
            told += sum(isinstance(record, Changed) for record in decode(rig.reader.recv()))
    assert told == 20


def test_a_new_directory_is_told_from_the_beginning(rig: Rig) -> None:
    rig.begin()
    Scheduler(rig.world, "a").publish([1])
    rig.turn(kv_feed.QUIET_US)
    rig.read()
    rig.world = World()
    rig.world.directory.tree.tap = rig.feed.watch(rig.world.directory)
    told = rig.until_whole()
    assert [type(record) for record in told] == [Begin, Whole]
    assert rig.counters["kv_told_anew"] == 2


def test_a_pool_without_pages_is_told(rig: Rig) -> None:
    rig.begin()
    Scheduler(rig.world, "a")
    rig.feed.pools_changed()
    rig.turn(kv_feed.QUIET_US)
    (opened,) = rig.read()
    assert isinstance(opened, Opened)
    assert opened.instance == "a"


def test_a_publisher_that_dies_is_replaced_after_a_pause_and_told_everything(rig: Rig) -> None:
    rig.begin()
    Scheduler(rig.world, "a").publish([1])
    first = rig.feed.pid
    os.kill(first, signal.SIGKILL)
    rig.loop.turn(10)
    assert rig.feed.pid == 0
    rig.turn(kv_feed.RESTART_AFTER_US - 1)
    assert rig.feed.pid == 0
    assert rig.feed.due_us() == rig.now_us + 1
    rig.turn(1)
    assert rig.feed.pid not in (0, first)
    told = {type(record) for record in rig.until_whole()}
    assert {Begin, Opened, Changed, Whole} <= told
    assert rig.counters["kv_publishers_lost"] == 1


def test_a_socket_that_cannot_be_bound_is_said(rig: Rig, tmp_path: Path) -> None:
    elsewhere = open_feed(
        Settings(kv_events="tcp://127.0.0.1:5557"), tmp_path / ("x" * 120), Counter()
    )
    assert elsewhere is not None
    with pytest.raises(StartError, match=r"cannot be bound"):
        elsewhere.start(rig.loop)
    elsewhere.close()


def test_taps_are_joined_and_none_costs_nothing() -> None:
    heard: list[str] = []
    node = Node(1, None, b"", Space(b"f", NamespaceKey(), 1, 1))

    def one(*_: object) -> None:
        heard.append("one")

    def two(*_: object) -> None:
        heard.append("two")

    assert join_taps((None, None)) is None
    assert join_taps((None, one)) is one
    both = join_taps((one, two))
    assert both is not None
    both(node, HOST, 1)
    assert heard == ["one", "two"]


def test_what_is_in_the_way_and_no_socket_is_left_alone(rig: Rig, tmp_path: Path) -> None:
    settings = Settings(kv_events="tcp://127.0.0.1:5557")
    elsewhere = open_feed(settings, tmp_path, Counter())
    assert elsewhere is not None
    place = tmp_path / kv_feed.SOCKET_NAME
    place.write_text("somebody's")
    with pytest.raises(StartError, match=r"is in the way"):
        elsewhere.start(rig.loop)
    elsewhere.close()
    assert place.read_text() == "somebody's"
