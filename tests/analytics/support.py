"""What the analytics tests have in common: short ways to write records, and the real traces."""

from array import array
from collections.abc import Iterable
from pathlib import Path

import pytest

from directory.analytics.log import AccessLog
from directory.analytics.record import Access, Digests, Frame, Hit, Kind, chain, pack

PAGE = 4
"""Tokens of a page in hand-written records."""
TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
CONVERSATION = TRACES / "mooncake_conversation_trace.jsonl"
AGENTIC = TRACES / "kv-cache-tester_compact.jsonl.gz"

needs_conversation = pytest.mark.skipif(
    not CONVERSATION.is_file(), reason="the conversation trace is not beside the repository"
)
needs_agentic = pytest.mark.skipif(
    not AGENTIC.is_file(), reason="the agentic trace is not beside the repository"
)


def path_of(letters: str) -> Digests:
    """The path of a prompt whose pages are named by letters."""
    tokens = array("I", (ord(letter) for letter in letters for _ in range(PAGE)))
    return chain(tokens.tobytes(), 4 * PAGE)


def access(
    letters: str,
    tail: int = 1,
    *,
    at_us: int = 0,
    hit: str = "",
    found: int | None = None,
    inserted: int | None = None,
    request: str = "",
    instance: str = "s0",
    namespace: bytes = b"",
    tenant: str = "",
    kind: Kind = "request",
    lookups: int = 1,
    tokens: int | None = None,
) -> Access:
    """A record: `letters` name its pages, `tail` tokens follow. hit: one letter a page by source
    (own, host, peer, store); found and inserted in pages."""
    counts = [PAGE * hit.count(source) for source in "ohps"]
    return Access(
        at_us=at_us,
        tokens=PAGE * len(letters) + tail if tokens is None else tokens,
        page_tokens=PAGE,
        digests=pack(path_of(letters)),
        instance=instance,
        request=request,
        namespace=namespace,
        tenant=tenant,
        kind=kind,
        hit=Hit(*counts),
        found=PAGE * (len(hit) if found is None else found),
        inserted=PAGE * (len(letters) - len(hit) if inserted is None else inserted),
        lookups=lookups,
    )


def write_log(folder: Path, frames: Iterable[Frame]) -> Path:
    """An access log of the frames; returns its folder."""
    log = AccessLog(folder)
    for frame in frames:
        log.add(frame, frame.at_us if not hasattr(frame, "fields") else 0)
    log.close(0)
    return folder
