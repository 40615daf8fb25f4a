"""The client and the reference scheduler in this process, against a real daemon process."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from directory.core.actions import Counters, Inserted, Matched, Restored
from directory.core.errors import InstanceLive, TreecoredError
from directory.core.events import Insert, Match, Mode, Restore, Stats
from directory.core.namespace import NamespaceKey
from directory.core.tokens import pack_pages, pack_tokens
from directory.protocol.admin import AdminCheck, AdminReport
from scheduler_shim.client import DaemonClient
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.dial import DaemonDial
from scheduler_shim.lane_link import LaneLink
from scheduler_shim.pools import SharedPool
from scheduler_shim.reference_scheduler import ReferenceScheduler
from scheduler_shim.renamed import RenamedPool
from scheduler_shim.session import DaemonAbsent
from scheduler_shim.worker_messages import Finished
from tests.integration.daemon.support import DEADLINE_S, DaemonProcess, SessionClient, wait_until

PAGE_SIZE = 16
KEY = NamespaceKey()
QUICK = Deadlines(call_ms=200, restore_ms=2_000, connect_ms=60_000, misses_max=2)
"""For tests of deadlines: what is missed with it may be missed on a busy machine, too."""
PATIENT = Deadlines(call_ms=30_000, restore_ms=30_000, connect_ms=60_000)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path / "rt") as process:
        yield process


def blocks(*numbers: int) -> bytes:
    """Tokens of whole pages."""
    return pack_tokens([number for number in numbers for _ in range(PAGE_SIZE)])


class Node:
    """A scheduler in this process; closed with its pool."""

    def __init__(
        self,
        daemon: DaemonProcess,
        instance: str,
        mode: Mode,
        pages: int = 32,
        *,
        named: bool = False,
        deadlines: Deadlines = PATIENT,
    ) -> None:
        kind = RenamedPool if named else SharedPool
        self.pool = kind(page_size=PAGE_SIZE, page_count=pages, bytes_per_token=256)
        try:
            self.client = DaemonClient.connect(
                daemon.runtime_dir, self.pool, instance=instance, mode=mode, deadlines=deadlines
            )
        except TreecoredError:
            self.pool.close()
            raise
        self.scheduler = ReferenceScheduler(
            self.pool, self.client, instance=instance, thin=mode == "thin"
        )

    def serve(self, number: int, *numbers: int) -> Finished:
        self.scheduler.submit(number, blocks(*numbers))
        give_up = time.monotonic() + DEADLINE_S
        while time.monotonic() < give_up:
            for record in self.scheduler.tick():
                return record
            if not self.scheduler.moved and self.scheduler.client is not None:
                self.scheduler.client.wait(100_000)
        raise AssertionError(f"request {number} does not end: {self.scheduler!r}")

    def settle(self) -> None:
        """Wait until the daemon has carried out everything that was said."""
        self.counter("pools")

    def counter(self, name: str) -> int:
        """One of the daemon's counters."""
        reply = self.client.call(Stats(), 30_000)
        assert isinstance(reply, Counters)
        return reply.counters.get(name, 0)

    def close(self) -> None:
        self.client.close()
        self.pool.close()


@pytest.mark.parametrize(
    "named", [(False, False), (True, False), (False, True), (True, True)], ids=str
)
@pytest.mark.parametrize("second", ["mirrored", "thin"])
@pytest.mark.parametrize("first", ["mirrored", "thin"])
def test_pages_travel_between_the_pools_of_two_schedulers(
    daemon: DaemonProcess, first: Mode, second: Mode, named: tuple[bool, bool]
) -> None:
    left = Node(daemon, "left", first, named=named[0])
    right = Node(daemon, "right", second, named=named[1])
    left.serve(1, 1, 2, 3, 4)
    left.settle()
    record = right.serve(2, 1, 2, 3, 9)
    assert (record.own_pages, record.peer_pages, record.verified, record.wrong) == (0, 3, 3, 0)
    assert right.serve(3, 1, 2, 3, 9, 5).own_pages == 4
    for node in (left, right):
        reply = node.client.call(Stats(check=True), 30_000)
        assert isinstance(reply, Counters)
        assert reply.violations == ()
        assert node.scheduler.check() == []
        node.close()


@pytest.mark.parametrize("named", [False, True], ids=["numbers", "names"])
@pytest.mark.parametrize("mode", ["mirrored", "thin"])
def test_pages_come_back_from_the_host_tier(daemon: DaemonProcess, mode: Mode, named: bool) -> None:
    node = Node(daemon, "a", mode, pages=6, named=named)
    node.serve(1, 1, 2, 3)
    wait_until(lambda: node.counter("pages_backed_up") == 3)
    node.serve(2, 11, 12, 13, 14, 15, 16)
    record = node.serve(3, 1, 2, 3, 4)
    assert (record.host_pages, record.verified, record.wrong) == (3, 3, 0)
    node.close()


