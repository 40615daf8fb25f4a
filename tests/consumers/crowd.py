"""Schedulers that publish and evict through a real daemon, and the prompts that they are asked.

Owns each scheduler's free pages. Thin, so that the daemon's own matches say what each has.
"""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import NamedTuple

from directory.core.actions import GaveUp, Inserted, Matched
from directory.core.events import Evict, Insert, Match
from directory.core.namespace import NamespaceKey
from directory.core.tokens import unpack_pages
from tests.integration.daemon.support import PAGE_SIZE, RawClient, packed, wait_until

KEY = NamespaceKey()
POOL_PAGES = 400
DOCUMENTS = 12
DOCUMENT_PAGES = 24


class Held(NamedTuple):
    """The daemon's answer, in tokens: in the pool, and with what the host tier has beyond."""

    gpu: int
    with_host: int
    peer_pages: int


class Scheduler(RawClient):
    """One of the crowd. `prompts`: what it has published, in order."""

    def __init__(self, runtime_dir: Path, instance: str) -> None:
        super().__init__(runtime_dir, instance, mode="thin", page_count=POOL_PAGES)
        self.free = deque(range(POOL_PAGES))
        self.prompts: list[list[int]] = []

    def compute(self, tokens: list[int], key: NamespaceKey = KEY) -> None:
        """Publish all whole pages of a prompt, with the room that it takes made first."""
        count = len(tokens) // PAGE_SIZE
        have = self.look(tokens, key).gpu // PAGE_SIZE
        while len(self.free) < count:
            self.evict(count - len(self.free))
            have = self.look(tokens, key).gpu // PAGE_SIZE
        # The pages that it has already are handed in again under other numbers, and come back.
        pages = [self.free.popleft() for _ in range(count)]
        self.spans = self.spans % POOL_PAGES + 1
        while True:
            answer = self.ask(
                Insert(
                    "r", 0, key, packed(tokens), packed(pages), self.spans, self.value(),
                    self.pool_memory.now(),
                )
            )  # fmt: skip
            if isinstance(answer, Inserted):
                break
            self.spans = self.spans % POOL_PAGES + 1  # still some pages of that span are left
        assert answer.fresh_pages == count - have
        self.free.extend(unpack_pages(answer.duplicates))
        self.prompts.append(tokens)

    def value(self) -> int:
        """The word of the span that is opened next; words are never set back."""
        return self.pool_memory.words.read(self.spans)

    def evict(self, pages: int) -> None:
        """Give up cold pages."""
        answer = self.ask(Evict(pages))
        assert isinstance(answer, GaveUp)
        for span, value, _ in answer.words:
            self.pool_memory.words.set_at_least(span, value)
        self.free.extend(unpack_pages(answer.pages))

    def look(self, tokens: list[int], key: NamespaceKey = KEY) -> Held:
        """What the daemon says that this scheduler has of a prompt."""
        answer = self.ask(Match("r", 0, key, packed(tokens), acquire=False))
        assert isinstance(answer, Matched), answer
        own = answer.own_pages
        return Held(own * PAGE_SIZE, (own + answer.restorable_pages) * PAGE_SIZE, answer.peer_pages)

    def at_rest(self) -> None:
        """Wait until nothing is being copied."""
        wait_until(
            lambda: not any(self.stats()[name] for name in ("copies_in_flight", "backups_waiting"))
        )


class Prompts:
    """Prompts that share documents and turns, and questions that diverge anywhere."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        pick = self.random.randrange
        self.documents = [
            [pick(50_000) for _ in range(DOCUMENT_PAGES * PAGE_SIZE)] for _ in range(DOCUMENTS)
        ]
        self.asked: list[list[int]] = []

    def next(self) -> list[int]:
        """A document or an earlier prompt, cut somewhere, with something new behind."""
        pick = self.random.randrange
        source = self.documents if pick(2) or not self.asked else self.asked
        base = source[pick(len(source))]
        prompt = base[: pick(len(base) + 1)][: 160 * PAGE_SIZE]
        prompt = prompt + [pick(50_000) for _ in range(pick(8 * PAGE_SIZE))]
        self.asked.append(prompt)
        return prompt
