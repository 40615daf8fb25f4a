"""What keeps a journal in these tests: words and logs in memory, and what a tree holds at the host.

Owns no claim; it does what the shell does with the journal's actions.
"""

from __future__ import annotations

from collections.abc import Iterable

from directory.core.actions import Action, Journal, JournalBegin, JournalEnd
from directory.core.directory import Directory
from directory.core.ids import HOST
from directory.core.tokens import unpack_pages

Holding = tuple[object, bytes]
"""A namespace with its fingerprint and sizes, and the tokens of a path up to a page."""


class Keeper:
    """Words and logs. `steps`: bytes appended by each `take_in`."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}
        self.logs: list[bytes] = []
        self.steps: list[int] = []

    def word(self, slot: int) -> int:
        """The word of a slot."""
        return self.words.get(slot, 0)

    def valid(self) -> set[int]:
        """Slots whose word is not 0."""
        return {slot for slot, word in self.words.items() if word}

    def take_in(self, actions: Iterable[Action]) -> None:
        """Write down what an event brought."""
        appended = 0
        for action in actions:
            match action:
                case Journal():
                    appended += len(action.record)
                    self.logs = self.logs or [b""]
                    self.logs[-1] += action.record
                    for slot in unpack_pages(action.slots):
                        self.words[slot] = action.stamp
                case JournalBegin():
                    self.logs.append(b"")
                case JournalEnd():
                    del self.logs[:-1]
        self.steps.append(appended)


def recovered(
    keeper: Keeper, host_bytes: int, segment_bytes: int, *, salt: int = 99
) -> tuple[Directory, list[Action]]:
    """A new directory that has taken up what a keeper has; its invariants hold."""
    directory = Directory(host_bytes=host_bytes, segment_bytes=segment_bytes, journal=salt)
    segments = -(-host_bytes // segment_bytes)
    sizes = [min(segment_bytes, host_bytes - at * segment_bytes) for at in range(segments)]
    actions = directory.recover(keeper.logs, keeper.word, sizes)
    found = directory.check()
    assert not found, found
    return directory, actions


def holdings(directory: Directory) -> dict[int, Holding]:
    """What can be matched at the host: by slot, the page's whole identity."""
    held: dict[int, Holding] = {}
    for node in directory.host.nodes.values():
        residency = node.resident(HOST)
        if residency is None:
            continue
        space = node.space
        name = (space.fingerprint, space.key, space.page_size, space.page_bytes, space.ranks)
        path = b"".join(above.edge for above in node.path())
        first = len(path) - len(node.edge)
        for at, slot in enumerate(unpack_pages(residency.pages), 1):
            assert slot not in held
            held[slot] = (name, path[: first + at * space.page_key])
    return held
