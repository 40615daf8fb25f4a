"""Span slots of one pool: which words guard pages of the tree, and when a word moves on.

Owns the free slots and the page count behind each live one; the words themselves lie in shared
memory and are read by movers. It must never let a slot be used again while pages of its span are
in the tree, and never lower a word: both would let a copy of other pages pass for valid.
"""

from __future__ import annotations

from directory.core.errors import InternalError
from directory.core.ids import POOL_WORD
from transfer.ipc.sync import WordTable


class SpanTable:
    """Slots 1..page_count of a word table of page_count + 1 words; slot 0 is the pool word.

    Every live span holds at least one page of the tree, so a slot is always left for a page that
    is not in the tree yet.
    """

    def __init__(self, words: WordTable, page_count: int) -> None:
        if len(words) < page_count + 1:
            raise InternalError(f"{len(words)} words for {page_count} pages and the pool word")
        self._words = words
        self._page_count = page_count
        self._free = list(range(page_count, POOL_WORD, -1))
        self._live: dict[int, int] = {}
        self._reserved: set[int] = set()
        self._live_pages = 0

    def allocate(self) -> tuple[int, int]:
        """Reserve a slot for a report; returns it with the word's present value.

        With every slot live or reserved every page is in the tree or about to be: a report can
        bring nothing new then, and gets no slot (0), as reports without new pages need none.
        """
        if not self._free:
            return POOL_WORD, 0
        slot = self._free.pop()
        self._reserved.add(slot)
        return slot, self._words.read(slot)

    def publish(self, slot: int, pages: int) -> None:
        """A report took `pages` new pages under a reserved slot; with none the slot is free."""
        if slot == POOL_WORD:
            if pages:
                raise InternalError(f"{pages} new pages, and all {self._page_count} slots are live")
            return
        self._reserved.remove(slot)
        if pages:
            self._live[slot] = pages
            self._live_pages += pages
        else:
            self._free.append(slot)

    def give_up(self, slot: int, value: int, pages: int) -> None:
        """Write the word that the tree's owner decided, *before* the pages are freed.

        A slot whose last page goes is free for another report, at the value it has then.
        """
        left = self._live.get(slot, 0) - pages
        if left < 0:
            raise InternalError(f"{pages} pages of span {slot} are given up, it has {left + pages}")
        self._words.set_at_least(slot, value)
        self._live_pages -= pages
        if left:
            self._live[slot] = left
        else:
            del self._live[slot]
            self._free.append(slot)

    def give_up_all(self) -> int:
        """Void every reader of the pool by its pool word, and free every live slot.

        Returns the pool word's new value. Reserved slots stay reserved.
        """
        value = self._words.bump_pool()
        self._free.extend(sorted(self._live, reverse=True))
        self._live.clear()
        self._live_pages = 0
        return value

    def word(self, slot: int) -> int:
        """Present value of a word."""
        return self._words.read(slot)

    def live(self, slot: int) -> int:
        """Pages of the tree behind a slot."""
        return self._live.get(slot, 0)

    @property
    def live_pages(self) -> int:
        """Pages of the tree behind all slots: what the tree holds of the pool."""
        return self._live_pages

    def check(self) -> list[str]:
        """Return what does not add up: every slot is free, reserved or live, and only one."""
        total = len(self._free) + len(self._reserved) + len(self._live)
        distinct = len({*self._free, *self._reserved, *self._live})
        pages = sum(self._live.values())
        if pages != self._live_pages:
            return [f"spans: {self._live_pages} pages are counted, the live ones have {pages}"]
        if total == distinct == self._page_count:
            return []
        return [f"spans: {total} slots accounted for, {distinct} distinct of {self._page_count}"]

    def __repr__(self) -> str:
        return f"<SpanTable {len(self._live)} live of {self._page_count}, {self.live_pages} pages>"
