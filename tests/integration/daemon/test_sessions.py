"""Sessions over the real socket: versions, instances, secrets, junk, and what an end lets go of."""

import os
import resource
import socket
from array import array
from pathlib import Path

import msgspec
import pytest

from directory.core.actions import Refused
from directory.core.events import Stats
from directory.core.limits import FDS_PER_FRAME_MAX
from directory.protocol.codec import decode_session_reply
from directory.protocol.messages import (
    Attach,
    Hello,
    Register,
    Registered,
    SessionRefused,
    SessionReply,
    Welcome,
)
from tests.integration.daemon.support import (
    DEADLINE_S,
    DaemonProcess,
    Pool,
    RawClient,
    SessionClient,
    wait_until,
)
from transfer.ipc.channel import HEADER, ChannelClosed


def open_descriptors(daemon: DaemonProcess) -> int:
    """How many descriptors the daemon has open."""
    return len(os.listdir(f"/proc/{daemon.process.pid}/fd"))


def left_alone(client: RawClient) -> bool:
    """Whether nobody else has a session, or a pool that is not wholly gone."""
    figures = client.stats()
    return (figures["daemon_sessions"], figures["pools"], figures["daemon_unmapping"]) == (1, 1, 0)


class Counting(RawClient):
    """Notes how often it had to ask before it was taken in."""

    tries = 0

    def _register(self, runtime_dir: Path, message: Register) -> SessionReply | None:
        self.tries += 1
        return super()._register(runtime_dir, message)


@pytest.mark.parametrize(("low", "high"), [(0, 0), (2, 2), (7, 9)])
def test_another_version_is_refused_naming_both_f129(
    daemon: DaemonProcess, low: int, high: int
) -> None:
    with SessionClient(daemon.runtime_dir) as session:
        refused = session.hello(low, high)
        assert isinstance(refused, SessionRefused)
        assert refused.code == "version_mismatch"
        assert f"{low} to {high}" in refused.message
        assert "1 to 1" in refused.message
        with pytest.raises(ChannelClosed):
            session.channel.wait_frame(DEADLINE_S)


def test_the_highest_common_version_is_agreed_f129(daemon: DaemonProcess) -> None:
    with SessionClient(daemon.runtime_dir) as session:
        welcome = session.hello(0, 5)
        assert isinstance(welcome, Welcome)
        assert welcome.version == 1
        assert 0 < welcome.epoch < 1 << 63


def test_a_live_instance_id_is_refused_to_a_second_process_f68(daemon: DaemonProcess) -> None:
    pool = Pool()
    with RawClient(daemon.runtime_dir, "same") as first:
        with SessionClient(daemon.runtime_dir) as session:
            session.hello()
            refused = session.call(pool.register("same"), pool.fds)
        assert isinstance(refused, SessionRefused)
        assert refused.code == "instance_live"
        assert first.stats()["pools"] == 1
    pool.close()


def test_an_instance_that_restarts_is_taken_in_the_first_time_it_asks(
    daemon: DaemonProcess,
) -> None:
    at_once = 0
    for _ in range(20):
        with Counting(daemon.runtime_dir, "again") as client:
            at_once += client.tries == 1
    # A daemon that was kept from running may hear of an end and of who comes after it together.
    assert at_once >= 15


def test_a_restarted_instance_takes_over_with_the_next_generation_f68(
    daemon: DaemonProcess,
) -> None:
    with RawClient(daemon.runtime_dir, "same") as first:
        before = (first.pool, first.generation)
        assert first.generation == 1
    with RawClient(daemon.runtime_dir, "witness") as witness:
        wait_until(lambda: witness.stats()["pools"] == 1)
        with RawClient(daemon.runtime_dir, "same") as second:
            assert second.generation == 2
            assert second.pool != before[0]


def test_two_instances_of_one_process_are_two_pools_f68(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "a") as a, RawClient(daemon.runtime_dir, "b") as b:
        assert a.pool != b.pool
        assert a.registered.secret != b.registered.secret
        assert len(a.registered.secret) == 32


def test_a_forged_secret_is_refused_and_harms_nobody(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "a") as victim, RawClient(daemon.runtime_dir, "b") as thief:
        for secret in (bytes(32), b"", victim.registered.secret[:-1], thief.registered.secret):
            refused = thief.ask(Attach(victim.pool, secret), seq=0)
            assert isinstance(refused, Refused)
            assert refused.code == "not_authorised"
        assert victim.stats()["daemon_frames_not_authorised"] == 4
        assert thief.stats()["pools"] == 2


def test_a_connection_that_has_not_attached_is_refused(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "a") as client:
        client.dealer = client.connect()
        refused = client.ask(Stats(), seq=0)
        assert isinstance(refused, Refused)
        assert refused.code == "not_authorised"


