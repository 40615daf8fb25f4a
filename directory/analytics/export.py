"""Writing records in the formats of others: Mooncake traces, CSV and Parquet.

Owns the columns. Tokens are in none of them, because they are in no record. Requests that do not
count (retries, probes, recomputations) are left out of a Mooncake trace, which cannot tell them
apart, and named by the column `kind` in a table.
"""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from directory.analytics.record import Access
from directory.analytics.source import Source

BATCH: Final = 10_000
COLUMNS: Final = (
    "at_us", "instance", "request", "attempt", "kind", "namespace", "tenant", "tokens",
    "output_tokens", "page_tokens", "blocks", "hit_own", "hit_host", "hit_peer", "hit_store",
    "found", "restored", "inserted", "evicted_device", "evicted_host", "latency_us", "restore_us",
    "lookups", "path_pages", "path_digest",
)  # fmt: skip
"""Of CSV and Parquet. path_digest: of the last page, 16 hex digits; it names the whole path."""
TEXT_COLUMNS: Final = {"instance", "request", "kind", "namespace", "tenant", "path_digest"}


class ExportError(Exception):
    """The records cannot be written so; one sentence for the user."""


def export(source: Source, target: Path) -> int:
    """Write the source's requests to `target`, in the format of its ending; returns how many.

    Raises `ExportError`, `SourceError` and `OSError`.
    """
    accesses = (frame for frame in source.frames() if isinstance(frame, Access))
    return export_accesses(accesses, target)


def export_accesses(accesses: Iterator[Access], target: Path) -> int:
    """Write these requests likewise; raises the same."""
    writer = FORMATS.get(target.suffix.lower())
    if writer is None:
        raise ExportError(f"{target}: the name must end in one of {', '.join(FORMATS)}")
    return writer(accesses, target)


def check(target: Path) -> None:
    """Raise now what `export_accesses` would at its end, for a target that cannot be written."""
    if target.suffix.lower() == ".parquet":
        _arrow()
    with target.open("ab"):
        pass


def row(access: Access) -> tuple[int | str, ...]:
    """The values of COLUMNS."""
    hit, path = access.hit, access.path
    return (
        access.at_us, access.instance, access.request, access.attempt, access.kind,
        access.namespace.hex(), access.tenant, access.tokens, access.output_tokens,
        access.page_tokens, access.blocks, hit.own, hit.host, hit.peer, hit.store, access.found,
        access.restored, access.inserted, access.evicted_device, access.evicted_host,
        access.latency_us, access.restore_us, access.lookups, len(path),
        f"{path[-1]:016x}" if path else "",
    )  # fmt: skip


def _mooncake(accesses: Iterator[Access], target: Path) -> int:
    """Equal prefixes get equal ids in order of appearance; a partial last block is always new."""
    ids: dict[tuple[bytes, int], int] = {}
    used = written = 0
    first_us: int | None = None
    with target.open("wb") as file:
        for access in accesses:
            if access.kind != "request" or access.tokens < 1:
                continue
            first_us = access.at_us if first_us is None else first_us
            whole = access.tokens // access.page_tokens
            path = access.path[:whole]
            hash_ids = []
            for digest in path:
                key = (access.namespace, digest)
                if key not in ids:
                    ids[key] = used
                    used += 1
                hash_ids.append(ids[key])
            missing = access.blocks - len(hash_ids)
            # Blocks without a digest are never equal to any other.
            hash_ids += range(used, used + missing)
            used += missing
            line = {
                "timestamp": max(0, access.at_us - first_us) // 1000,
                "input_length": access.tokens,
                "output_length": access.output_tokens,
                "hash_ids": hash_ids,
            }
            file.write(msgspec.json.encode(line) + b"\n")
            written += 1
    return written


def _csv(accesses: Iterator[Access], target: Path) -> int:
    written = 0
    with target.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for access in accesses:
            writer.writerow(row(access))
            written += 1
    return written


def _arrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ExportError(
            "Parquet needs pyarrow: pip install pyarrow, or export to .csv instead"
        ) from None


def _parquet(accesses: Iterator[Access], target: Path) -> int:
    arrow, parquet = _arrow()
    schema = arrow.schema(
        [(name, arrow.string() if name in TEXT_COLUMNS else arrow.int64()) for name in COLUMNS]
    )
    written = 0
    with parquet.ParquetWriter(str(target), schema) as writer:
        rows: list[tuple[int | str, ...]] = []

        def batch() -> None:
            columns = zip(*rows, strict=True) if rows else ([] for _ in COLUMNS)
            table = [list(column) for column in columns]
            writer.write_table(arrow.table(dict(zip(COLUMNS, table, strict=True)), schema=schema))
            rows.clear()

        for access in accesses:
            rows.append(row(access))
            written += 1
            if len(rows) == BATCH:
                batch()
        batch()
    return written


FORMATS: Final[dict[str, Callable[[Iterator[Access], Path], int]]] = {
    ".jsonl": _mooncake,
    ".csv": _csv,
    ".parquet": _parquet,
}
"""Ending -> writer. `.jsonl` is a Mooncake trace."""
