"""Other users of a group may ask a daemon, and nothing else; strangers may not even that."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from directory.protocol.admin import (
    AdminCheck,
    AdminExplain,
    AdminRequest,
    AdminStats,
    AdminTree,
    StatsReport,
    TreeReport,
)
from directory.protocol.messages import Register, SessionRefused
from tests.integration.daemon.support import (
    DEADLINE_S,
    DaemonProcess,
    RawClient,
    SessionClient,
)

GROUP, STRANGER = 54_321, 54_322


def asked_as(uid: int, group: int, folder: Path) -> int:
    """Ask as another user; 0 when that was answered, else the error's number."""
    pid = os.fork()
    if pid == 0:
        status = 255
        try:
            os.setgroups([])
            os.setgid(group)
            os.setuid(uid)
            with SessionClient(folder) as reader:
                reader.hello()
                status = 0 if isinstance(reader.call(AdminStats()), StatsReport) else 254
        except OSError as error:
            status = error.errno or 253
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_reader_s_socket_answers_questions(tmp_path: Path) -> None:
    runtime_dir, readers = tmp_path / "rt", tmp_path / "ask"
    with (
        DaemonProcess(runtime_dir, "--readers-dir", str(readers)),
        RawClient(runtime_dir, "a") as client,
        SessionClient(readers) as reader,
    ):
        client.insert([1] * 8, [0, 1])
        reader.hello()
        assert isinstance(reader.call(AdminStats()), StatsReport)
        assert isinstance(reader.call(AdminTree()), TreeReport)
        assert type(reader.call(AdminExplain(b"\1\0\0\0"))).__name__ == "ExplainReport"
    assert not (readers / "session.sock").exists()


@pytest.mark.parametrize("question", [AdminCheck(), Register("x", b"f", "thin", b"", b"")])
def test_a_reader_registers_nothing_and_holds_nobody_up(
    tmp_path: Path, question: AdminRequest | Register
) -> None:
    runtime_dir, readers = tmp_path / "rt", tmp_path / "ask"
    with (
        DaemonProcess(runtime_dir, "--readers-dir", str(readers)),
        SessionClient(readers) as reader,
    ):
        reader.hello()
        refused = reader.call(question)
        assert isinstance(refused, SessionRefused)
        assert refused.code == "not_authorised"


def test_readers_are_few(tmp_path: Path) -> None:
    runtime_dir, readers = tmp_path / "rt", tmp_path / "ask"
    with DaemonProcess(runtime_dir, "--readers-dir", str(readers)):
        here = [SessionClient(readers) for _ in range(17)]
        said = [type(reader.hello()).__name__ for reader in here[:16]]
        assert said == ["Welcome"] * 16
        refused = here[16].hello()
        assert isinstance(refused, SessionRefused)
        assert refused.code == "too_many"
        with RawClient(runtime_dir, "a"):
            for reader in here:
                reader.close()


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_a_folder_that_others_may_enter_or_change_stops_the_start(
    tmp_path: Path, mode: int
) -> None:
    folder = tmp_path / "ask"
    folder.mkdir()
    folder.chmod(mode)
    daemon = DaemonProcess(tmp_path / "rt", "--readers-dir", str(folder), wait=False)
    with daemon:
        assert daemon.process.wait(DEADLINE_S) == 1
    assert "chmod 750" in daemon.log()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be other users")
def test_another_user_of_the_group_may_ask_and_a_stranger_may_not(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory() as outside:  # pytest's folders are its user's alone
        os.chmod(outside, 0o711)
        readers = Path(outside) / "ask"
        readers.mkdir()
        readers.chmod(0o750)
        os.chown(readers, -1, GROUP)
        with DaemonProcess(tmp_path / "rt", "--readers-dir", str(readers)):
            assert asked_as(STRANGER, GROUP, readers) == 0
            assert asked_as(STRANGER, STRANGER, readers) == errno.EACCES
