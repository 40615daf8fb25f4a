"""The union: one stream of what all schedulers and the host tier have, for people who look at it.

Owns what was last told of each block: who has it, as text in the place of the medium. It is told
again when that changes and removed when the last one is gone. A router must never be given this
stream, for its media are none and it names no scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from directory.core.ids import HOST, Place
from directory.kvevents.blocks import CPU, GPU, Page
from directory.kvevents.ledger import Ledger
from directory.kvevents.wire import Event

UNION: Final = ""
"""The name of the union among instances; none of them is empty."""


class Union:
    """The union of one ledger. `page_size`: that of the first scheduler; pages of other sizes are
    left out, for a viewer knows one."""

    def __init__(self, ledger: Ledger) -> None:
        self.page_size = 0
        self._ledger = ledger
        self._labels: dict[int, str] = {}

    def settle(self) -> list[Event]:
        """Return what changed; to be called before the ledger is settled."""
        return self._tell(self._ledger.touched())

    def everything(self) -> list[Event]:
        """Return a clear and all that there is."""
        self._labels.clear()
        return [None, *self._tell(self._ledger.blocks())]

    def _tell(self, blocks: Iterable[int]) -> list[Event]:
        if not self.page_size:
            sizes = [opened.page_size for opened in self._ledger.open.values()]
            self.page_size = sizes[0] if sizes else 0
        removed: list[int] = []
        stored: list[tuple[Page, str]] = []
        for block in blocks:
            page, places = self._ledger.find(block, self.page_size)
            label = " ".join(sorted(filter(None, map(self._label, places))))
            if label == self._labels.get(block, ""):
                continue
            if page is None or not label:
                del self._labels[block]
                removed.append(block)
            else:
                self._labels[block] = label
                stored.append((page, label))
        gone: list[Event] = [(None, removed)] if removed else []
        return [*gone, *self._ledger.stored(stored)]

    def _label(self, place: Place) -> str:
        if place == HOST:
            return f"host:{CPU}"
        opened = self._ledger.open.get(place)
        return "" if opened is None else f"{opened.instance}:{GPU}"
