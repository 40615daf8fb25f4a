"""What the engines are asked: prompts of very different lengths, each several times, in any order.

Owns prompts and the hand that drives them: a bounded number of requests is under way over all
engines, each answer is taken as it comes. Whoever runs it says what an answer has to be.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.sglang import wire
from tests.sglang.engines import Engine

FIRST_TOKEN: Final = 3
LAST_TOKEN: Final = 999
"""So few that a prompt of 32,768 tokens fits into a packet."""
SHARED_SHARE: Final = 0.4
DOCUMENTS: Final = 4
ANSWER_S: Final = 120.0


@dataclass(frozen=True)
class Question:
    """One request: the prompt's number, the prompt, and how many tokens are wanted."""

    number: int
    prompt: tuple[int, ...]
    new: int


@dataclass
class Answers:
    """What came back, by question: ids with the hit that they were computed over."""

    ids: dict[int, list[tuple[list[int], int, int]]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    answered: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    def take(self, question: Question, got: wire.Output) -> None:
        """Keep ids, tokens that were cached, and those of them that came from elsewhere."""
        host = int(str((got.details or {}).get("host", 0)))
        self.ids.setdefault(question.number, []).append((got.tokens, got.cached, host))
        self.answered += 1
        self.prompt_tokens += len(question.prompt)
        self.cached_tokens += got.cached


def prompt(seed: int, length: int) -> tuple[int, ...]:
    """Random tokens, from a seed."""
    draw = random.Random(seed)
    return tuple(draw.randint(FIRST_TOKEN, LAST_TOKEN) for _ in range(length))


def questions(count: int, shortest: int, longest: int, seed: int, new: int = 0) -> list[Question]:
    """`count` prompts; lengths spread evenly on a logarithmic scale, both ends included.

    Some begin like others. `new`: tokens wanted of each; 0: a few, by chance.
    """
    draw = random.Random(seed)
    ratio = longest / shortest
    documents = [prompt(seed * 1000 + n, longest // 3) for n in range(DOCUMENTS)]
    found = []
    for number in range(count):
        length = round(shortest * ratio ** (number / max(1, count - 1)))
        own = prompt(seed * 1000 + 100 + number, length)
        if draw.random() < SHARED_SHARE and number not in (0, count - 1):
            shared = draw.choice(documents)[: length * 3 // 4]
            own = (*shared, *own[len(shared) :])
        found.append(Question(number, own, new or draw.choice((1, 2, 8, 16, 40))))
    return found


def visits(of: Sequence[Question], times: int, seed: int) -> list[Question]:
    """Each question several times: the first two visits near one another, the others anywhere."""
    draw = random.Random(seed)
    order = list(of)
    draw.shuffle(order)
    placed: list[tuple[float, Question]] = []
    for at, question in enumerate(order):
        placed.append((at, question))
        for turn in range(1, times):
            later = draw.uniform(2, 12) if turn == 1 else draw.uniform(0, len(order))
            placed.append((at + later, question))
    return [question for _, question in sorted(placed, key=lambda place: place[0])]


class Drive:
    """Keeps `under_way` requests under way over the engines."""

    def __init__(
        self, engines: Sequence[Engine], asked: Sequence[Question], seed: int, under_way: int
    ) -> None:
        self.answers = Answers()
        self.engines = list(engines)
        self.left = list(reversed(asked))
        self.open: dict[str, tuple[Engine, Question]] = {}
        self.visited: dict[int, set[str]] = {}
        """Engines that were asked each question."""
        self._draw = random.Random(seed)
        self._under_way = under_way

    def run(self, until: Callable[[], bool] = lambda: False, *, drain: bool = True) -> Answers:
        """Go on until all is asked and answered, or `until` says so; then what is open is waited
        for if `drain`."""
        while (self.left or self.open) and not until():
            self.fill()
            self._collect()
        while drain and self.open:
            self._collect()
        return self.answers

    def fill(self) -> None:
        """Ask until so many are under way; take no answer."""
        while self.left and len(self.open) < self._under_way:
            self._submit()

    def lose(self, engine: Engine) -> int:
        """An engine is gone: what it had under way is asked again of the others."""
        self.engines.remove(engine)
        lost = [name for name, (of, _) in self.open.items() if of is engine]
        for name in lost:
            self.left.append(self.open.pop(name)[1])
        return len(lost)

    def _submit(self) -> None:
        question = self.left.pop()
        seen = self.visited.setdefault(question.number, set())
        # Somebody who has not seen it, where there is one: that is what sharing is for.
        fresh = [engine for engine in self.engines if engine.name not in seen]
        engine = self._draw.choice(fresh or self.engines)
        seen.add(engine.name)
        name = engine.submit(list(question.prompt), question.new)
        self.open[name] = (engine, question)

    def _collect(self) -> None:
        """Take one answer of an engine that has something under way."""
        engine = self._draw.choice(sorted({of.name for of, _ in self.open.values()}))
        names = [name for name, (of, _) in self.open.items() if of.name == engine]
        answer = self.open[names[0]][0].collect_any(names, ANSWER_S)
        assert not isinstance(answer, wire.Up)
        of, question = self.open.pop(answer.id)
        if isinstance(answer, wire.Output) and answer.finish == "length":
            self.answers.take(question, answer)
        else:
            self.answers.failed.append(f"{of.name}: {str(answer)[:400]}")


def within(seconds: float) -> Callable[[], bool]:
    """For `Drive.run`: end after so many seconds."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end
