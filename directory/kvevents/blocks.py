"""Blocks: pages as consumers see them, and the events that tell of many at once.

Owns the page of the ledger, kept small for there may be millions, and the merging of consecutive
pages into one event. It knows nothing of who holds a page.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from directory.core.ids import Place
from directory.kvevents.records import SpaceNamed

GPU: Final = "GPU"
CPU: Final = "CPU_PINNED"
"""The two media of SGLang's events that a page can be in here."""


class Page:
    """One page of one path. `edge`, `at`: the tokens it was first told with, and which page of
    them it is. `holders`, `space`: the ledger's; `space` is a namespace that has it, or had."""

    __slots__ = ("at", "block", "depth", "edge", "holders", "parent", "space")

    def __init__(self, block: int, parent: int | None, depth: int, edge: bytes, at: int) -> None:
        self.block = block
        self.parent = parent
        self.depth = depth
        self.edge = edge
        self.at = at
        self.holders: tuple[tuple[Place, int], ...] = ()
        self.space = 0


class Stored(NamedTuple):
    """Consecutive blocks of one path that are in a medium now."""

    blocks: list[int]
    parent: int | None
    tokens: list[int]
    page_size: int
    medium: str
    cache_salt: str | None
    lora_name: str | None


def chains(pages: Iterable[tuple[Page, str]], spaces: Mapping[int, SpaceNamed]) -> list[Stored]:
    """Merge pages, each with what it is in, into events; each after that of its parent."""
    events: list[Stored] = []
    ends: dict[int, Stored] = {}
    for page, medium in sorted(pages, key=lambda pair: pair[0].depth):
        space = spaces[page.space]
        event = None if page.parent is None else ends.pop(page.parent, None)
        if event is None or event.medium != medium:
            lora_name = None if space.adapter is None else space.adapter[0]
            event = Stored(
                [], page.parent, [], space.page_size, medium, space.cache_salt, lora_name
            )
            events.append(event)
        event.blocks.append(page.block)
        event.tokens.extend(tokens_of(page, space))
        ends[page.block] = event
    return events


def tokens_of(page: Page, space: SpaceNamed) -> list[int]:
    """Return a page's token ids; of pairs the first ones, so that there are `page_size`."""
    page_key = space.page_size * space.unit_bytes
    packed = page.edge[page.at * page_key : (page.at + 1) * page_key]
    bytes_a_token = space.unit_bytes // (2 if space.bigram else 1)
    tokens = array("I" if bytes_a_token == 4 else "Q", packed).tolist()
    return tokens[::2] if space.bigram else tokens
