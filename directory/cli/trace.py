"""Reading Mooncake-format traces, and what they say about the memory a replay needs.

Owns the line format and its validation. A trace is JSON lines: `timestamp` (ms), `input_length`
and `output_length` (tokens), `hash_ids` (one id a block of `block_tokens` tokens, the last block
may be partial). Equal ids mean equal tokens. It must never start anything: a trace is known to
be sound before the first process runs.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from directory.analytics.traces import SourceError, lines, plain
from directory.core.limits import TOKENS_BYTES_MAX

BLOCK_TOKENS = 512
PROMPT_TOKENS_MAX = TOKENS_BYTES_MAX // 4
TOKEN_IDS_MAX = 1 << 32

Natural = Annotated[int, msgspec.Meta(ge=0)]


class TraceError(Exception):
    """The trace cannot be replayed; the message is one sentence for the user."""


class TraceLine(msgspec.Struct, frozen=True):
    """One line as it stands in the file; unknown fields are ignored."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=PROMPT_TOKENS_MAX)]
    output_length: Natural
    hash_ids: list[Natural]


class TraceRequest(NamedTuple):
    """A request: packed u32 block ids (renumbered from 0 in order of appearance), tokens."""

    blocks: bytes
    length: int

    @property
    def block_ids(self) -> array[int]:
        """The block ids as integers."""
        return array("I", self.blocks)


_decoder = msgspec.json.Decoder(TraceLine)


def read_trace(
    path: Path, *, block_tokens: int = BLOCK_TOKENS, limit: int | None = None
) -> list[TraceRequest]:
    """Read and validate a trace, or its first `limit` requests; blank lines are skipped.

    Raises `TraceError` with `file:line: what is wrong` for a malformed line, and with one sentence
    for a file that is missing, not a file, not readable, or without any request.
    """
    # Ids are renumbered, so that hashes of any width become small token ids.
    numbers: dict[int, int] = {}
    requests: list[TraceRequest] = []
    try:
        for line_number, line in lines(path):
            try:
                requests.append(_parse(line, numbers, block_tokens))
            except TraceError as error:
                raise TraceError(f"{path}:{line_number}: {error}") from None
            if len(requests) == limit:
                break
    except SourceError as error:
        raise TraceError(str(error)) from None
    if not requests:
        raise TraceError(f"{path} is empty: a trace has one JSON object a line and a request")
    return requests


def _parse(line: bytes, numbers: dict[int, int], block_tokens: int) -> TraceRequest:
    try:
        request = _decoder.decode(line)
    except RecursionError:
        raise TraceError("not a JSON object of a request: it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(plain(str(error))) from None
    expected = -(-request.input_length // block_tokens)
    if len(request.hash_ids) != expected:
        raise TraceError(
            f"input_length {request.input_length} makes {expected} blocks of {block_tokens} "
            f"tokens, but hash_ids has {len(request.hash_ids)}"
        )
    ids = array("I", (numbers.setdefault(raw, len(numbers)) for raw in request.hash_ids))
    if len(numbers) * block_tokens > TOKEN_IDS_MAX:
        raise TraceError(f"more than {TOKEN_IDS_MAX // block_tokens} different blocks")
    return TraceRequest(ids.tobytes(), request.input_length)


class PageCount:
    """How many different pages a set of requests has: the pages of a cache that never evicts.

    A page is the same when the whole path of tokens up to its end is the same. The requests make
    a trie of blocks; a block at depth d with t tokens holds the page ends in (d*b, d*b + t].
    """

    def __init__(self, page_size: int, block_tokens: int) -> None:
        self._page_size = page_size
        self._block_tokens = block_tokens
        self._children: dict[tuple[int, int], int] = {}
        self._pages_of: list[int] = [0]
        self.unique_pages = 0
        self.longest_pages = 0

    def add(self, request: TraceRequest) -> None:
        """Count a request's pages in."""
        node, start = 0, 0
        for block in request.block_ids:
            child = self._children.setdefault((node, block), len(self._pages_of))
            if child == len(self._pages_of):
                self._pages_of.append(0)
            end = min(start + self._block_tokens, request.length)
            pages = end // self._page_size - start // self._page_size
            if pages > self._pages_of[child]:
                self.unique_pages += pages - self._pages_of[child]
                self._pages_of[child] = pages
            node, start = child, start + self._block_tokens
        self.longest_pages = max(self.longest_pages, -(-request.length // self._page_size))
