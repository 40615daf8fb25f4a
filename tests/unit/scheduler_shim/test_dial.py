"""A try to register: only the daemon's silence ends it, and what it says of a pool agrees.

The daemon is the test itself, at the other end of a real session; the clock is the test's.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from directory.protocol.codec import decode_session_request, encode
from directory.protocol.messages import Hello, Register, Registered, Welcome
from scheduler_shim import dial
from scheduler_shim.client import DaemonClient
from scheduler_shim.deadlines import Deadlines
from scheduler_shim.dial import DaemonAttempt, DaemonDial
from scheduler_shim.pools import SharedPool
from scheduler_shim.session import (
    SESSION_NAME,
    DaemonAbsent,
    NobodyListens,
    answer_welcome,
    register_message,
)
from tests.descriptors import open_descriptors
from transfer.ipc.channel import FdChannel, close_fds
from transfer.ipc.stage_ring import STAGE_BELOW_BYTES
from transfer.layout import PoolLayout

CONNECT_US = Deadlines().connect_ms * 1_000
STEPS_MAX = 100


class Scene:
    """A pool, a session socket, and a clock that stands still."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_us = 1_000_000
        monkeypatch.setattr(dial, "monotonic_us", lambda: self.now_us)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(folder / SESSION_NAME))
        self.listener.listen()
        self.pool = SharedPool(page_size=4, page_count=8, bytes_per_token=64)
        self.endpoint = f"ipc://{folder}/r.sock"
        self.attempt: DaemonAttempt = DaemonDial(folder, self.pool, instance="a").begin("mirrored")
        self.listener.setblocking(False)
        for _ in range(STEPS_MAX):
            self.attempt.step()
            with suppress(BlockingIOError):
                self.session = FdChannel(self.listener.accept()[0])
                break

    def answer(self) -> None:
        """Answer what has been said."""
        for payload, fds in self.session.receive():
            close_fds(fds)
            said = decode_session_request(payload)
            if isinstance(said, Hello):
                self.session.send(encode(Welcome(1, 7)))
            elif isinstance(said, Register):
                self.session.send(encode(Registered(1, 1, b"s", self.endpoint, lane=True)))

    def close(self) -> None:
        self.attempt.close()
        self.session.close()
        self.listener.close()
        self.pool.close()


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(tmp_path, monkeypatch)
    yield made
    made.close()


def test_beginning_reaches_nobody_and_socket_and_connection_are_steps(
    tmp_path: Path,
) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / SESSION_NAME))
    listener.listen()
    listener.setblocking(False)
    pool = SharedPool(page_size=4, page_count=8, bytes_per_token=64)
    attempt = DaemonDial(tmp_path, pool, instance="a").begin("mirrored")
    for made_socket in (False, True):
        assert (attempt._socket is not None, attempt._channel) == (made_socket, None)
        with pytest.raises(BlockingIOError):
            listener.accept()
        assert attempt.step() is None
    session, _ = listener.accept()
    session.setblocking(False)
    with pytest.raises(BlockingIOError):
        session.recv(1)  # Hello is another step
    attempt.close()
    assert session.recv(1) == b""
    for end in (session, listener):
        end.close()
    pool.close()


def test_where_nobody_listens_it_says_so_and_leaves_nothing_open(tmp_path: Path) -> None:
    pool = SharedPool(page_size=4, page_count=8, bytes_per_token=64)
    before = open_descriptors()
    attempt = DaemonDial(tmp_path, pool, instance="a").begin("mirrored")
    assert attempt.step() is None
    with pytest.raises(NobodyListens, match="no daemon listens"):
        attempt.step()
    assert open_descriptors() == before
    attempt.close()
    pool.close()


def test_a_try_without_a_descriptor_left_is_one_that_found_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    pool = SharedPool(page_size=4, page_count=8, bytes_per_token=64)
    attempt = DaemonDial(tmp_path, pool, instance="a").begin("mirrored")
    monkeypatch.setattr(socket, "socket", none_left)
    with pytest.raises(NobodyListens, match="Too many open files"):
        attempt.step()
    attempt.close()
    pool.close()


def test_however_long_an_engine_is_between_its_steps_it_is_attached(scene: Scene) -> None:
    client: DaemonClient | None = None
    for _ in range(STEPS_MAX):
        scene.now_us += 2 * CONNECT_US
        scene.answer()
        client = scene.attempt.step()
        if client is not None:
            break
    assert client is not None
    assert not client.lost
    client.close()


@pytest.mark.parametrize("answers", [0, 1])
def test_a_daemon_that_says_nothing_is_waited_for_no_longer_than_the_deadline(
    scene: Scene, answers: int
) -> None:
    for _ in range(STEPS_MAX):
        scene.attempt.step()
    for _ in range(answers):
        scene.answer()
        for _ in range(STEPS_MAX):
            scene.attempt.step()
    scene.now_us += CONNECT_US - 1
    assert scene.attempt.step() is None
    scene.now_us += 1
    with pytest.raises(DaemonAbsent, match="did not answer in time"):
        scene.attempt.step()


def test_layout_handles_and_descriptors_agree_though_the_last_slab_is_withdrawn() -> None:
    pool = SharedPool(page_size=4, page_count=8, bytes_per_token=64, staging_bytes=1024)
    for below in (STAGE_BELOW_BYTES, 0, STAGE_BELOW_BYTES):
        # As it is made before the daemon has welcomed: with what the last registration offered.
        message = register_message(pool, instance="a", mode="mirrored")
        said, fds = answer_welcome(message, pool, Welcome(1, 7, staging_below=below))
        layout = msgspec.msgpack.decode(said.layout, type=PoolLayout)
        handles = msgspec.msgpack.decode(said.handles)
        memories = len(layout.allocation_bytes)
        assert said.staging == (below > 0)
        assert len(handles) == memories
        assert len(fds) == memories + 2 + 2 * said.staging
    pool.close()
