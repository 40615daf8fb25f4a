"""Reader of kv-cache-tester traces: conversations of coding agents, played by a closed loop.

Owns the two forms of the format. Original: a JSON object a conversation (one a file, or one a
line) with id, block_size and requests of t (s from its beginning), in, out, hash_ids; a request
of type "subagent" holds requests of its own. Compact: an object row {"conv", "block_size", ...}
opens a conversation, then one row [t, agent, in, out, lcp, [[start, count], ...]] a request, whose
ids are the first `lcp` of the row before and the runs. hash_ids name whole blocks and are local to
a conversation (unless hash_id_scope is "global").

A conversation's clock starts at 0, so a file has no order between conversations. They are played
by `users` who each take the next conversation, of a shuffled row, when their last one has ended,
and wait between two requests as long as the recording did, at most `gap_s_max`.
"""

from __future__ import annotations

import heapq
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from directory.analytics.record import (
    PAGES_MAX,
    Access,
    Digests,
    chain_ids,
    pack,
)
from directory.analytics.traces import (
    AS_LISTED,
    DAMAGE,
    TOKENS_MAX,
    BlockOptions,
    Natural,
    SourceError,
    Time,
    lines,
    opened,
    plain,
)

USERS: Final = 32
GAP_S_MAX: Final = 60.0
DEPTH_MAX: Final = 8
FILE_BYTES_MAX: Final = 1 << 30

BlockTokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Length = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]


class LoopOptions(NamedTuple):
    """The closed loop. seed: of the order in which conversations are taken."""

    users: int = USERS
    gap_s_max: float = GAP_S_MAX
    seed: int = 0


CLOSED_LOOP: Final = LoopOptions()


class CompactHead(msgspec.Struct, frozen=True):
    """An object row of the compact form."""

    conv: str
    block_size: BlockTokens


class CompactRow(msgspec.Struct, array_like=True, frozen=True):
    """A request of the compact form."""

    t: Time
    agent: str
    tokens_in: Length
    tokens_out: Natural
    shared: Natural
    runs: list[tuple[Natural, Natural]]


class Turn(msgspec.Struct, frozen=True):
    """A request, or a sub-agent with requests, of the original form."""

    t: Time = 0.0
    type: str = ""
    tokens_in: Length = msgspec.field(name="in", default=0)
    tokens_out: Natural = msgspec.field(name="out", default=0)
    hash_ids: list[int] = []
    agent_id: str = ""
    requests: list[Turn] = []


class Original(msgspec.Struct, frozen=True):
    """A conversation of the original form."""

    id: str
    block_size: BlockTokens
    requests: list[Turn]
    hash_id_scope: Literal["local", "global"] = "local"


class Request(NamedTuple):
    """One request of a conversation: seconds since its beginning, agent, tokens, path."""

    t: float
    agent: str
    tokens_in: int
    tokens_out: int
    path: Digests


class Conversation(ABC):
    """A conversation whose requests are made when they are asked for. Paths share their arrays'
    content with nothing, so they may be kept."""

    def __init__(self, name: str, block_tokens: int) -> None:
        self.name = name
        self.block_tokens = block_tokens

    @abstractmethod
    def requests(self) -> Iterator[Request]:
        """The requests in order of time."""


class CompactConversation(Conversation):
    """Rows of the compact form, kept as they stand in the file until they are played."""

    def __init__(self, name: str, block_tokens: int, where: str) -> None:
        super().__init__(name, block_tokens)
        self.where = where
        self.rows: list[bytes] = []

    def requests(self) -> Iterator[Request]:
        decoder = msgspec.json.Decoder(CompactRow)
        seed = int.from_bytes(blake2b(self.name.encode(), digest_size=8).digest(), "little")
        path: Digests = array("Q")
        for number, line in enumerate(self.rows, start=1):
            where = f"{self.where}, request {number}"
            try:
                row = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise SourceError(f"{where}: {plain(str(error))}") from None
            if row.shared > len(path):
                raise SourceError(
                    f"{where}: shares {row.shared} blocks with a request of {len(path)}"
                )
            if row.shared + sum(count for _, count in row.runs) > PAGES_MAX:
                raise SourceError(f"{where}: more than {PAGES_MAX} blocks")
            path = path[: row.shared]
            for start, count in row.runs:
                path += chain_ids(range(start, start + count), previous=path[-1] if path else seed)
            yield Request(row.t, row.agent, row.tokens_in, row.tokens_out, path)


