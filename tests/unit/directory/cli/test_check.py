"""`treecored check` against a pretended daemon: what it prints, and its exit statuses."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from directory.cli.main import app
from directory.protocol.admin import AdminCheck, AdminReport, PoolReport
from directory.protocol.codec import decode_session_request, encode
from directory.protocol.messages import (
    Hello,
    SessionRefused,
    SessionReply,
    SessionRequest,
    Welcome,
)
from transfer.ipc.channel import ChannelClosed, FdChannel

POOLS = (
    PoolReport(3, "replica[0]", 2, "mirrored", "live", 2, 2, 4_096, 1_000, 24, 5, 1),
    PoolReport(9, "b", 1, "thin", "closing", 1, 1, 64, 0, 0, 0, 2),
)
REPORT = AdminReport(7, {"nodes": 12_345}, (), POOLS)
BROKEN = AdminReport(7, {}, ("pages: pool 3 owns 4, nodes hold 5", "[tree] x"), (), 3)


@contextmanager
def pretended_daemon(folder: Path, replies: Sequence[SessionReply]) -> Iterator[list[object]]:
    """Answers one connection, then sees it end. Yields what was asked."""
    heard: list[object] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / "session.sock"))
    listener.listen()

    def serve() -> None:
        channel = FdChannel(listener.accept()[0])
        try:
            for reply in replies:
                request: SessionRequest = decode_session_request(channel.wait_frame(60)[0])
                heard.append(request)
                channel.send(encode(reply))
            channel.wait_frame(60)
        except ChannelClosed:
            heard.append("end")
        finally:
            channel.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield heard
    finally:
        thread.join(60)
        listener.close()
        assert not thread.is_alive()


def check(folder: Path, *flags: str) -> Result:
    return CliRunner().invoke(app, ["check", "--runtime-dir", str(folder), *flags])


def test_a_clean_daemon_is_shown_and_is_exit_status_0(tmp_path: Path) -> None:
    with pretended_daemon(tmp_path, [Welcome(1, 7), REPORT]) as heard:
        result = check(tmp_path)
    assert result.exit_code == 0
    assert [type(one) for one in heard[:2]] == [Hello, AdminCheck]
    assert heard[2:] == ["end"], "it asks twice and leaves"
    for word in ("replica[0]", "2/2", "4,096", "closing", "12,345", "every invariant holds"):
        assert word in result.stdout


def test_violations_are_listed_and_are_exit_status_1(tmp_path: Path) -> None:
    with pretended_daemon(tmp_path, [Welcome(1, 7), BROKEN]):
        result = check(tmp_path)
    assert result.exit_code == 1
    assert "violated pages: pool 3 owns 4, nodes hold 5" in result.stdout
    assert "violated [tree] x" in result.stdout
    assert "5 invariants do not hold (3 not listed)" in result.stdout


@pytest.mark.parametrize(("report", "status"), [(REPORT, 0), (BROKEN, 1)])
def test_json_has_everything_and_nothing_else_is_printed(
    tmp_path: Path, report: AdminReport, status: int
) -> None:
    with pretended_daemon(tmp_path, [Welcome(1, 7), report]):
        result = check(tmp_path, "--json")
    assert result.exit_code == status
    said = json.loads(result.stdout)
    assert said["clean"] is (status == 0)
    assert said["violations"] == list(report.violations)
    assert said["counters"] == report.counters
    assert [pool["instance"] for pool in said["pools"]] == [p.instance for p in report.pools]


def test_no_daemon_is_exit_status_2_and_one_sentence(tmp_path: Path) -> None:
    result = check(tmp_path)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("treecored check: no daemon listens at ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("replies", "says"),
    [
        ([], "did not answer"),
        ([Welcome(1, 7)], "did not answer"),
        ([SessionRefused("too_many", "full")], "the daemon refused: too_many: full"),
        ([Welcome(1, 7), SessionRefused("bad_message", "no")], "refused: bad_message: no"),
        ([REPORT], "answered with AdminReport"),
    ],
)
def test_a_daemon_that_does_not_answer_the_question_is_exit_status_2(
    tmp_path: Path, replies: list[SessionReply], says: str
) -> None:
    patience_s = "0.2" if says == "did not answer" else "60"
    with pretended_daemon(tmp_path, replies):
        result = check(tmp_path, "--deadline", patience_s)
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_wrong_setting_is_exit_status_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["check", "--config", str(tmp_path / "none.toml")])
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr
