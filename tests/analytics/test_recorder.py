"""The hand-over to the access log: bounded, piece by piece, and digests that are made once."""

from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.analytics.log import AccessLog
from directory.analytics.reader import LogReader
from directory.analytics.record import Access, Dropped, Frame, chain
from directory.analytics.recorder import PIECE_PAGES, PIECES_KNOWN_AT_ONCE, Chains, Recorder, Work
from tests.analytics.support import access


def written(folder: Path) -> list[Frame]:
    return list(LogReader(folder))


def test_a_full_queue_drops_and_the_log_says_how_many(tmp_path: Path) -> None:
    log = AccessLog(tmp_path)
    recorder = Recorder(log, queue_max=2)
    taken = [recorder.offer(access("A", request=str(number))) for number in range(5)]
    assert taken == [True, True, False, False, False]
    recorder.drain(1)
    log.close(2)
    frames = written(tmp_path)
    assert sum(isinstance(frame, Access) for frame in frames) == 2
    assert [frame.records for frame in frames if isinstance(frame, Dropped)] == [3]
    assert recorder.refused == 3


def test_what_keeps_too_many_bytes_alive_is_dropped(tmp_path: Path) -> None:
    recorder = Recorder(AccessLog(tmp_path), queue_bytes_max=100)
    assert recorder.offer(access("A"), 60)
    assert not recorder.offer(access("A"), 60)
    assert recorder.fill == 0.6
    recorder.drain(0)
    assert recorder.fill == 0
    assert recorder.offer(access("A"), 60)


def test_what_is_given_up_is_counted_in_the_log(tmp_path: Path) -> None:
    log = AccessLog(tmp_path)
    recorder = Recorder(log)
    for number in range(5):
        recorder.offer(access("A", request=str(number)), 10)
    assert recorder.step(0)
    recorder.give_up()
    assert not recorder.step(0)
    log.close(0)
    assert [frame.records for frame in written(tmp_path) if isinstance(frame, Dropped)] == [4]


def test_work_is_begun_when_its_turn_comes_and_goes_on_a_piece_at_a_time(tmp_path: Path) -> None:
    begun = []

    def work(name: str) -> Work:
        begun.append(name)
        yield None
        yield access("A", request=name)
        return access("B", request=name)

    log = AccessLog(tmp_path)
    recorder = Recorder(log)
    recorder.offer(work("a"))
    recorder.offer(work("b"))
    assert not begun
    assert recorder.step(0)
    assert begun == ["a"]
    assert len(recorder) == 2
    recorder.drain(0)
    assert begun == ["a", "b"]
    assert not recorder.step(0)
    log.close(0)
    frames = written(tmp_path)
    assert [frame.request for frame in frames if isinstance(frame, Access)] == ["a", "a", "b", "b"]


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=3 * PIECE_PAGES * 2 + 3), max_size=6),
    st.sampled_from([4, 8]),
    st.integers(1, 3),
)
def test_digests_are_those_of_the_chain_whatever_was_met_before(
    prompts: list[list[int]], page_bytes: int, kept_max: int
) -> None:
    chains = Chains(kept_max=kept_max)
    for prompt in prompts:
        tokens = array("I", prompt).tobytes()
        assert chains.whole(tokens, page_bytes) == chain(tokens, page_bytes)


def test_a_piece_is_what_is_hashed_at_once_or_a_few_that_were_met_before() -> None:
    chains, pages = Chains(), PIECE_PAGES * (3 * PIECES_KNOWN_AT_ONCE + 1)
    tokens = array("I", range(pages)).tobytes()

    def pieces() -> int:
        return sum(1 for _ in chains.pieces(tokens, 4))

    assert pieces() == 3 * PIECES_KNOWN_AT_ONCE + 1
    assert pieces() == 3


@pytest.mark.parametrize("key", [b"", b"k"])
def test_a_key_changes_every_digest(key: bytes) -> None:
    tokens = bytes(range(64))
    assert Chains(key=key).whole(tokens, 16) == chain(tokens, 16, key=key)