class OriginalConversation(Conversation):
    """A conversation of the original form."""

    def __init__(self, found: Original) -> None:
        super().__init__(found.id, found.block_size)
        self._turns = list(_flat(found.requests, "", 0))
        self._turns.sort(key=lambda turn: turn[1].t)
        self._global = found.hash_id_scope == "global"

    def requests(self) -> Iterator[Request]:
        name = b"" if self._global else self.name.encode()
        seed = int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
        for agent, turn in self._turns:
            path = chain_ids(turn.hash_ids, previous=seed)
            yield Request(turn.t, agent, turn.tokens_in, turn.tokens_out, path)


def _flat(turns: list[Turn], agent: str, depth: int) -> Iterator[tuple[str, Turn]]:
    if depth > DEPTH_MAX:
        raise SourceError(f"sub-agents are nested more than {DEPTH_MAX} deep")
    for turn in turns:
        if turn.type == "subagent" or turn.requests:
            yield from _flat(turn.requests, turn.agent_id or agent, depth + 1)
        else:
            yield agent, turn


def read_conversations(path: Path) -> list[Conversation]:
    """The conversations of a compact file, an original file, a file with one a line, or a folder
    of `*.json`. Raises `SourceError`."""
    if path.is_dir():
        found = [read_original(file) for file in sorted(path.glob("*.json"))]
        if not found:
            raise SourceError(f"{path} has no *.json files")
        return list(found)
    conversations: list[Conversation] = []
    head_decoder = msgspec.json.Decoder(CompactHead)
    original_decoder = msgspec.json.Decoder(Original)
    compact: CompactConversation | None = None
    for number, line in lines(path):
        row = line.strip()
        where = f"{path}:{number}"
        try:
            if row.startswith(b"["):
                if compact is None:
                    raise SourceError(f"{where}: a request before any conversation")
                compact.rows.append(row)
            elif b'"conv"' in row[:64]:
                head = head_decoder.decode(row)
                compact = CompactConversation(head.conv, head.block_size, f"{where} ({head.conv})")
                conversations.append(compact)
            elif row == b"{":
                return [read_original(path)]
            else:
                conversations.append(OriginalConversation(original_decoder.decode(row)))
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise SourceError(f"{where}: {plain(str(error))}") from None
    if not conversations:
        raise SourceError(f"{path} is empty: it has no conversation")
    return conversations


def read_original(path: Path) -> Conversation:
    """One conversation of the original form, a file of its own."""
    try:
        with opened(path) as file:
            data = file.read(FILE_BYTES_MAX)
    except DAMAGE as error:
        raise SourceError(f"{path} cannot be read: {error}") from None
    try:
        return OriginalConversation(msgspec.json.decode(data, type=Original))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise SourceError(f"{path}: {plain(str(error))}") from None


def play(
    conversations: list[Conversation],
    loop: LoopOptions = CLOSED_LOOP,
    options: BlockOptions = AS_LISTED,
) -> Iterator[Access]:
    """The requests of all conversations in the order in which the closed loop sends them.

    `every_block` of the options changes nothing here: the format lists whole blocks only.
    """
    waiting = list(conversations)
    # Taken from the end: a seed always gives the same order.
    random.Random(loop.seed).shuffle(waiting)
    waiting.reverse()
    # (time, number of the conversation, request, conversation, its other requests).
    due: list[tuple[float, int, Request, Conversation, Iterator[Request]]] = []
    started = count = 0

    def start(now: float) -> None:
        nonlocal started
        while waiting:
            conversation = waiting.pop()
            requests = conversation.requests()
            first = next(requests, None)
            if first is not None:
                heapq.heappush(due, (now, started, first, conversation, requests))
                started += 1
                return

    for _ in range(loop.users):
        start(0.0)
    while due:
        now, number, request, conversation, others = heapq.heappop(due)
        yield Access(
            at_us=round(now * 1_000_000),
            request=f"{conversation.name}/{request.agent}" if request.agent else conversation.name,
            tokens=max(request.tokens_in, len(request.path) * conversation.block_tokens),
            page_tokens=conversation.block_tokens,
            inserted=len(request.path) * conversation.block_tokens,
            output_tokens=request.tokens_out,
            digests=pack(request.path),
        )
        count += 1
        if count == options.limit:
            return
        following = next(others, None)
        if following is None:
            start(now)
        else:
            gap = min(loop.gap_s_max, max(0.0, following.t - request.t))
            heapq.heappush(due, (now + gap, number, following, conversation, others))
