"""A daemon's own marks: what took long, by name, and nothing else."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import msgspec
import pytest

from benchmarks import marked_daemon
from benchmarks.late_matches import Marks
from benchmarks.marked_daemon import LONG_NS, PAUSE_NS, Marker
from benchmarks.node import Daemon
from directory.daemon.loop import Loop


class Part:
    """Something whose calls take as long as they are told, by a clock of its own."""

    now_ns = 0

    def work(self, ns: int) -> int:
        Part.now_ns += ns
        return ns

    def fail(self, ns: int) -> None:
        Part.now_ns += ns
        raise ValueError(f"after {ns} ns")


def test_only_what_takes_long_is_marked_also_where_it_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(marked_daemon, "monotonic_ns", lambda: Part.now_ns)
    marker = Marker()

    class Marked(Part):
        work = Part.work
        fail = Part.fail

    marker.piece(Marked, "work", "work")
    marker.piece(Marked, "fail", "", lambda _, ns: f"failed after {ns}")
    long_ns, begun = LONG_NS + 1, Part.now_ns
    assert Marked().work(LONG_NS) == LONG_NS
    assert Marked().work(long_ns) == long_ns
    with pytest.raises(ValueError, match=f"after {long_ns}"):
        Marked().fail(long_ns)
    at = begun + LONG_NS
    assert marker.marks.pieces == [
        ("work", at, at + long_ns),
        (f"failed after {long_ns}", at + long_ns, at + 2 * long_ns),
    ]
    marker.begin()
    assert marker.marks.pieces == []


def test_a_pause_has_waited_for_a_core_as_long_as_in_it_and_not_since_one_was_asked_last(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    schedstat, delayed_ns, woken_late_ns = tmp_path / "schedstat", 5_000_000, 0

    def passes(ns: int, delay_ns: int = 0) -> None:
        nonlocal delayed_ns
        Part.now_ns += ns
        delayed_ns += delay_ns
        schedstat.write_text(f"{Part.now_ns} {delayed_ns} 1\n")

    def wait(_: Loop, timeout_s: float | None) -> list[tuple[int, int]]:
        passes(int((timeout_s or 0) * 1e9), woken_late_ns)
        return []

    monkeypatch.setattr(marked_daemon, "monotonic_ns", lambda: Part.now_ns)
    monkeypatch.setattr(Loop, "_wait", wait)
    passes(0)
    marker, loop = Marker(schedstat), Loop()
    marker.turns()
    loop.turn(0.004)  # nobody wanted the core, ever since
    passes(400 * LONG_NS, 300 * LONG_NS)  # a turn, which others' work has made a long one
    loop.turn(0.004)
    passes(LONG_NS, LONG_NS // 2)  # a short one, which is not asked after
    loop.turn(PAUSE_NS / 1e9 * 2)
    woken_late_ns = 1_000_000
    loop.turn(0.004)
    loop.close()
    delays = [delay for _, _, delay in marker.marks.pauses]
    assert delays == [0, 0, 2 * PAUSE_NS, 1_000_000], "never longer than the pause"


def test_a_daemon_writes_its_marks_when_it_is_told_and_begins_anew(tmp_path: Path) -> None:
    file = tmp_path / "marks.json"
    with Daemon(program=["benchmarks.marked_daemon", str(file)]) as daemon:
        begun = time.monotonic_ns()
        daemon.process.send_signal(signal.SIGUSR1)
        time.sleep(0.05)
        daemon.used()
        time.sleep(0.05)
        daemon.used()
        daemon.process.send_signal(signal.SIGUSR2)
        give_up = time.monotonic() + 10
        while not file.exists():
            assert time.monotonic() < give_up, "no marks were written"
            time.sleep(0.01)
    marks = msgspec.json.decode(file.read_bytes(), type=Marks)
    ended = time.monotonic_ns()
    assert marks.pauses, "it had nothing to do between two questions"
    for since, until, waited in marks.pauses:
        assert since < until
        assert begun <= until <= ended
        assert waited >= 0
    for since, until, cpu in marks.turns:
        assert until - since > LONG_NS
        assert cpu <= until - since + LONG_NS
