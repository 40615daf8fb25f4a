"""When a recording works: seldom, never in front of who asks, in need no more than its share."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random
from typing import cast

import pytest

from directory.analytics.log import STANDING_AT_ONCE, AccessLog
from directory.analytics.reader import LogReader
from directory.analytics.record import Access, Named
from directory.daemon.background import Background
from directory.daemon.kv_feed import EVERY_US, KvFeed
from directory.daemon.pacing import (
    AGAIN_US,
    BATCH_FILL,
    BATCH_US,
    BURST_US_MAX,
    BURST_US_MIN,
    LATE_US,
    MORE_FILL,
    SHARE_MIN,
    SOON_US,
)
from directory.daemon.recording import (
    FLUSH_EARLY_US,
    FLUSH_US,
    PIECES_A_TURN_MAX,
    Recording,
)
from tests.unit.directory.daemon.test_recording import Rig, ended, tokens_of


def test_records_wait_for_more_of_their_kind_but_not_for_long(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    pool = rig.directory.pools[rig.register("a")]
    rig.settle()
    rig.recording.ended(pool, ended(), rig.now_us)
    due_us = rig.now_us + BATCH_US
    assert rig.recording.ready_us == due_us
    rig.recording.ended(pool, ended(), rig.now_us + 1_000)
    assert rig.recording.ready_us == due_us
    for _ in range(2_048):
        rig.recording.ended(pool, ended(), rig.now_us + 2_000)
    early_us = rig.recording.ready_us
    assert early_us == rig.now_us + 2_000
    assert not rig.recording.pressed


def test_what_was_worked_on_is_on_disk_a_second_after_the_last_time(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    pool = rig.directory.pools[rig.register("a")]
    rig.settle()
    rig.recording.ended(pool, ended(), rig.now_us)
    rig.now_us += BATCH_US
    rig.recording.work(rig.now_us, lambda: False)
    flush_us = rig.recording.ready_us
    assert flush_us is not None
    assert rig.now_us < flush_us <= rig.now_us + FLUSH_US
    rig.recording.work(flush_us, lambda: False)
    assert rig.recording.ready_us is None
    assert any(isinstance(frame, Access) for frame in LogReader(tmp_path))


def test_work_ends_after_the_piece_in_which_somebody_asks(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    pool = rig.directory.pools[rig.register("a")]
    for _ in range(10):
        rig.recording.ended(pool, ended(), rig.now_us)
    pieces = []

    def waiting() -> bool:
        pieces.append(1)
        return True

    rig.recording.work(rig.now_us, waiting)
    assert len(pieces) == 1
    # Not in the very next pause: then that match would come right after work, too.
    assert rig.recording.ready_us == rig.now_us + AGAIN_US


def test_what_was_broken_off_goes_on_the_sooner_the_fuller_the_queue_is(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    pool = rig.directory.pools[rig.register("a")]
    waits = []
    for fill in (MORE_FILL, BATCH_FILL):
        while rig.recording._recorder is not None and rig.recording._recorder.fill <= fill:
            rig.recording.ended(pool, ended(), rig.now_us)
        rig.recording.work(rig.now_us, lambda: True)
        assert rig.recording.ready_us is not None
        waits.append(rig.recording.ready_us - rig.now_us)
    assert waits == [SOON_US, 0]


def test_what_nobody_broke_off_goes_on_at_once(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    pool = rig.directory.pools[rig.register("a")]
    for _ in range(PIECES_A_TURN_MAX):
        rig.recording.ended(pool, ended(), rig.now_us)
    looks: list[int] = []

    def waiting() -> bool:
        looks.append(1)
        return False

    rig.recording.work(rig.now_us, waiting)
    assert len(looks) == PIECES_A_TURN_MAX
    assert rig.recording.ready_us == rig.now_us


def test_a_log_that_works_anyway_is_written_a_little_before_its_time(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    pool = rig.directory.pools[rig.register("a")]
    rig.settle()
    rig.recording.ended(pool, ended(), rig.now_us)
    rig.recording.work(rig.now_us, lambda: False)
    flush_us = rig.recording.ready_us
    assert flush_us is not None
    before_us = flush_us - FLUSH_EARLY_US
    ready_us = []
    for now_us in (before_us - 1, before_us):
        rig.recording.work(now_us, lambda: False)
        ready_us.append(rig.recording.ready_us)
    assert ready_us == [flush_us, None]
    assert any(isinstance(frame, Access) for frame in LogReader(tmp_path))


def test_a_log_in_need_works_a_little_at_a_time_and_then_lets_answers_pass(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    pool = rig.directory.pools[rig.register("a")]
    rig.settle()
    for _ in range(8_200):
        rig.recording.ended(pool, ended(), rig.now_us)
    pressed = rig.recording.pressed
    worked, before = [], rig.recording.log_report()
    for _ in range(40):  # a turn of the daemon every half of a millisecond
        rig.now_us += 500
        rig.recording.hurry(rig.now_us)
        after = rig.recording.log_report()
        worked.append(after != before)
        before = after
    assert 1 <= sum(worked) <= 40 * 500 * SHARE_MIN // BURST_US_MIN + 1
    turns = 0
    while pressed:
        turns += 1
        rig.now_us += 5_000
        rig.recording.hurry(rig.now_us)
        pressed = rig.recording.pressed
    assert turns
    assert len([frame for frame in rig.frames() if isinstance(frame, Access)]) == 8_200


def test_nothing_is_dropped_of_2000_records_a_second_that_never_pause(tmp_path: Path) -> None:
    # Against a clock that runs as the work does: a piece takes as long as it takes here, less what
    # others take of the processor meanwhile.
    rig = Rig(tmp_path)
    taken_us = 0.0
    begun = time.thread_time()

    def clock() -> int:
        return int(1e6 + taken_us + 1e6 * (time.thread_time() - begun))

    rig.recording._clock = clock
    pool = rig.directory.pools[rig.register("a")]
    tokens = tokens_of("ABCDEFGHIJKLMNOPQRSTUVWXYZABCDEF")
    for number in range(30_000):
        prompt = tokens[:-4] + number.to_bytes(4, "little")
        report = ended(request=f"r{number}", tokens=prompt, prompt_tokens=len(prompt) // 4 + 1)
        rig.recording.ended(pool, report, clock())
        if rig.recording.pressed:
            rig.recording.hurry(clock())
        # Whatever is left of the half of a millisecond until the next one, others work.
        taken_us = max(taken_us, 500.0 * (number + 1) - 1e6 * (time.thread_time() - begun))
    logged = rig.recording.log_report()
    assert logged is not None
    assert logged.records_lost == 0
    assert rig.recording._recorder is not None
    assert rig.recording._recorder.refused == 0
    assert logged.waiting < 16_384


def test_where_nobody_ever_pauses_a_record_is_on_disk_within_seconds(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    pool = rig.directory.pools[rig.register("a")]
    rig.settle()
    beside = Background(rig.recording, None, None, lambda: False)
    begun_us, told, most = rig.now_us, 0, BATCH_US + LATE_US + FLUSH_US
    for turn in range(12_000):  # 18 seconds of a frame every 1.5 ms, 5 requests a second
        rig.now_us = begun_us + 1_500 * turn
        if 200_000 * told <= rig.now_us - begun_us:
            rig.recording.ended(pool, ended(age_us=0), rig.now_us)
            told += 1
        beside.turn(rig.now_us, quiet=False)
    logged = [frame.at_us for frame in LogReader(tmp_path) if isinstance(frame, Access)]
    assert len(logged) >= told - most // 200_000 - 1
    assert len(logged) > told // 2


def test_what_is_late_gets_its_share_until_nothing_is_left(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    pool = rig.directory.pools[rig.register("a")]
    rig.settle()
    for _ in range(400):
        rig.recording.ended(pool, ended(), rig.now_us)
    now_us, ticks = rig.now_us + BATCH_US + LATE_US, 0

    def clock() -> int:  # a piece takes 100 us
        nonlocal ticks
        ticks += 100
        return now_us + ticks

    rig.recording._clock = clock
    beside = Background(rig.recording, None, None, lambda: False)
    bursts = 0
    for _ in range(4_000):  # turns of half a millisecond
        before = ticks
        beside.turn(now_us + ticks, quiet=False)
        bursts += ticks > before
        assert ticks - before <= BURST_US_MAX + 500
        now_us += 500
    assert bursts > 3
    assert rig.recording._recorder is not None
    assert len(rig.recording._recorder) == 0


class Telling:
    """Events that are handed on every so often, in a pause, in the time that it takes."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._due_us = self.times = 0

    def due_us(self) -> int:
        return max(1, self._due_us)

    def on_time(self, *, idle: bool) -> bool:
        told = idle and self._rig.now_us >= self._due_us
        if told:
            self._due_us = self._rig.now_us + EVERY_US
            self._rig.now_us += 200
            self.times += 1
        return told


