"""A seeded storm of chats over several engines: what is asked, and a hand that drives it.

Owns the workload and the requests under way. Prompts share system texts and grow by turns, pools
are too small for them, and requests are given up at any moment. Every answer is compared with a
cold one; what was given up must be the beginning of it. It must be told of engines that are killed
(`lose`): any other failure is an error.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.sglang import model, wire
from tests.sglang.engines import Engine
from tests.sglang.oracle import Oracle

TIGHT: Final[dict[str, Any]] = {
    "max_total_tokens": 768,
    "max_running_requests": 6,
    "chunked_prefill_size": 128,
    "context_length": 700,
    # Admit far more than there is room for, so that running requests are retracted.
    "schedule_conservativeness": 0.1,
}
"""SGLang's arguments for engines in which everything is evicted all the time."""

UNDER_WAY = 10
"""Requests that the whole storm keeps under way: more than the engines run at once."""


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the workload and its cold answer."""

    prompt: tuple[int, ...]
    new: int
    answer: tuple[int, ...]


@dataclass(slots=True)
class Tally:
    """What came of the storm."""

    answered: int = 0
    hit: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    aborted_unstarted: int = 0
    aborted_running: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)


def workload(oracle: Oracle, version: str, count: int, seed: int) -> list[Question]:
    """`count` questions of several chats. A turn contains its predecessors and their answers."""
    draw = random.Random(seed)
    systems = [model.prompt(seed * 100 + n, draw.choice((96, 130, 160))) for n in range(4)]
    chats = [[*draw.choice(systems), *_said(draw)] for _ in range(count // 4)]
    questions: list[Question] = []
    while len(questions) < count:
        asked = [(chat, draw.choice((8, 8, 24, 60))) for chat in chats]
        answers = oracle.many(version, asked)
        for (chat, new), answer in zip(asked, answers, strict=True):
            questions.append(Question(tuple(chat), new, tuple(answer)))
        for chat, answer in zip(chats, answers, strict=True):
            chat.extend((*answer, *_said(draw)))
    # Turns of one chat mostly stay in order, those of different chats mix.
    order = sorted(range(count), key=lambda n: n + draw.uniform(0, count / 3))
    return [questions[n] for n in order]


def _said(draw: random.Random) -> list[int]:
    return [draw.randrange(3, model.VOCABULARY) for _ in range(draw.choice((5, 20, 45)))]


class Storm:
    """Keeps `UNDER_WAY` requests under way over the engines until the questions are through."""

    def __init__(self, engines: Sequence[Engine], questions: Sequence[Question], seed: int) -> None:
        self.tally = Tally()
        self.engines = list(engines)
        self._left = list(reversed(questions))
        self._draw = random.Random(seed)
        self._open: dict[str, tuple[Engine, Question, bool]] = {}

    def run(self, until: int = 0, *, aborts: bool = True) -> Tally:
        """Go on until so many questions are left; 0: to the end, with nothing under way."""
        while len(self._left) > until or (until == 0 and self._open):
            while len(self._left) > until and len(self._open) < UNDER_WAY:
                self._submit(self._draw.choice(self.engines), self._left.pop(), aborts)
            if aborts and self._open and self._draw.random() < 0.1:
                self._abort(self._draw.choice(sorted(self._open)))
            self._collect_one()
        return self.tally

    @property
    def left(self) -> int:
        """Questions that were not asked yet."""
        return len(self._left)

    def lose(self, engine: Engine) -> None:
        """An engine is gone: what it had under way is asked again of the others."""
        self.engines.remove(engine)
        for name, (of, question, _) in list(self._open.items()):
            if of is engine:
                del self._open[name]
                self._left.append(question)
                self.tally.lost += 1

    def _submit(self, engine: Engine, question: Question, aborts: bool) -> None:
        name = engine.submit(list(question.prompt), question.new)
        self._open[name] = (engine, question, False)
        if aborts and self._draw.random() < 0.08:
            self._abort(name)  # mostly still in the waiting queue

    def _abort(self, name: str) -> None:
        engine, question, _ = self._open[name]
        self._open[name] = (engine, question, True)
        engine.abort(name)

    def _collect_one(self) -> None:
        """Take the next answer of an engine that has requests under way."""
        engine = self._draw.choice(sorted({e.name for e, _, _ in self._open.values()}))
        names = [name for name, (of, _, _) in self._open.items() if of.name == engine]
        answer = self._open[names[0]][0].collect_any(names)
        assert not isinstance(answer, wire.Up)
        of, question, aborted = self._open.pop(answer.id)
        if not isinstance(answer, wire.Output):
            # SGLang answers a request that is aborted while it waits with an error.
            if not aborted:
                self.tally.wrong.append(f"{answer}")
            self.tally.aborted_unstarted += 1
            return
        self._judge(of, question, aborted, answer)

    def _judge(self, of: Engine, question: Question, aborted: bool, got: wire.Output) -> None:
        tally = self.tally
        if got.finish != "length" and not aborted:
            tally.wrong.append(f"{of.name}: {got.id} ended with {got.finish!r}")
        if tuple(got.tokens) != question.answer[: len(got.tokens)]:
            tally.wrong.append(f"{of.name}: {got}, cold: {question.answer}")
        if got.finish == "length":
            tally.answered += 1
            tally.hit += got.cached > 0
            tally.cached_tokens += got.cached
            tally.prompt_tokens += len(question.prompt)
            if len(got.tokens) != question.new:
                tally.wrong.append(f"{of.name}: {got.id} has {len(got.tokens)} of {question.new}")
        elif got.tokens:
            tally.aborted_running += 1
        else:
            tally.aborted_unstarted += 1


def counted(engines: Sequence[Engine], word: str) -> int:
    """How often the engines' logs say a word."""
    return sum(engine.log().count(word) for engine in engines)
