"""Schedulers die, stop, come back and come twice: a kernel object says so, never silence."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from directory.core.actions import Matched, Refused
from directory.core.events import Insert, Stats, Unlock
from directory.core.limits import CLOSED_A_STEP_MAX, FENCE_DEADLINE_MS, MOVER_SILENCE_MS_MAX
from directory.core.namespace import NamespaceKey
from directory.protocol.messages import SessionRefused
from tests.integration.daemon.scheduler_process import PAGES, STEPS, scheduler, tokens
from tests.integration.daemon.support import (
    PAGE_SIZE,
    DaemonProcess,
    Pool,
    RawClient,
    SessionClient,
    packed,
    wait_until,
)

OWN_PIDS = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def mapped(process: int) -> int:
    """Mappings of pools' memory in a process."""
    return Path(f"/proc/{process}/maps").read_text(encoding="utf-8").count("/memfd:pool-")


def descriptors(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


@contextmanager
def nothing_stays(daemon: DaemonProcess) -> Iterator[RawClient]:
    """What dies in here leaves no lease, page, copy, descriptor or mapping behind."""
    with RawClient(daemon.runtime_dir, "witness") as witness:
        # A mover closes what came with an import after it has answered, and before it goes on.
        with RawClient(daemon.runtime_dir, "before"):
            pass
        wait_until(lambda: at_rest(witness))
        figures = witness.stats()
        mover = figures["daemon_mover_pid"]
        before = [mapped(mover), *map(descriptors, (daemon.process.pid, mover))]
        yield witness
        wait_until(lambda: at_rest(witness))
        after = witness.stats()
        assert (after["leases"], after["daemon_sessions"]) == (0, figures["daemon_sessions"])
        assert after["daemon_mover_pid"] == mover, "the mover had nothing to do with it"
        wait_until(
            lambda: before == [mapped(mover), *map(descriptors, (daemon.process.pid, mover))]
        )


def at_rest(witness: RawClient) -> bool:
    """Whether nobody else is registered, nothing is copied and nothing is being unmapped."""
    figures = witness.stats()
    under_way = ("copies_in_flight", "backups_waiting", "daemon_unmapping")
    return figures["pools"] == 1 and not any(figures[name] for name in under_way)


def pages_of_others(client: RawClient, instance: str) -> int:
    """How much of an instance's path is in some other pool."""
    found = client.match(tokens(instance))
    assert isinstance(found, Matched)
    client.report(Unlock(found.receipt))
    return found.peer_pages


@pytest.mark.parametrize("step", [step for step in STEPS if step != "forked"])
def test_a_killed_scheduler_leaves_nothing_and_its_id_can_be_used_at_once_f62(
    daemon: DaemonProcess, step: str
) -> None:
    with nothing_stays(daemon) as witness:
        for _ in range(2):
            with scheduler(daemon.runtime_dir, "victim", step) as victim:
                if step != "registered":
                    wait_until(lambda: pages_of_others(witness, "victim") == PAGES)
                victim.signal(signal.SIGKILL)
                victim.process.wait(60)
                wait_until(lambda: witness.stats()["pools"] == 1)
                assert pages_of_others(witness, "victim") == 0
        with RawClient(daemon.runtime_dir, "victim") as third:
            assert third.generation == 3


def test_a_process_that_dies_is_gone_though_its_child_holds_the_connection_f62(
    daemon: DaemonProcess,
) -> None:
    with (
        nothing_stays(daemon) as witness,
        scheduler(daemon.runtime_dir, "parent", "forked") as parent,
    ):
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert children
        parent.signal(signal.SIGKILL)
        parent.process.wait(60)
        try:
            wait_until(lambda: witness.stats()["pools"] == 1)
        finally:
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)


def test_a_connection_that_ends_is_the_end_though_the_process_lives(
    daemon: DaemonProcess,
) -> None:
    with nothing_stays(daemon) as witness, RawClient(daemon.runtime_dir, "a") as a:
        a.insert(range(100, 116), range(4))
        a.session.close()
        wait_until(lambda: witness.stats()["pools"] == 1)


