"""The codec: what goes in comes out, and nothing but typed errors comes of junk."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from directory.core import limits
from directory.core.actions import Done, GaveUp, Inserted, Matched, Totals
from directory.core.errors import BadMessage, TooLarge
from directory.core.events import Evicted, Flush, Insert, Live, Match, Restore, Stats, Unlock
from directory.core.namespace import Adapter, NamespaceKey
from directory.protocol.admin import (
    AdminCheck,
    AdminExplain,
    AdminReport,
    AdminStats,
    AdminTree,
    ExplainReport,
    PoolReport,
    Stretch,
    TreeReport,
)
from directory.protocol.codec import (
    decode_envelope,
    decode_reply,
    decode_session_reply,
    decode_session_request,
    encode,
)
from directory.protocol.ended import Ended
from directory.protocol.messages import (
    Acked,
    Attach,
    ClientBody,
    Envelope,
    Hello,
    Register,
    Registered,
    ReplyEnvelope,
    SessionRefused,
    Welcome,
)

DECODERS: list[Callable[[bytes], object]] = [
    decode_envelope,
    decode_reply,
    decode_session_request,
    decode_session_reply,
]
KEY = NamespaceKey(3, "", None, Adapter("x", 1), bigram=True)
BODIES: list[ClientBody] = [
    Attach(1, b"secret"),
    Match("r", 1, KEY, b"tokens"),
    Insert("r", 1, KEY, b"tokens", b"pages", 3, 4, (5, 6), 7),
    Insert("r", 1, KEY, b"tokens", b"pages", 3, 4, (5, 6), 0, 2),
    Evicted(((1, 2, 3),), ((1, 9),)),
    Restore("r", 1, 2, 3, b"pages", (4, 5)),
    Flush("host"),
    Live((("r", 1), ("s", 2))),
    Live((("r", 1),), first=False, last=False),
    Stats(),
    Unlock(4),
    Ended(request="r", attempt=1, namespace=KEY, kind="recompute", prompt_tokens=9, tokens=b"t"),
]
POOL_REPORT = PoolReport(1, "a", 2, "thin", "live", 1, 2, 64, 8, 4, 3, 0)
FRAMES: list[tuple[Callable[[bytes], object], msgspec.Struct]] = [
    *((decode_envelope, Envelope(1, 2, 3, body)) for body in BODIES),
    (decode_reply, ReplyEnvelope(1, 2, 3, Matched(1, b"", 2, 1, 1, 9, 8, Totals(1, 2)))),
    (decode_reply, ReplyEnvelope(1, 2, 0, Acked())),
    (decode_reply, ReplyEnvelope(1, 2, 3, Done())),
    (decode_session_request, Hello(1, 1, "test")),
    (decode_session_request, Register("a", b"f", "thin", b"layout", b"handles")),
    (decode_session_request, Register("a", b"f", "thin", b"layout", b"handles", 4, 3)),
    (decode_session_request, AdminCheck()),
    (decode_session_request, AdminStats(5)),
    (decode_session_request, AdminTree(10, instance="a")),
    (decode_session_request, AdminExplain(b"tokens", KEY, "a")),
    (decode_session_reply, TreeReport((), 3, 1)),
    (decode_session_reply, ExplainReport("ab", 16, 9, 0, (Stretch("own", 0, 9),))),
    (decode_session_reply, AdminReport(1, {"nodes": 3}, ("tree: broken",), (POOL_REPORT,), 2)),
    (decode_session_reply, Welcome(1, 2)),
    (decode_session_reply, Registered(1, 2, b"secret", "ipc://x")),
    (decode_session_reply, SessionRefused("bad_message", "no")),
]


def only_typed_errors(decode: Callable[[bytes], object], frame: bytes) -> None:
    try:
        decode(frame)
    except (BadMessage, TooLarge):
        pass


@pytest.mark.parametrize(("decode", "message"), FRAMES)
def test_a_message_comes_out_as_it_went_in(
    decode: Callable[[bytes], object], message: msgspec.Struct
) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message  # type: ignore[arg-type]


@given(frame=st.binary(max_size=200), which=st.integers(0, 3))
def test_random_bytes_give_typed_errors_only(frame: bytes, which: int) -> None:
    only_typed_errors(DECODERS[which], frame)


@given(
    which=st.integers(0, len(FRAMES) - 1),
    edits=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 300), st.integers(0, 255)), min_size=1
    ),
)
def test_a_damaged_message_gives_typed_errors_only(
    which: int, edits: list[tuple[int, int, int]]
) -> None:
    decode, message = FRAMES[which]
    frame = bytearray(encode(message))
    for kind, at, byte in edits:
        at %= len(frame) + 1
        if kind == 0:
            frame[at : at + 1] = bytes([byte])
        elif kind == 1:
            frame[at:at] = bytes([byte])
        else:
            del frame[at : at + 1 + byte % 4]
    only_typed_errors(decode, bytes(frame))


@pytest.mark.parametrize("decode", DECODERS)
@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x91" * 100_000,
        b"\x81\xa1a" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc1",
        b"\xd7\xff" + bytes(8),
        b"\x93\x01\xa2\xff\xfe\x03",
    ],
)
def test_known_junk_is_a_bad_message(decode: Callable[[bytes], object], frame: bytes) -> None:
    with pytest.raises(BadMessage):
        decode(frame)


@pytest.mark.parametrize("decode", DECODERS)
def test_a_frame_beyond_the_limit_is_not_even_looked_at(
    decode: Callable[[bytes], object],
) -> None:
    with pytest.raises(TooLarge, match="at most"):
        decode(bytes(limits.MESSAGE_BYTES_MAX + 1))


@pytest.mark.parametrize(
    "body",
    [["match", "r"], ["nothing"], ["flush", "everything"], ["unlock", "7"], ["unlock", 1.5], []],
)
def test_a_body_of_wrong_arity_type_or_tag_is_a_bad_message(body: list[object]) -> None:
    with pytest.raises(BadMessage):
        decode_envelope(msgspec.msgpack.encode([1, 2, 3, body]))


def test_fields_that_a_newer_client_adds_at_the_end_are_ignored() -> None:
    frame = msgspec.msgpack.encode([1, 2, 3, ["stats", True, "new"], [0, 0, 0], [0, 0, 0], "newer"])
    assert decode_envelope(frame) == Envelope(1, 2, 3, Stats(check=True))


def test_fields_that_an_older_client_leaves_out_have_their_defaults() -> None:
    frame = msgspec.msgpack.encode([1, 2, 3, ["stats"]])
    assert decode_envelope(frame) == Envelope(1, 2, 3, Stats())


def test_the_largest_answers_about_pages_are_messages() -> None:
    pages = limits.GAVE_UP_PAGES_MAX
    word = (limits.POOL_PAGES_MAX, (1 << 64) - 1, (1 << 32) - 1)
    gave_up = GaveUp(bytes(4 * pages), (word,) * pages, Totals())
    most = bytes(limits.PAGES_BYTES_MAX)
    inserted = Inserted(limits.PROMPT_PAGES_MAX, most, most, 0, 1, Totals())
    for body in (gave_up, inserted):
        frame = encode(ReplyEnvelope((1 << 63) - 1, 1 << 60, 1 << 60, body))
        assert len(frame) <= limits.MESSAGE_BYTES_MAX


def test_the_largest_insert_is_a_message() -> None:
    part = "\N{GRINNING FACE}" * limits.KEY_PART_CHARS_MAX
    key = NamespaceKey(1, part, part, Adapter(part, 1), bigram=True, wide=True)
    tokens, pages = bytes(limits.TOKENS_BYTES_MAX), bytes(limits.PAGES_BYTES_MAX)
    request = part[: limits.REQUEST_CHARS_MAX]
    body = Insert(request, 1, key, tokens, pages, 1, 1 << 63, (1 << 63, 1 << 63))
    assert len(encode(Envelope(1 << 62, 1, 1, body))) <= limits.MESSAGE_BYTES_MAX


def test_the_longest_reports_are_messages() -> None:
    most = limits.GAVE_UP_PAGES_MAX
    run = (limits.POOL_PAGES_MAX, (1 << 32) - 1, (1 << 32) - 1)
    name = "\N{GRINNING FACE}" * limits.REQUEST_CHARS_MAX
    for body in (
        Evicted((run,) * most, ((limits.POOL_PAGES_MAX, (1 << 64) - 1),) * most),
        Live(((name, (1 << 63) - 1),) * limits.LIVE_REQUESTS_MAX),
    ):
        frame = encode(Envelope((1 << 63) - 1, 1 << 60, 1 << 60, body))
        assert len(frame) <= limits.MESSAGE_BYTES_MAX
        assert decode_envelope(frame).body == body


@pytest.mark.parametrize(
    "body",
    [
        Evicted(((1, 0, 1),) * (limits.GAVE_UP_PAGES_MAX + 1), ()),
        Evicted((), ((1, 1),) * (limits.GAVE_UP_PAGES_MAX + 1)),
        Live((("r", 1),) * (limits.LIVE_REQUESTS_MAX + 1)),
        Live((("r" * (limits.REQUEST_CHARS_MAX + 1), 1),)),
    ],
    ids=["runs", "words", "requests", "name"],
)
def test_a_report_longer_than_one_may_be_is_a_bad_message(body: ClientBody) -> None:
    with pytest.raises(BadMessage, match="length"):
        decode_envelope(encode(Envelope(1, 2, 3, body)))


NUMBERS = st.integers(-(1 << 63), (1 << 64) - 1)
NAMES = st.builds(str.__mul__, st.text(max_size=3), st.integers(0, 100))
"""Of any length up to 300, out of few drawn characters."""


@given(
    runs=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=6),
    words=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=6),
    live=st.lists(st.tuples(NAMES, NUMBERS), max_size=6),
    flags=st.tuples(st.booleans(), st.booleans()),
)
def test_reports_of_any_numbers_come_out_as_they_went_in_and_long_names_not_at_all(
    runs: list[tuple[int, int, int]],
    words: list[tuple[int, int]],
    live: list[tuple[str, int]],
    flags: tuple[bool, bool],
) -> None:
    evicted = Evicted(tuple(runs), tuple(words))
    assert decode_envelope(encode(Envelope(1, 2, 3, evicted))).body == evicted
    listed = Live(tuple(live), *flags)
    frame = encode(Envelope(1, 2, 3, listed))
    if any(len(name) > limits.REQUEST_CHARS_MAX for name, _ in live):
        with pytest.raises(BadMessage, match="length"):
            decode_envelope(frame)
    else:
        assert decode_envelope(frame).body == listed
