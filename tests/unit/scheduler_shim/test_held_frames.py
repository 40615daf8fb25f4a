"""Frames that are held back to go with the next ones, when they cannot be sent any more."""

import socket
from pathlib import Path

import pytest

from directory.core.events import Flush
from scheduler_shim.client import DaemonClient
from scheduler_shim.lane_link import LaneLink, make_arena
from scheduler_shim.session import Registration
from transfer.ipc.channel import FdChannel, close_fds


@pytest.mark.parametrize("looks", [False, True])
def test_held_frames_that_cannot_be_sent_are_counted_whoever_notices(
    tmp_path: Path, looks: bool
) -> None:
    """By `send_held` itself, or by the look for answers that sends them and finds the lane over."""
    ours, theirs = FdChannel.pair()
    arena = make_arena(warm=False)
    assert arena is not None
    endpoint = f"ipc://{tmp_path}/nobody"
    client = DaemonClient(LaneLink(ours, endpoint, arena), Registration(1, 1, 1, b"s", endpoint))
    ((_, fds),) = theirs.receive()
    lane = socket.socket(fileno=fds[0])
    client.report(Flush("pool", 1), hold=True)
    client.send_held()
    assert "frames_not_sent" not in client.counters
    assert lane.recv(1 << 10)
    lane.close()
    client.report(Flush("pool", 2), hold=True)
    client.report(Flush("pool", 3), hold=True)
    if looks:
        client.poll()
        assert client.counters["lanes_ended"] == 1
    else:
        client.send_held()
    assert client.counters["frames_not_sent"] >= 2
    client.close()
    theirs.close()
    close_fds(fds[1:])