class Written:
    """For how long a log has had frames that a crash would cost, at the longest."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._frames = 0
        self._since_us: int | None = None
        self.longest_us = 0

    def look(self) -> None:
        log = self._rig.recording._log
        assert log is not None
        if log.frames_written != self._frames or not log.unwritten:
            self._frames, self._since_us = log.frames_written, None
        if log.unwritten:
            self._since_us = self._since_us or self._rig.now_us
            self.longest_us = max(self.longest_us, self._rig.now_us - self._since_us)


def test_a_file_that_begins_in_its_time_keeps_who_asks_waiting_for_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path)
    log = AccessLog(tmp_path, file_bytes_max=1)  # each block begins a file
    for number in range(20 * STANDING_AT_ONCE):
        log.add(Named(namespace=number.to_bytes(16), fields={}), rig.now_us)
    log.flush(rig.now_us)
    rig.recording = Recording(log, host_bytes=0, now_us=rig.now_us, clock=lambda: rig.now_us)
    pool = rig.directory.pools[rig.register("a")]
    pieces, written, flush_some = 0, log.frames_written, log._flush_some

    def counted() -> None:
        nonlocal pieces
        pieces += 1
        flush_some()

    monkeypatch.setattr(log, "_flush_some", counted)
    rig.recording.ended(pool, ended(), rig.now_us)
    begun, most, turns = log.files_begun, 0, 0
    while rig.recording.ready_us is not None:
        rig.now_us = max(rig.now_us, rig.recording.ready_us)
        before = pieces
        rig.recording.work(rig.now_us, lambda: True)
        most, turns = max(most, pieces - before), turns + 1
    assert pieces > 20, "there is much to repeat"
    assert most == 1
    assert log.files_begun > begun
    assert log.frames_written > written
    assert turns > 20


def test_of_what_is_asked_at_a_steady_pace_little_comes_right_after_work(tmp_path: Path) -> None:
    # A request ends and a question follows within 5 ms; a piece takes 20 us, each request three.
    rig, chance = Rig(tmp_path), Random(1)
    pool = rig.directory.pools[rig.register("a")]
    rig.settle()
    asks_at_us = after_work = 0

    def waiting() -> bool:
        rig.now_us += 20
        return rig.now_us >= asks_at_us

    telling, recording = Telling(rig), rig.recording
    beside = Background(recording, cast(KvFeed, telling), None, waiting)
    asked, written = 4_000, Written(rig)
    for number in range(asked):
        for part in range(3):
            rig.recording.ended(pool, ended(request=f"{number}.{part}"), rig.now_us)
        beside.turn(rig.now_us, quiet=False)
        asks_at_us = rig.now_us + chance.randrange(5_000)
        before = recording._worked_us, telling.times
        while rig.now_us < asks_at_us:
            rig.now_us = max(rig.now_us, min(beside.due_us() or asks_at_us, asks_at_us))
            beside.turn(rig.now_us, quiet=rig.now_us < asks_at_us)
        after_work += (recording._worked_us, telling.times) != before
        rig.now_us = max(rig.now_us, asks_at_us)
        assert recording._recorder is not None
        assert len(recording._recorder) < 1_000  # a second of them
        written.look()
    # The queue is hardly ever empty, and a crash costs no more for that.
    assert FLUSH_US // 2 < written.longest_us < FLUSH_US + 250_000
    # One in twenty-one, where it goes on in the very next pause instead.
    assert telling.times < after_work < 0.048 * asked
    assert len([frame for frame in rig.frames() if isinstance(frame, Access)]) == 3 * asked
