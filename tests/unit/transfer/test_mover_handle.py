"""A real mover process: copies between real processes' memory, death in every direction."""

import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from directory.core.events import CopyDone
from tests.descriptors import open_descriptors
from tests.unit.transfer.support import HOST, OwnedPool, copy, part, slot, small_layout, small_tier
from transfer.host_tier import HostTierMemory
from transfer.ipc.channel import ChannelClosed
from transfer.ipc.sync import SyncHandle
from transfer.layout import PoolLayout, page_first
from transfer.messages import Imported, Pong, Ready, Released, Reply, TierOpened
from transfer.mover_handle import MoverHandle

DEADLINE_S = 60
ATTEMPTS_MAX = 50
FORWARD = 0

# Its own process, so that it can be killed: starts a mover, says which, and waits for ever.
PARENT = """
import os, sys
from transfer.mover_handle import MoverHandle
handle = MoverHandle.spawn()
sys.stdout.write(f"{handle.pid}\\n")
sys.stdout.flush()
sys.stdin.read()
"""


def wait_readable(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    assert poller.poll(DEADLINE_S * 1000), "nothing came before the deadline"


def take(handle: MoverHandle, count: int = 1) -> list[Reply]:
    """The next replies, as a poll loop would take them."""
    replies: list[Reply] = []
    while len(replies) < count:
        handle.flush()
        wait_readable(handle.fileno())
        replies += handle.receive()
    return replies


def done(handle: MoverHandle) -> CopyDone:
    (reply,) = take(handle)
    assert isinstance(reply, CopyDone)
    return reply


@pytest.fixture
def handle() -> Iterator[MoverHandle]:
    """A mover process that is up."""
    made = MoverHandle.spawn()
    assert take(made) == [Ready(made.pid, "cpu")]
    yield made
    made.close()


MakePool = Callable[[int, PoolLayout], OwnedPool]


@pytest.fixture
def make_pool(handle: MoverHandle) -> Iterator[MakePool]:
    """Make pools that the mover has imported, each page with a pattern of its own."""
    made: list[OwnedPool] = []

    def make(number: int, layout: PoolLayout) -> OwnedPool:
        pool = OwnedPool(layout)
        made.append(pool)
        pool.fill(number)
        handle.import_pool(number, layout, pool.handles, pool.fds)
        assert take(handle) == [Imported(number, True)]
        return pool

    yield make
    for pool in made:
        pool.close()


@pytest.fixture
def tier(handle: MoverHandle) -> Iterator[HostTierMemory]:
    """A host tier that the mover has open."""
    made = small_tier(small_layout())
    assert handle.open_tier(made) == 1
    assert take(handle) == [TierOpened(True, 4)]
    yield made
    made.close()


def test_pages_go_from_one_pool_through_the_tier_into_another_and_directly(
    handle: MoverHandle, make_pool: MakePool, tier: HostTierMemory
) -> None:
    layout = small_layout()
    one, two = make_pool(1, layout), make_pool(2, layout)
    slots = [slot(i) for i in (0, 9, 31)]
    words = [(1, 0, 0), (1, 5, 0)]
    handle.submit(copy(1, "backup", part(1, [4, 2, 9], HOST, slots), words=words))
    first = done(handle)
    assert (first.op, first.outcome, first.nbytes) == (1, "ok", 3 * layout.page_bytes)
    handle.submit(copy(2, "load_back", part(HOST, slots, 2, [0, 15, 7])))
    assert done(handle).outcome == "ok"
    assert [two.read_page(p) for p in (0, 15, 7)] == [one.pattern(1, p) for p in (4, 2, 9)]
    handle.submit(copy(3, "peer_copy", part(2, [15, 1], 1, [0, 1]), words=[(2, 0, 0)]))
    assert done(handle).outcome == "ok"
    assert one.read_page(0) == one.pattern(1, 2)
    assert one.read_page(1) == two.pattern(2, 1)
    assert one.read_page(3) == one.pattern(1, 3)
    handle.release_pool(1)
    assert take(handle) == [Released(1)]
    handle.submit(copy(4, "peer_copy", part(2, [0], 1, [0])))
    assert done(handle).outcome == "void"


def test_a_word_bumped_before_the_copy_voids_it(handle: MoverHandle, make_pool: MakePool) -> None:
    one, two = (make_pool(n, small_layout()) for n in (1, 2))
    value = one.words.bump(6)
    handle.submit(copy(1, "peer_copy", part(1, [0], 2, [0]), words=[(1, 6, value - 1)]))
    assert done(handle).outcome == "void"
    assert two.read_page(0) == two.pattern(2, 0), "nothing was copied"
    handle.submit(copy(2, "peer_copy", part(1, [0], 2, [0]), words=[(1, 6, value)]))
    assert done(handle).outcome == "ok"


def test_a_word_bumped_while_bytes_are_moving_voids_the_copy(
    handle: MoverHandle, make_pool: MakePool
) -> None:
    # 32 MiB in slices take the mover milliseconds; the first byte's arrival takes microseconds to
    # see. Should this process sleep through a copy, that copy is rightly ok, and the next is tried.
    layout = page_first(layers=4, page_size=64, page_count=32, heads=8, head_dim=128, itemsize=4)
    one, two = OwnedPool(layout), OwnedPool(layout)
    for number, pool in ((1, one), (2, two)):
        handle.import_pool(number, layout, pool.handles, pool.fds)
        assert take(handle) == [Imported(number, True)]
    source, target = one.allocations[0].view, two.allocations[0].view
    pages = range(layout.page_count)
    outcome = "ok"
    for attempt in range(1, ATTEMPTS_MAX + 1):
        source[0] = attempt
        target[len(target) - 1] = 0
        source[len(source) - 1] = 1
        word = (1, 3, one.words.read(3))
        handle.submit(copy(attempt, "peer_copy", part(1, pages, 2, pages), words=[word]))
        while target[0] != attempt:
            pass
        one.words.bump(3)
        finished = done(handle)
        outcome = finished.outcome
        if outcome == "void":
            assert "span word 3" in finished.detail
            assert finished.nbytes > 0
            break
        assert target[len(target) - 1] == 1, "an ok copy is complete"
    assert outcome == "void"
    for number in (1, 2):
        handle.release_pool(number)
    take(handle, 2)
    one.close()
    two.close()


@pytest.mark.slow
def test_a_fence_that_never_passes_fails_its_copy_and_no_other(
    handle: MoverHandle, make_pool: MakePool
) -> None:
    make_pool(1, small_layout())
    handle.submit(copy(1, "peer_copy", part(1, [0], 1, [1]), fences=[(1, FORWARD, 1)]))
    handle.submit(copy(2, "peer_copy", part(1, [2], 1, [3])))
    assert done(handle).op == 2
    late = done(handle)
    assert (late.op, late.outcome) == (1, "failed")
    assert late.detail.startswith("fence timeout: pool 1 forward timeline")


def test_a_forged_layout_is_refused_and_the_mover_goes_on(handle: MoverHandle) -> None:
    pool = OwnedPool(small_layout())
    buffers = pool.layout.buffers
    outside = msgspec.structs.replace(buffers[0], offset=1 << 40)
    forged = msgspec.structs.replace(pool.layout, buffers=(outside, *buffers[1:]))
    handle.import_pool(1, forged, pool.handles, pool.fds)
    (answer,) = take(handle)
    assert isinstance(answer, Imported)
    assert not answer.ok
    handle.ping(5)
    assert take(handle) == [Pong(5)]
    pool.close()


def test_a_killed_mover_is_seen_through_its_pidfd_and_its_channel(handle: MoverHandle) -> None:
    assert handle.exit_status() is None
    handle.kill()
    wait_readable(handle.pidfd)
    assert handle.exit_status() == -signal.SIGKILL
    with pytest.raises(ChannelClosed):
        take(handle)
    assert repr(handle).endswith("exited -9>")
    assert handle.close() == -signal.SIGKILL
    assert handle.close() == -signal.SIGKILL


def test_a_mover_that_is_asked_to_shut_down_exits_cleanly(handle: MoverHandle) -> None:
    handle.shutdown()
    wait_readable(handle.pidfd)
    assert handle.exit_status() == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_a_terminal_or_a_service_sends_to_all_does_not_end_a_mover(
    handle: MoverHandle, number: signal.Signals
) -> None:
    handle.terminate(number)
    handle.ping(1)
    assert take(handle) == [Pong(1)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_mover_that_is_still_starting_is_not_ended_either(number: signal.Signals) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    handle = MoverHandle.spawn()
    handle.terminate(number)  # long before its first line of Python
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
    assert take(handle) == [Ready(handle.pid, "cpu")]
    assert blocked(handle.pid) & 1 << (number - 1) == 0
    handle.close()


def test_a_pools_sync_reaches_the_mover(handle: MoverHandle) -> None:
    pool = OwnedPool(small_layout())
    handle.import_pool(1, pool.layout, pool.handles, pool.fds, SyncHandle("smoke"))
    (answer,) = take(handle)
    assert isinstance(answer, Imported)
    assert "not 'smoke'" in answer.detail
    pool.close()


def test_a_closed_channel_ends_the_mover(handle: MoverHandle) -> None:
    handle.channel.close()
    wait_readable(handle.pidfd)
    assert handle.exit_status() == 0


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_mover_dies_with_its_killed_parent(stopped: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with parent:
        assert parent.stdout is not None
        mover = int(parent.stdout.readline())
        pidfd = os.pidfd_open(mover)
        wait_for_death_signal(mover)
        if stopped:  # then the end of the channel alone could not end it
            os.kill(mover, signal.SIGSTOP)
        parent.kill()
        wait_readable(pidfd)
        os.close(pidfd)


def blocked(pid: int) -> int:
    """The signals that a process blocks, as a mask."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["SigBlk"], 16)


def wait_for_death_signal(pid: int) -> None:
    """Until the mover lets interrupts through again, which were blocked when it was started: it
    does that once it has asked to die, and ignores them. (What it ignores says nothing: that is
    inherited.)"""
    give_up = time.monotonic() + DEADLINE_S
    while blocked(pid) & 1 << (signal.SIGINT - 1):
        assert time.monotonic() < give_up, "the mover did not come up"
        time.sleep(0.001)


def test_a_mover_whose_death_nobody_could_see_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def no_more(pid: int, *_: int) -> int:
        started.append(pid)
        raise OSError(errno.EMFILE, "Too many open files")

    before = open_descriptors()
    monkeypatch.setattr(os, "pidfd_open", no_more)
    with pytest.raises(OSError, match="Too many"):
        MoverHandle.spawn()
    with pytest.raises(ChildProcessError):
        os.waitpid(started[0], 0)
    assert open_descriptors() == before
