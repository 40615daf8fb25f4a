"""A writer that dies leaves nothing half-written behind, and a daemon that dies no memory."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from directory.core.actions import Matched
from tests.integration.daemon.support import DaemonProcess, RawClient, wait_until
from tests.integration.daemon.test_mover_loss import publish, restore_all

KILLS = 5


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing for a while; shorter than a mover may be silent."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("when", ["before its insert", "in the middle of its backup"])
def test_a_key_whose_writer_died_is_not_seen_and_can_be_inserted_at_once_f70(
    tmp_path: Path, when: str
) -> None:
    with (
        DaemonProcess(tmp_path / "rt", "--mover-silence-ms-max", "20000") as daemon,
        RawClient(daemon.runtime_dir, "b") as b,
        RawClient(daemon.runtime_dir, "c") as c,
    ):
        a = RawClient(daemon.runtime_dir, "a")
        tokens = range(12)
        with stopped(b.stats()["daemon_mover_pid"]):  # so that a backup stays under way
            for page in (0, 1, 2):
                a.pool_memory.write(page, b"half")
            if when != "before its insert":
                a.insert(tokens, [0, 1, 2])
            a.close()
            wait_until(lambda: nothing_of(b, tokens))
            assert publish(b, 0, [5, 6, 7]) == tokens, "the key is free at once"
        wait_until(lambda: b.stats().get("pages_backed_up", 0) == 3)
        assert b.stats()["host_pages"] == 3, "and the slots of the dead one's backup are back"
        assert restore_all(c, tokens, [9, 10, 11]).landed
        assert [c.pool_memory.read(page) for page in (9, 10, 11)] == [
            b.pool_memory.read(page) for page in (5, 6, 7)
        ]


def nothing_of(client: RawClient, tokens: range) -> bool:
    """Whether nothing of a path can be restored."""
    matched = client.match(tokens)
    assert isinstance(matched, Matched)
    return matched.restorable_pages == matched.own_pages == 0


def shared_memory_of(pid: int) -> set[int]:
    """Inodes of the memory that a process shares under a name of this project's host tier."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "host" in os.readlink(link) and "treecored" in os.readlink(link):
                found.add(link.stat().st_ino)
        except FileNotFoundError:
            continue  # closed meanwhile
    return found


def nobody_holds(inodes: set[int]) -> bool:
    """Whether no process has any of it open; the movers had."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if shared_memory_of(int(folder.name)) & inodes:
                    return False
            except (PermissionError, FileNotFoundError, ProcessLookupError):
                continue
    return True


def test_a_daemon_that_is_killed_again_and_again_leaks_no_shared_memory_f88(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "rt"
    names: list[list[str]] = []
    mapped: list[int] = []
    for kill in range(KILLS):
        with DaemonProcess(folder) as daemon, RawClient(folder, "a") as client:
            publish(client, 0, [0, 1, 2])
            wait_until(lambda: client.stats().get("pages_backed_up", 0) == 3)
            tier = shared_memory_of(daemon.process.pid)
            assert tier, "the host tier is shared with the mover"
            if kill == 0:
                with DaemonProcess(folder, wait=False) as second:
                    assert second.process.wait(60) == 1, "no second one beside it"
            mapped.append(len(tier))
            daemon.kill()
            wait_until(partial(nobody_holds, tier))
        names.append(sorted(path.name for path in folder.iterdir()))
    assert len(set(mapped)) == 1, "every start makes as much as the one before"
    assert names == [names[0]] * KILLS, "nothing is left under a name"
