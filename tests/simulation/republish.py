"""What a pool holds, as the reports that a new registration must hear.

Owns nothing: reads a mirror's tree. One report a span, ancestors first, so that at the daemon the
spans are cut as they are here and later reports about them are understood.
"""

from __future__ import annotations

from directory.core.events import Flush, Insert
from directory.core.node import Node
from scheduler_shim.mirror import PLACE, Mirror

Report = Insert | Flush


def reports(mirror: Mirror, pool_word: int) -> list[Report]:
    """The pool word first, then an insert for every span."""
    found: list[Report] = [Flush("pool", pool_word)]
    spans = sorted(
        mirror.pool.spans.items(), key=lambda item: (_first_page(item[0], item[1].parts), item[0])
    )
    for slot, span in spans:
        last = span.parts[-1]
        path = last.path()
        tokens = b"".join(node.edge for node in path)
        pages = b"".join(node.places[PLACE].pages for node in path)
        # The last part may carry other spans' pages below this one's.
        behind = 0
        for run in reversed(last.places[PLACE].runs):
            if run.span == slot:
                break
            behind += run.length
        count = len(pages) // 4 - behind
        written = (
            max(node.places[PLACE].written[0] for node in path),
            max(node.places[PLACE].written[1] for node in path),
        )
        found.append(
            Insert(
                "republish",
                0,
                last.space.key,
                tokens[: count * last.space.page_key],
                pages[: 4 * count],
                slot,
                span.value,
                written,
            )
        )
    return found


def _first_page(slot: int, parts: list[Node]) -> int:
    """How many pages stand above a span's first one on its path."""
    first = parts[0]
    above = sum(node.page_count for node in first.path()[:-1])
    for run in first.places[PLACE].runs:
        if run.span == slot:
            break
        above += run.length
    return above
