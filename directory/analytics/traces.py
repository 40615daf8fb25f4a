"""Readers of public traces: Mooncake, Qwen-Bailian and kv-cache-tester, as records.

Owns the three formats and their validation; each line that does not fit is named with its file,
its number and what is wrong. A trace says which prompts came, not what a cache did with them: the
records carry no hits, and `inserted` is the whole prompt.

Mooncake (one JSON object a line): timestamp (ms), input_length, output_length, hash_ids, one id a
block of 512 tokens, a partial last block included; equal ids mean equal tokens on an equal path.
Qwen-Bailian: chat_id, parent_chat_id, timestamp (s), input_length, output_length, type, turn,
hash_ids of 16-token blocks. Both are read in file order.
kv-cache-tester: conversations, see conversations.py.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Final, Literal, NamedTuple

import msgspec

from directory.analytics.record import PAGES_MAX, Access, chain_ids, pack

LINE_BYTES_MAX: Final = 16 * 1024 * 1024
SNIFF_BYTES: Final = 64 * 1024
GZIP_MAGIC: Final = b"\x1f\x8b"
DAMAGE: Final = (EOFError, OSError, zlib.error)
"""What reading a damaged gzip file raises: cut off, no gzip, wrong within."""
TOKENS_MAX: Final = 1 << 30
MOONCAKE_BLOCK_TOKENS: Final = 512
BAILIAN_BLOCK_TOKENS: Final = 16

TraceKind = Literal["mooncake", "bailian", "kv-cache-tester"]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Length = Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)]
Time = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class SourceError(Exception):
    """The file cannot be read as what it should be; one sentence for the user."""


class MooncakeLine(msgspec.Struct, frozen=True):
    """A line of a Mooncake trace; unknown fields are ignored."""

    timestamp: Time
    input_length: Length
    output_length: Natural
    hash_ids: list[int]


class BailianLine(msgspec.Struct, frozen=True):
    """A line of a Qwen-Bailian trace. `parent_chat_id`: -1 for the first turn of a session."""

    chat_id: int
    timestamp: Time
    input_length: Length
    output_length: Natural
    hash_ids: list[int]
    parent_chat_id: int = -1
    type: str = ""
    turn: int = 1


class BlockOptions(NamedTuple):
    """How blocks become pages. block_tokens: None for the format's own. every_block: count as
    studies of block ids do: a partial last block is a page, too; no page cache can hit it.
    limit: read so many requests at most."""

    block_tokens: int | None = None
    every_block: bool = False
    limit: int | None = None


AS_LISTED: Final = BlockOptions()


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file to read, unpacked if it is gzip; raises `SourceError` with one sentence."""
    if path.is_dir():
        raise SourceError(f"{path} is a directory: give the trace file itself")
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise SourceError(f"{path} does not exist") from None
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        if file.peek(2)[:2] == GZIP_MAGIC:
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield unpacked  # type: ignore[misc]
        else:
            yield file


def lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1 up."""
    number = 0
    try:
        with opened(path) as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                number += 1
                if len(line) > LINE_BYTES_MAX:
                    raise SourceError(
                        f"{path}:{number}: the line is longer than {LINE_BYTES_MAX} bytes"
                    )
                if line.strip():
                    yield number, line
    except DAMAGE as error:
        raise SourceError(f"{path}:{number + 1}: cannot be read further: {error}") from None


def read_mooncake(path: Path, options: BlockOptions = AS_LISTED) -> Iterator[Access]:
    """The requests of a Mooncake trace. Raises `SourceError` while it is read."""
    decoder = msgspec.json.Decoder(MooncakeLine)
    tokens = options.block_tokens or MOONCAKE_BLOCK_TOKENS
    blocks = _Blocks(tokens, options.every_block, rounded_down=False)

    def record(line: bytes, number: int) -> Access:
        found = decoder.decode(line)
        digests = blocks.digests(found.input_length, found.hash_ids)
        return Access(
            at_us=round(found.timestamp * 1000),
            request=str(number),
            tokens=found.input_length,
            page_tokens=tokens,
            inserted=found.input_length,
            output_tokens=found.output_length,
            digests=digests,
        )

    return _read(path, record, options.limit)


def read_bailian(path: Path, options: BlockOptions = AS_LISTED) -> Iterator[Access]:
    """The requests of a Qwen-Bailian trace; the tenant is the request's type."""
    decoder = msgspec.json.Decoder(BailianLine)
    tokens = options.block_tokens or _block_tokens_in(path.name) or BAILIAN_BLOCK_TOKENS
    blocks = _Blocks(tokens, options.every_block, rounded_down=True)

    def record(line: bytes, number: int) -> Access:
        del number
        found = decoder.decode(line)
        digests = blocks.digests(found.input_length, found.hash_ids)
        return Access(
            at_us=round(found.timestamp * 1_000_000),
            request=str(found.chat_id),
            tenant=found.type,
            tokens=found.input_length,
            page_tokens=tokens,
            inserted=found.input_length,
            output_tokens=found.output_length,
            digests=digests,
        )

    return _read(path, record, options.limit)


class _Blocks:
    """Checks a request's block ids and turns them into page digests."""

    def __init__(self, block_tokens: int, every_block: bool, *, rounded_down: bool) -> None:
        self._block_tokens = block_tokens
        self._every_block = every_block
        self._rounded_down = rounded_down

    def digests(self, length: int, ids: list[int]) -> bytes:
        """Packed digests of the pages; raises `SourceError` where the number of ids is wrong."""
        tokens = self._block_tokens
        expected = -(-length // tokens)
        if len(ids) != expected and not (self._rounded_down and len(ids) == length // tokens):
            raise SourceError(
                f"input_length {length} makes {expected} blocks of {tokens} tokens, but hash_ids "
                f"has {len(ids)}"
            )
        if len(ids) > PAGES_MAX:
            raise SourceError(f"hash_ids has {len(ids)} ids, at most {PAGES_MAX}")
        if not self._every_block:
            ids = ids[: length // tokens]
        return pack(chain_ids(ids))


def _block_tokens_in(name: str) -> int | None:
    """The block size that a Qwen-Bailian file has in its name: qwen_traceA_blksz_16.jsonl."""
    found = re.search(r"blksz_(\d{1,5})", name)
    return int(found[1]) or None if found else None


def _read(
    path: Path, record: Callable[[bytes, int], Access], limit: int | None
) -> Iterator[Access]:
    count = 0
    for number, line in lines(path):
        try:
            access = record(line, number)
        except SourceError as error:
            raise SourceError(f"{path}:{number}: {error}") from None
        except RecursionError:
            raise SourceError(f"{path}:{number}: the object is nested too deeply") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise SourceError(f"{path}:{number}: {plain(str(error))}") from None
        yield access
        count += 1
        if count == limit:
            return
    if not count:
        raise SourceError(f"{path} is empty: a trace has one JSON object a line and a request")


def plain(text: str) -> str:
    """A decoder's message in words that need no knowledge of the decoder."""
    if "malformed" in text or "truncated" in text or "trailing" in text or "utf-8" in text:
        return f"not a JSON object: {text}"
    field = re.fullmatch(r"(.*) - at `\$\.?(.*)`", text)
    if field and field[2]:
        return f"{field[2]}: {field[1]}"
    return field[1] if field else text