@pytest.mark.parametrize("mode", ["mirrored", "thin"])
def test_a_killed_daemon_leaves_a_scheduler_that_serves_on_f67(
    daemon: DaemonProcess, mode: Mode
) -> None:
    node = Node(daemon, "a", mode)
    node.serve(1, 1, 2, 3)
    daemon.process.kill()
    daemon.process.wait()
    assert node.serve(2, 7, 8).error == ""
    assert node.serve(3, 7, 8, 9).own_pages == 2
    assert node.scheduler.mode == "degraded"
    assert node.scheduler.check() == []
    node.close()


@pytest.mark.parametrize("mode", ["mirrored", "thin"])
def test_a_stopped_daemon_holds_nobody_beyond_the_deadlines_f76(
    daemon: DaemonProcess, mode: Mode
) -> None:
    node = Node(daemon, "a", mode, deadlines=QUICK)
    node.serve(1, 1, 2, 3)
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        begun = time.monotonic()
        records = [node.serve(number, 1, 2, number, number) for number in range(10, 16)]
        assert time.monotonic() - begun < 10
        assert {record.error for record in records} == {""}
        assert node.scheduler.mode == "degraded"
        assert node.scheduler.check() == []
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    node.close()


def test_a_second_client_of_a_live_instance_is_told_so(daemon: DaemonProcess) -> None:
    node = Node(daemon, "a", "mirrored")
    with pytest.raises(InstanceLive, match="another instance id"):
        Node(daemon, "a", "mirrored")
    assert node.serve(1, 1, 2).error == ""
    node.close()


def test_the_ranks_of_an_instance_register_as_one_group(daemon: DaemonProcess) -> None:
    pools = [SharedPool(page_size=PAGE_SIZE, page_count=8, bytes_per_token=256) for _ in range(2)]
    first = DaemonClient.connect(
        daemon.runtime_dir, pools[0], instance="g", mode="thin", deadlines=PATIENT, world_size=2
    )
    dial = DaemonDial(
        daemon.runtime_dir, pools[1], instance="g", deadlines=PATIENT, world_size=2, rank=1
    )
    attempt = dial.begin("thin")
    second = attempt.step()
    give_up = time.monotonic() + DEADLINE_S
    while second is None and time.monotonic() < give_up:
        second = attempt.step()
    assert second is not None
    with SessionClient(daemon.runtime_dir) as admin:
        admin.hello()
        report = admin.call(AdminCheck())
    assert isinstance(report, AdminReport)
    assert [(pool.instance, pool.ranks, pool.world_size) for pool in report.pools] == [("g", 2, 2)]
    for client, pool in zip((first, second), pools, strict=True):
        client.close()
        pool.close()


@pytest.mark.parametrize("mode", ["mirrored", "thin"])
def test_a_scheduler_whose_daemon_only_paused_keeps_it_f76(
    daemon: DaemonProcess, mode: Mode
) -> None:
    # So long that nothing else is missed on a busy machine.
    deadlines = QUICK._replace(call_ms=2_000)
    node = Node(daemon, "a", mode, deadlines=deadlines)
    node.serve(1, 1, 2, 3)
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        for _ in range(2 * deadlines.misses_max):  # asked together, late together
            node.client.ask(Stats())
        give_up = time.monotonic() + DEADLINE_S
        while node.client.counters.get("deadlines_missed", 0) < 2 * deadlines.misses_max:
            assert time.monotonic() < give_up
            node.scheduler.tick()
            node.client.wait(10_000)
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    node.settle()
    assert (node.client.lost, node.scheduler.mode) == ("", mode)
    assert node.serve(2, 1, 2, 3, 4).own_pages == 3
    node.close()


def test_without_a_daemon_there_is_one_clear_error(tmp_path: Path) -> None:
    pool = SharedPool(page_size=4, page_count=4, bytes_per_token=8)
    with pytest.raises(DaemonAbsent, match="no daemon listens at"):
        DaemonClient.connect(tmp_path, pool, instance="a", mode="mirrored")
    pool.close()


class Liar(RenamedPool):
    """A pool whose page table says anything, as a broken or hostile scheduler's may."""

    def lie(self, page: int) -> None:
        """Let every name stand for one number."""
        for name in range(self.page_count):
            self.page_table.write(name, page)


