"""Starting and stopping: one daemon a folder, nothing foreign removed, a quick end."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.daemon.support import DaemonProcess, RawClient, SessionClient, wait_until

STOP_S_MAX = 2.0
STOPS_MAX = 3


def process_is_gone(pid: int) -> bool:
    """Whether no process (other than a zombie) has the id."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def test_a_second_daemon_is_refused_and_names_the_holder_f83(daemon: DaemonProcess) -> None:
    with DaemonProcess(daemon.runtime_dir, wait=False) as second:
        assert second.process.wait(60) == 1
        assert f"process id {daemon.process.pid} " in second.log()
    with RawClient(daemon.runtime_dir, "a") as client:
        assert client.stats()["pools"] == 1


def test_a_daemon_starts_after_another_was_killed_f83(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "rt") as first:
        first.kill()
        assert (tmp_path / "rt" / "session.sock").is_socket()
    with DaemonProcess(tmp_path / "rt"), RawClient(tmp_path / "rt", "a") as client:
        assert client.stats()["pools"] == 1


@pytest.mark.parametrize("name", ["session.sock", "router.sock"])
def test_a_regular_file_at_a_socket_path_is_kept_f83(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "rt"
    folder.mkdir(mode=0o700)
    (folder / name).write_text("precious", encoding="ascii")
    with DaemonProcess(folder, wait=False) as daemon:
        assert daemon.process.wait(60) == 1
        assert "is in the way" in daemon.log()
    assert (folder / name).read_text(encoding="ascii") == "precious"


def test_a_folder_that_others_can_enter_is_refused_with_the_cure(tmp_path: Path) -> None:
    folder = tmp_path / "rt"
    folder.mkdir()
    folder.chmod(0o755)
    with DaemonProcess(folder, wait=False) as daemon:
        assert daemon.process.wait(60) == 1
        assert f"chmod 700 {folder}" in daemon.log()


def test_folder_and_sockets_are_the_users_alone(daemon: DaemonProcess) -> None:
    assert daemon.runtime_dir.stat().st_mode & 0o777 == 0o700
    for name in ("session.sock", "router.sock", "daemon.lock"):
        assert (daemon.runtime_dir / name).stat().st_mode & 0o077 == 0


def test_a_gpu_without_what_it_needs_stops_the_start_with_the_cure(tmp_path: Path) -> None:
    device = "cuda:GPU-12345678-9abc-def0-1234-56789abcdef0"
    with DaemonProcess(tmp_path / "rt", "--device", device, wait=False) as daemon:
        assert daemon.process.wait(60) == 1
        log = daemon.log()
    reason = log[log.index("not started") :]
    # Without the bindings the start stops at once; with them the mover's last word is the reason.
    assert "treecored[cuda]" in reason or "GPU" in reason or "driver" in reason
    assert "Traceback" not in log
    assert "closed the channel" not in reason


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_signal_ends_it_in_order_within_two_seconds(
    tmp_path: Path, how: signal.Signals
) -> None:
    # A busy machine adds to any of them; one that ends in time shows that nothing waits longer.
    took: list[float] = []
    while not took or (took[-1] >= STOP_S_MAX and len(took) < STOPS_MAX):
        with DaemonProcess(tmp_path / f"rt{len(took)}") as daemon:
            with RawClient(daemon.runtime_dir, "a") as client, SessionClient(daemon.runtime_dir):
                mover = client.stats()["daemon_mover_pid"]
                began = time.monotonic()
                assert daemon.stop(how) == 0
                took.append(time.monotonic() - began)
            assert process_is_gone(mover)
            assert sorted(os.listdir(daemon.runtime_dir)) == ["daemon.lock"]
            assert "Traceback" not in daemon.log()
    assert min(took) < STOP_S_MAX, took


def test_a_stop_signal_while_it_starts_is_obeyed(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "rt", wait=False) as daemon:
        wait_until(lambda: "mover started" in daemon.log())
        assert daemon.stop() == 0
    assert not (tmp_path / "rt" / "session.sock").exists()


def test_the_mover_dies_with_a_killed_daemon(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "a") as client:
        mover = client.stats()["daemon_mover_pid"]
        held = [os.readlink(fd) for fd in Path(f"/proc/{mover}/fd").iterdir()]
        assert str(daemon.runtime_dir / "daemon.lock") in held, "a successor waits for the mover"
        daemon.kill()
    wait_until(lambda: process_is_gone(mover))


def test_it_says_ready_in_its_log_and_listens_only_then(daemon: DaemonProcess) -> None:
    assert "ready" in daemon.log()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(str(daemon.runtime_dir / "session.sock"))


def test_a_daemon_that_does_not_start_closes_the_ready_descriptor(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="did not start"):
        DaemonProcess(tmp_path / ("long" * 40))


def test_a_wrong_setting_is_one_sentence_and_exit_status_2(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "rt", "--segment", "12 parsecs", wait=False) as daemon:
        assert daemon.process.wait(60) == 2
        said = daemon.log()
    assert said.count("\n") == 1
    assert "segment" in said
    assert "12 parsecs" in said


def test_the_host_tier_can_be_left_out(tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "rt", "--host-tier", "0") as _,
        RawClient(tmp_path / "rt", "a") as client,
    ):
        client.pool_memory.write(0, b"x")
        client.insert(range(4), [0])
        assert client.stats()["host_pages"] == 0


def test_the_package_has_a_command_named_treecored() -> None:
    command = Path(sys.executable).with_name("treecored")
    if not command.exists():
        pytest.skip("the package is not installed beside this Python")
    done = subprocess.run(
        [command, "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert "serve" in done.stdout
