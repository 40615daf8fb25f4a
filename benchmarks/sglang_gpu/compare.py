"""Compare the digests of all engines of a node: every restored page was computed by somebody so.

Owns the comparison of checking mode's files (`scheduler_shim/sglang/checking.py`). Pages are known
by their content key: a hash of the namespace and of all tokens up to the page's end. On a GPU two
engines that compute the same page need not get the same bits, so a key may have several computed
digests; a restored page must have one of them. It must never count a page that it could not
compare: those are told apart (`unknown`), and so are pages of which an engine that was killed has
left nothing but that it published them (`lost`).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from scheduler_shim.sglang.checking import DIGEST_BYTES, SUFFIX, Record, read_records

WRONG_SHOWN = 5


@dataclass
class Comparison:
    """What came of it. `by`: compared pages by their way; `ambiguous`: keys of several digests."""

    computed: int = 0
    keys: int = 0
    ambiguous: int = 0
    compared: int = 0
    wrong: int = 0
    unknown: int = 0
    lost: int = 0
    by: Counter[str] = field(default_factory=Counter)
    first_wrong: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        """For a group's result."""
        return {**vars(self), "by": dict(self.by)}


def compare(folder: Path, dead: Mapping[str, float] | None = None) -> Comparison:
    """Compare all files of a folder. `dead`: when engines were killed, by name (monotonic, s)."""
    found = Comparison()
    known: dict[bytes, dict[bytes, set[str]]] = {}
    restored: list[tuple[str, Record]] = []
    begun: set[tuple[str, float, bytes]] = set()
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        engine = path.name.removesuffix(SUFFIX)
        for record in read_records(path):
            if record.kind == "restored":
                restored.append((engine, record))
                continue
            if record.kind == "begun":
                begun |= {(engine, record.at, key) for key in content_keys(record)}
                continue
            for key, digest in pages(record):
                found.computed += 1
                begun.discard((engine, record.at, key))
                known.setdefault(key, {}).setdefault(digest, set()).add(engine)
    found.keys = len(known)
    found.ambiguous = sum(len(digests) > 1 for digests in known.values())
    lost = {key for engine, _, key in begun}
    for engine, record in restored:
        _judge(found, engine, record, known, lost, dead or {})
    return found


def _judge(
    found: Comparison,
    engine: str,
    record: Record,
    known: Mapping[bytes, Mapping[bytes, set[str]]],
    lost: set[bytes],
    dead: Mapping[str, float],
) -> None:
    source = "host" if not record.peer_pages else "mixed" if record.host_pages else "peer"
    for number, (key, digest) in enumerate(pages(record)):
        owners = known.get(key)
        if key in lost and digest not in (owners or ()):
            found.lost += 1
            continue
        if owners is None:
            found.unknown += 1
            continue
        found.compared += 1
        if digest not in owners:
            found.wrong += 1
            if len(found.first_wrong) < WRONG_SHOWN:
                found.first_wrong.append(
                    f"{engine}: page {record.start + number} of {record.start} to "
                    f"{record.start + len(record.digests) // DIGEST_BYTES}, from {source}, "
                    f"at {record.at:.3f}: {digest.hex()}, not {[d.hex() for d in owners]}"
                )
            continue
        by = owners[digest]
        if all(dead.get(owner, record.at) < record.at for owner in by):
            way = "of a dead engine"
        elif by == {engine}:
            way = "own, evicted before"
        else:
            way = "of another engine" if engine not in by else "of several"
        landed = "layer by layer" if record.layerwise else "whole"
        found.by[f"{source}, {landed}"] += 1
        found.by[way] += 1


def pages(record: Record) -> Iterator[tuple[bytes, bytes]]:
    """(content key, digest) of each page of a record."""
    digests = record.digests
    cut = (digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES))
    return zip(content_keys(record), cut, strict=True)


def content_keys(record: Record) -> Iterator[bytes]:
    """The content key of each page of a record."""
    size = record.page_key
    at = record.start * size
    running = hashlib.blake2b(msgspec.msgpack.encode(record.key), digest_size=16)
    running.update(record.tokens[:at])
    while at < len(record.tokens):
        running.update(record.tokens[at : at + size])
        at += size
        yield running.copy().digest()