def test_a_reaped_pool_is_told_so_at_once_and_registers_again_f65(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "w") as witness, RawClient(daemon.runtime_dir, "a") as a:
        a.session.close()
        wait_until(lambda: witness.stats()["pools"] == 1)
        first = a.ask(Stats(), seq=0)
        assert isinstance(first, Refused)
        assert first.code == "not_authorised"
        second = a.ask(Attach(a.pool, a.registered.secret), seq=0)
        assert isinstance(second, Refused)
        assert second.code == "unknown_pool"
        with RawClient(daemon.runtime_dir, "a") as again:
            assert again.generation == 2
            assert again.stats()["pools"] == 2


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x00" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x91" * 100_000,
        msgspec.msgpack.encode({"type": "hello"}),
        msgspec.msgpack.encode({"type": "no such message"}),
        msgspec.msgpack.encode({"type": "hello", "version_min": "1", "version_max": 1}),
    ],
    ids=["empty", "zeros", "http", "deep", "fields missing", "unknown tag", "wrong type"],
)
def test_a_session_that_sends_junk_is_told_and_closed_and_others_go_on_f79(
    daemon: DaemonProcess, payload: bytes
) -> None:
    with RawClient(daemon.runtime_dir, "a") as good:
        with SessionClient(daemon.runtime_dir) as bad:
            refused = bad.raw(payload)
            assert isinstance(refused, SessionRefused)
            assert refused.code == "bad_message"
            with pytest.raises(ChannelClosed):
                bad.channel.wait_frame(DEADLINE_S)
        assert good.stats()["daemon_sessions_refused"] == 1


def test_a_frame_header_beyond_the_limits_ends_only_its_session_f79(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir, "a") as good:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(DEADLINE_S)
            sock.connect(str(daemon.runtime_dir / "session.sock"))
            sock.sendall(HEADER.pack(100 * 1024 * 1024, 0) + b"x" * 1000)
            said = sock.recv(65536)
        refused = decode_session_reply(said[HEADER.size :])
        assert isinstance(refused, SessionRefused)
        assert refused.code == "too_large"
        assert good.stats()["daemon_sessions"] == 1


def test_register_before_hello_and_a_second_register_are_refused(daemon: DaemonProcess) -> None:
    pool = Pool()
    with SessionClient(daemon.runtime_dir) as session:
        refused = session.call(pool.register("a"), pool.fds)
        assert isinstance(refused, SessionRefused)
        assert "Hello" in refused.message
    with SessionClient(daemon.runtime_dir) as session:
        session.hello()
        assert isinstance(session.call(pool.register("a"), pool.fds), Registered)
        refused = session.call(pool.register("b"), pool.fds)
        assert isinstance(refused, SessionRefused)
        assert refused.code == "bad_message"
    pool.close()


def test_a_second_hello_is_refused(daemon: DaemonProcess) -> None:
    with SessionClient(daemon.runtime_dir) as session:
        session.hello()
        assert isinstance(session.hello(), SessionRefused)


def test_a_pool_that_cannot_be_imported_is_refused_with_the_reason(
    daemon: DaemonProcess,
) -> None:
    pool = Pool()
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, pool.layout.allocation_bytes[0])
    with SessionClient(daemon.runtime_dir) as session:
        session.hello()
        refused = session.call(pool.register("a"), [unsealed, *pool.fds[1:]])
        assert isinstance(refused, SessionRefused)
        assert refused.code == "import_failed"
        assert "seal" in refused.message
    os.close(unsealed)
    # The instance id is free again at once.
    with RawClient(daemon.runtime_dir, "a") as client:
        assert client.stats()["pools"] == 1
    pool.close()


def test_sessions_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    with (
        DaemonProcess(tmp_path / "rt", "--sessions-max", "1") as daemon,
        RawClient(daemon.runtime_dir, "a") as client,
    ):
        with SessionClient(daemon.runtime_dir) as second:
            payload, _ = second.channel.wait_frame(DEADLINE_S)
            refused = decode_session_reply(payload)
            assert isinstance(refused, SessionRefused)
            assert refused.code == "too_many"
        assert client.stats()["daemon_sessions"] == 1


def test_no_descriptor_is_left_after_sessions_of_every_kind_have_ended(
    daemon: DaemonProcess,
) -> None:
    with RawClient(daemon.runtime_dir, "witness") as witness:
        before = 0
        for number in range(6):
            if number == 1:  # what is made for the first of a kind is there, and all else is gone
                wait_until(lambda: left_alone(witness))
                before = open_descriptors(daemon)
            with RawClient(daemon.runtime_dir, f"good {number}"):
                pass
            pool = Pool()
            with SessionClient(daemon.runtime_dir) as session:
                session.call(Hello(1, 1), pool.fds)  # descriptors that nobody wants
            with SessionClient(daemon.runtime_dir) as session:
                session.call(pool.register("early"), pool.fds)
            with SessionClient(daemon.runtime_dir) as session:
                session.hello()
                session.call(pool.register("witness"), pool.fds)
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
                sock.connect(str(daemon.runtime_dir / "session.sock"))
                fds = array("i", pool.fds[:1] * FDS_PER_FRAME_MAX)
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)]
                sock.sendmsg([HEADER.pack(10, len(fds))], rights)  # a frame that never ends
            pool.close()
        wait_until(lambda: left_alone(witness) and open_descriptors(daemon) == before)


def test_a_daemon_that_is_out_of_descriptors_turns_sessions_away_and_serves_on(
    daemon: DaemonProcess,
) -> None:
    pid = daemon.process.pid
    with RawClient(daemon.runtime_dir, "a") as good:
        good.stats()
        lowest = max(int(fd) for fd in os.listdir(f"/proc/{pid}/fd")) + 1
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest + 4, lowest + 4))
        crowd = [SessionClient(daemon.runtime_dir) for _ in range(12)]
        wait_until(lambda: good.stats().get("daemon_sessions_not_accepted", 0) >= 5)
        for session in crowd:
            session.close()
        wait_until(lambda: good.stats()["daemon_sessions"] == 1)
        with SessionClient(daemon.runtime_dir) as again:
            assert isinstance(again.hello(), Welcome)