def test_cleaning_up_after_a_scheduler_never_makes_the_others_wait_f63(
    daemon: DaemonProcess,
) -> None:
    # Its load waits for a fence that now nobody will ever let pass.
    with (
        nothing_stays(daemon) as witness,
        scheduler(daemon.runtime_dir, "victim", "loading") as victim,
    ):
        wait_until(lambda: witness.stats()["copies_in_flight"])
        victim.signal(signal.SIGKILL)
        slowest = 0.0
        for number in range(50):
            began = time.monotonic()
            witness.insert(range(5_000 + 4 * number, 5_004 + 4 * number), [number])
            witness.stats()
            slowest = max(slowest, time.monotonic() - began)
        wait_until(lambda: witness.stats()["pools"] == 1)
        assert slowest < FENCE_DEADLINE_MS / 2_000, "nobody waits for a fence with the daemon"
        assert "daemon_movers_lost" not in witness.stats()


def test_clean_ups_under_way_are_shown_until_the_mover_is_done_with_them_f63(
    daemon: DaemonProcess,
) -> None:
    with (
        nothing_stays(daemon) as witness,
        scheduler(daemon.runtime_dir, "victim", "registered") as victim,
    ):
        wait_until(lambda: not witness.stats()["copies_in_flight"])
        figures = witness.stats()
        assert (figures["pools"], figures["daemon_unmapping"]) == (2, 0)
        mover = os.pidfd_open(figures["daemon_mover_pid"])
        try:
            signal.pidfd_send_signal(mover, signal.SIGSTOP)
            victim.signal(signal.SIGKILL)
            wait_until(lambda: witness.stats()["daemon_unmapping"] == 1)
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(mover, signal.SIGCONT)
            os.close(mover)
        wait_until(lambda: witness.stats()["daemon_unmapping"] == 0)


def test_a_scheduler_that_stands_still_is_never_reaped_f65(tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "rt") as daemon,
        RawClient(daemon.runtime_dir, "witness") as witness,
        scheduler(daemon.runtime_dir, "stopped", "leased") as stopped,
    ):
        wait_until(lambda: witness.stats().get("pages_backed_up") == PAGES)
        stopped.signal(signal.SIGSTOP)
        figures = witness.stats()
        leases = figures["leases"]
        gone_by = time.monotonic() + 2 * MOVER_SILENCE_MS_MAX / 1000
        while time.monotonic() < gone_by:  # others work, and the longest patience goes by
            figures = witness.stats()
        assert (figures["pools"], figures["leases"]) == (2, leases)
        assert pages_of_others(witness, "stopped") == PAGES
        stopped.signal(signal.SIGCONT)
        assert stopped.ask() == "2"


def test_nothing_of_an_old_generation_has_an_effect_f68(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "same") as old:
        old.insert(range(100, 116), range(4))
        found = old.match(range(100, 116))
        assert isinstance(found, Matched)
        old.session.close()
        with RawClient(daemon.runtime_dir, "witness") as witness:
            wait_until(lambda: at_rest(witness))  # or nodes would go with the copies that end
            with RawClient(daemon.runtime_dir, "same") as new:
                assert new.generation == 2
                new.insert(range(100, 108), range(2))
                again = new.match(range(100, 108))
                assert isinstance(again, Matched)
                wait_until(lambda: not witness.stats()["copies_in_flight"])
                before = witness.stats()
                late = Insert(
                    "r", 0, NamespaceKey(), packed(range(200, 208)), packed([1, 2]), 9, 0, (0, 0)
                )
                for seq, body in enumerate((late, Unlock(again.receipt), Stats()), 1):
                    old.send(body, seq=seq)
                    refused = old.receive().body
                    assert isinstance(refused, Refused)
                    assert refused.code in ("unknown_pool", "not_authorised")
                after = witness.stats()
                assert {k: after[k] for k in ("nodes", "leases", "pools")} == {
                    k: before[k] for k in ("nodes", "leases", "pools")
                }
                assert new.stats()["pools"] == 2


