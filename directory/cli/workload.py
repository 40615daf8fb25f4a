"""A seeded workload: chats of several turns over shared system prompts and documents.

Owns the shape of the conversations. The same seed gives the same tokens, order and routing on
every machine and run. Lengths scale with the page size, so that every page size sees the same
pattern of hits. It must never look at a cache.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from typing import NamedTuple

VOCABULARY = 128_000
SYSTEM_PROMPTS = 2
SYSTEM_PAGES = (4, 8)
DOCUMENT_PAGES = (8, 20)
MESSAGE_PAGES = (0.5, 2.0)
ANSWER_PAGES = (0.5, 2.0)
TURNS = (2, 6)
CHATS_AT_ONCE = 8
REQUESTS_PER_DOCUMENT = 12
DOCUMENTS_MIN = 4


class Turn(NamedTuple):
    """One request: packed u32 tokens of the whole prompt and of the answer; who serves it."""

    chat: int
    scheduler: int
    prompt: bytes
    answer: bytes


class Chat:
    """A conversation in progress: everything said so far, and the turns it still has."""

    def __init__(self, number: int, opening: bytes, turns: int) -> None:
        self.number = number
        self.history = opening
        self.turns = turns


class Workload:
    """Generates turns. Each turn goes to a random scheduler, as behind a router without memory."""

    def __init__(self, *, seed: int, schedulers: int, page_size: int, requests: int) -> None:
        self._random = random.Random(seed)
        self._schedulers = schedulers
        self._page_size = page_size
        self._requests = requests
        systems = [self._text(SYSTEM_PAGES) for _ in range(SYSTEM_PROMPTS)]
        documents = max(DOCUMENTS_MIN, requests // REQUESTS_PER_DOCUMENT)
        self._openings = [
            systems[number % SYSTEM_PROMPTS] + self._text(DOCUMENT_PAGES)
            for number in range(documents)
        ]
        self._chats_started = 0

    def turns(self) -> list[Turn]:
        """All requests in order. No chat speaks again before others have had their turn."""
        rested = deque(self._new_chat() for _ in range(CHATS_AT_ONCE))
        turns: list[Turn] = []
        while len(turns) < self._requests:
            # The half of the chats that spoke last waits, as its answers are still being read.
            index = self._random.randrange(CHATS_AT_ONCE // 2)
            chat = rested[index]
            del rested[index]
            turns.append(self._speak(chat))
            rested.append(chat if chat.turns else self._new_chat())
        return turns

    def _new_chat(self) -> Chat:
        self._chats_started += 1
        opening = self._random.choice(self._openings)
        return Chat(self._chats_started, opening, self._random.randint(*TURNS))

    def _speak(self, chat: Chat) -> Turn:
        prompt = chat.history + self._text(MESSAGE_PAGES)
        answer = self._text(ANSWER_PAGES)
        chat.history = prompt + answer
        chat.turns -= 1
        return Turn(chat.number, self._random.randrange(self._schedulers), prompt, answer)

    def _text(self, pages: tuple[float, float]) -> bytes:
        length = max(1, round(self._random.uniform(*pages) * self._page_size))
        return array("I", self._random.choices(range(VOCABULARY), k=length)).tobytes()


def longest_pages(turns: list[Turn], page_size: int) -> int:
    """Pages of the longest prompt with its answer, a partial last page counted."""
    most = max(len(turn.prompt) + len(turn.answer) for turn in turns)
    return -(-most // (4 * page_size))


def unique_pages(turns: list[Turn], page_size: int) -> int:
    """Different full pages in all prompts and answers; equal means an equal path of tokens."""
    step = 4 * page_size
    paths: dict[tuple[int, bytes], int] = {}
    for turn in turns:
        text, path = turn.prompt + turn.answer, 0
        for end in range(step, len(text) + 1, step):
            path = paths.setdefault((path, text[end - step : end]), len(paths) + 1)
    return len(paths)
