"""Conversations: many users, several turns each, every turn on either replica by chance.

Owns the conversations and the hand that drives them. Each turn's prompt is all that was said
before, the answers included, and a few new tokens; the replica of each turn is drawn from the
seed, so that every system is asked the same. A user asks again as soon as it was answered.
"""

from __future__ import annotations

import random
import select
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.sglang_gpu.workload import prompt
from tests.sglang import wire
from tests.sglang.engines import Engine

ANSWER_S: Final = 120.0


@dataclass(frozen=True)
class Talk:
    """Sizes, in tokens: of the first prompt, of what a user adds, of an answer."""

    users: int
    turns: int
    first: int
    more: int
    new: int


@dataclass
class Drove:
    """What came of it. `ttft_ms`: of each turn after the first; `first_ms`: of the first ones."""

    seconds: float = 0.0
    first_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failed: list[str] = field(default_factory=list)

    def as_json(self, talk: Talk) -> dict[str, Any]:
        """Figures of one system and round."""
        answers = len(self.first_ms) + len(self.ttft_ms)
        return {
            "seconds": round(self.seconds, 3),
            "requests_per_s": round(answers / self.seconds, 3),
            "output_tokens_per_s": round(answers * talk.new / self.seconds, 1),
            "ttft_ms_mean": round(statistics.fmean([*self.first_ms, *self.ttft_ms]), 2),
            "ttft_ms_mean_first": round(statistics.fmean(self.first_ms), 2),
            "ttft_ms_mean_later": round(statistics.fmean(self.ttft_ms), 2),
            "ttft_ms_median_later": round(statistics.median(self.ttft_ms), 2),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "failed": self.failed[:3],
        }


def drive(replicas: Sequence[Engine], talk: Talk, seed: int) -> Drove:
    """Let all users talk at once, to the end."""
    draw = random.Random(seed)
    routes = [[draw.randrange(len(replicas)) for _ in range(talk.turns)] for _ in range(talk.users)]
    said = [list(prompt(seed * 10_000 + user, talk.first)) for user in range(talk.users)]
    turns = [0] * talk.users
    open_: list[dict[str, int]] = [{} for _ in replicas]
    drove = Drove()
    began = time.monotonic()

    def ask(user: int) -> None:
        at = routes[user][turns[user]]
        name = replicas[at].submit(said[user], talk.new, stream=True)
        open_[at][name] = user

    for user in range(talk.users):
        ask(user)
    while any(open_):
        if not select.select(replicas, [], [], ANSWER_S)[0]:
            drove.failed.append(f"no answer within {ANSWER_S} s")
            break
        for at, engine in enumerate(replicas):
            for name, answer in engine.take_ended(open_[at]).items():
                user = open_[at].pop(name)
                if not isinstance(answer, wire.Output) or answer.finish != "length":
                    drove.failed.append(str(answer)[:300])
                    continue
                _take(drove, answer, said[user], first=not turns[user])
                said[user] += answer.tokens
                said[user] += prompt(seed * 10_000 + 1_000 * turns[user] + user + 500, talk.more)
                turns[user] += 1
                if turns[user] < talk.turns:
                    ask(user)
    drove.seconds = time.monotonic() - began
    return drove


def _take(drove: Drove, answer: wire.Output, said: list[int], *, first: bool) -> None:
    (drove.first_ms if first else drove.ttft_ms).append(1e3 * answer.came[0])
    drove.prompt_tokens += len(said)
    drove.cached_tokens += answer.cached