def test_a_duplicate_is_refused_as_long_as_the_first_one_lives_stopped_or_not_f68(
    daemon: DaemonProcess,
) -> None:
    pool = Pool()

    def attempt() -> object:
        with SessionClient(daemon.runtime_dir) as session:
            session.hello()
            return session.call(pool.register("twice"), pool.fds)

    with scheduler(daemon.runtime_dir, "twice", "published") as first:
        for how in (signal.SIGCONT, signal.SIGSTOP):
            first.signal(how)
            refused = attempt()
            assert isinstance(refused, SessionRefused)
            assert refused.code == "instance_live"
            assert "twice" in refused.message
        first.signal(signal.SIGCONT)
        assert first.ask() == "1"
    pool.close()


def test_others_are_answered_between_the_steps_of_a_large_pools_end(tmp_path: Path) -> None:
    """What is left of a dead pool is taken out bit by bit, and is a hit for nobody meanwhile."""
    pages = 40 * CLOSED_A_STEP_MAX
    with (
        DaemonProcess(tmp_path / "rt", "--host-tier", "0") as daemon,
        nothing_stays(daemon) as witness,
    ):
        large = RawClient(daemon.runtime_dir, "large", page_count=pages)
        key, now = NamespaceKey(), large.pool_memory.now()
        for page in range(pages):
            path = packed([page] * PAGE_SIZE)
            large.send(Insert("r", 0, key, path, packed([page]), page + 1, 0, now))
            while large.seq - large.acked > pages // 10:
                large.receive()
        while large.acked < large.seq:
            large.receive()
        found = witness.match([pages - 1] * PAGE_SIZE)
        assert isinstance(found, Matched)
        assert found.peer_pages == 1
        witness.report(Unlock(found.receipt))
        assert witness.stats()["nodes"] == pages
        large.close()
        left: list[int] = []
        while (figures := witness.stats(check=len(left) % 8 == 3))["pools"] > 1:
            left.append(figures["nodes"])
            if left[-1] < pages:
                found = witness.match([pages - 1] * PAGE_SIZE)
                assert isinstance(found, Matched)
                assert found.peer_pages == 0
        between = {nodes for nodes in left if 0 < nodes < pages}
        assert between, f"nobody was answered before the end was over: {left}"
        assert left == sorted(left, reverse=True)
        assert witness.stats()["nodes"] == 0


@pytest.fixture(scope="module")
def own_pids() -> tuple[str, ...]:
    """A command that runs another one as process 1 of a namespace of its own."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    tried = subprocess.run([*OWN_PIDS, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"namespaces cannot be made here: {tried.stderr.strip()}")
    return OWN_PIDS


def test_schedulers_that_are_process_1_of_their_namespaces_are_told_apart_f68(
    daemon: DaemonProcess, own_pids: tuple[str, ...]
) -> None:
    with (
        nothing_stays(daemon) as witness,
        scheduler(daemon.runtime_dir, "a", "leased", prefix=own_pids) as a,
        scheduler(daemon.runtime_dir, "b", "leased", prefix=own_pids) as b,
    ):
        assert witness.stats()["pools"] == 3
        a.signal(signal.SIGKILL)
        wait_until(lambda: witness.stats()["pools"] == 2)
        assert b.ask() == "2"
        assert pages_of_others(witness, "b") == PAGES
        with scheduler(daemon.runtime_dir, "a", "published", prefix=own_pids) as again:
            assert again.ask() == "3"


def test_a_daemon_in_a_namespace_of_its_own_sees_schedulers_outside_die_f68(
    tmp_path: Path, own_pids: tuple[str, ...]
) -> None:
    program = (*own_pids, sys.executable, "-m", "directory.cli.main", "serve")
    with (
        DaemonProcess(tmp_path / "rt", program=program) as daemon,
        RawClient(daemon.runtime_dir, "witness") as witness,
    ):
        with scheduler(daemon.runtime_dir, "outside", "loading") as outside:
            assert witness.stats()["pools"] == 2
            outside.signal(signal.SIGKILL)
            wait_until(lambda: witness.stats()["pools"] == 1)
        with scheduler(daemon.runtime_dir, "forked", "forked", prefix=own_pids):
            assert witness.stats()["pools"] == 2
        wait_until(lambda: witness.stats()["pools"] == 1)
        daemon.kill()  # which ends all of its namespace; `unshare` itself obeys nothing less