@pytest.mark.parametrize("page", [32, (1 << 32) - 1])
def test_a_hostile_page_table_changes_nothing_but_its_own_copies(
    daemon: DaemonProcess, page: int
) -> None:
    with ExitStack() as stack:
        left, right, liar = (
            Node(daemon, name, "mirrored", named=name == "liar")
            for name in ("left", "right", "liar")
        )
        for node in (left, right, liar):
            stack.callback(node.close)
        left.serve(1, 1, 2, 3)
        left.settle()
        assert isinstance(liar.pool, RenamedPool)
        for name in range(liar.pool.page_count):
            liar.pool.page_table.write(name, page)
        written = liar.pool.advance()
        liar.client.report(
            Insert("r", 0, NamespaceKey(), blocks(7, 8), pack_pages([0, 1]), 1, 0, written)
        )
        liar.settle()
        matched = liar.client.call(Match("q", 0, NamespaceKey(), blocks(1, 2, 3)), 30_000)
        assert isinstance(matched, Matched)
        assert matched.restorable_pages == 3
        targets = pack_pages([4, 5, 6])
        restore = Restore("q", 0, matched.receipt, 0, targets, liar.pool.now())
        lost = liar.client.call(restore, 30_000)
        assert isinstance(lost, Restored)
        assert not lost.landed
        record = right.serve(2, 1, 2, 3, 9)
        assert (record.peer_pages + record.host_pages, record.wrong) == (3, 0)
        assert right.serve(3, 7, 8, 9).own_pages == 0, "what nobody could read is nobody's hit"
        for node in (left, right):
            reply = node.client.call(Stats(check=True), 30_000)
            assert isinstance(reply, Counters)
            assert reply.violations == ()
            assert node.scheduler.check() == []
        with SessionClient(daemon.runtime_dir) as admin:
            admin.hello()
            report = admin.call(AdminCheck())
        assert isinstance(report, AdminReport)
        assert report.counters["daemon_copies_failed"] >= 2, "a backup and a restore of the liar's"
        assert report.counters["daemon_movers_started"] == 1, "its mover goes on"


@pytest.mark.parametrize("mode", ["mirrored", "thin"])
def test_a_lane_that_ends_costs_nothing_but_its_speed(daemon: DaemonProcess, mode: Mode) -> None:
    node = Node(daemon, "a", mode)
    node.serve(1, 1, 2, 3)
    link = node.client._link
    assert isinstance(link, LaneLink)
    lane = link._lane
    assert lane is not None
    lane._sock.shutdown(socket.SHUT_RDWR)
    assert node.serve(2, *range(1, 25)).error == "", "long enough for the arena, were there one"
    node.settle()
    assert lane.closed
    assert node.client.lost == ""
    assert node.serve(3, *range(1, 25), 30).own_pages == 24
    node.close()


def test_a_client_without_a_lane_says_the_same_by_zeromq(daemon: DaemonProcess) -> None:
    pool = SharedPool(page_size=PAGE_SIZE, page_count=32, bytes_per_token=256)
    client = DaemonClient.connect(
        daemon.runtime_dir, pool, instance="z", mode="thin", deadlines=PATIENT, lane=False
    )
    tokens = pack_tokens(list(range(16 * PAGE_SIZE)))
    inserted = client.call(Insert("r", 1, KEY, tokens, pack_pages(range(16)), 1, 0, (0, 0)))
    assert isinstance(inserted, Inserted)
    found = client.call(Match("r", 1, KEY, tokens))
    assert isinstance(found, Matched)
    assert found.own_pages == 16
    client.close()
    pool.close()


def test_a_call_is_as_long_for_a_long_prompt_as_for_a_short_one(
    daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = SharedPool(page_size=PAGE_SIZE, page_count=2_048, bytes_per_token=16)
    client = DaemonClient.connect(
        daemon.runtime_dir, pool, instance="a", mode="thin", deadlines=PATIENT
    )
    sizes: list[int] = []
    real = client._link.send

    def send(frame: bytes) -> bool:
        sizes.append(len(frame))
        return real(frame)

    monkeypatch.setattr(client._link, "send", send)
    for span, pages in enumerate((300, 1_600), 1):
        tokens = pack_tokens([span] * PAGE_SIZE * pages)
        rows = pack_pages(range((span - 1) * 300, (span - 1) * 300 + pages))
        inserted = client.call(Insert("r", 1, KEY, tokens, rows, span, 0, (0, 0)))
        assert isinstance(inserted, Inserted)
        found = client.call(Match("r", 1, KEY, tokens))
        assert isinstance(found, Matched)
        assert (found.own_pages, found.own) == (pages, rows)
    assert max(sizes) < 120
    client.close()
    pool.close()
