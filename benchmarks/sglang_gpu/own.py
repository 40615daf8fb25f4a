"""Group `own`: a hit of the own pool beside stock SGLang's, with as many pairs as the time gives.

Owns one row of the table of `rows` (rows.py) and its order: an engine with daemon and mover, and
stock SGLang on the same GPU. Both have one prompt in their pools and are asked it again and again,
in turn: an engine has the seat, answers once more, uncounted, then once for each of two pairs, of
which the first ends with it and the second begins with it. So the two of a pair have one uncounted
hit between them, none pays for waking up an idle process, and each goes first as often as the
other. Every pair counts but the first. A page that is restored, backed up again or computed again
where it should have been hit fails the run. Judged as in `rows`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

from benchmarks.sglang_gpu import rows
from benchmarks.sglang_gpu.places import Place
from benchmarks.sglang_gpu.scales import Scale
from benchmarks.sglang_gpu.workload import prompt

COLUMNS: Final = ("own", "stock own")


def run(
    place: Place,
    scale: Scale,
    python: Path | str,
    *,
    pairs: int = 0,
    save: rows.Save = lambda _: None,
) -> dict[str, Any]:
    """Run the group. `pairs`: of each length (0: the scale's). SGLang fills the weights in."""
    return rows.run(place, scale, python, pairs=pairs, dummy=True, table=Own, save=save)


class Own(rows.Rows):
    """The engine with a daemon is b, as in `rows`."""

    NAMES: ClassVar[str] = "b"
    BESIDE: ClassVar[tuple[str, ...]] = ("stock",)

    @staticmethod
    def lengths(scale: Scale) -> Sequence[tuple[int, int]]:
        """The shortest first: the time limit may end the run."""
        return list(zip(sorted(scale.rows_lengths), scale.own_pairs, strict=True))

    @staticmethod
    def tier_gib(scale: Scale) -> int:
        """One prompt of each length is backed up."""
        return scale.own_tier_gib

    def _rounds(self, at: int, length: int, column: rows.Column, pairs: int) -> Iterator[None]:
        """Compute the prompt of a length, then measure; now and then there is more in the
        column. A first round does not count."""
        tokens = list(prompt(1_000 * (at + 1), length))
        before = self._backed_up()
        for column_of in COLUMNS:
            name = rows.ASKED_OF[column_of]
            self.engines[name].generate(self._short, 1)
            self.engines[name].generate(tokens, 1)
            self._last[name] = tokens
        self._wait_backed_up(before + length // self.page)
        moved = [self._backed_up(), *self._restored()]
        whole = length - 1 - (length - 1) % self.page
        for number in range(1 + pairs):
            if number % rows.SEATED_FOR == 0:
                self._seat()
            if number == 0:
                self._hit(rows.ASKED_OF[turned(0)[0]], whole)
            self._pair(number, column if number else {}, tokens, whole)
            if number == pairs or (number and number % rows.SEATED_FOR == 0):
                yield
        after = [self._backed_up(), *self._restored()]
        if after != moved:
            self.misses.append(f"pages were moved while all was in the pools: {moved}, {after}")

    def _pair(self, number: int, kept: rows.Column, tokens: list[int], whole: int) -> None:
        """The engine that has the seat, then the other one."""
        first, second = turned(number)
        self._ask(rows.ASKED_OF[first], first, tokens, kept, whole)
        self._hit(rows.ASKED_OF[second], whole)
        self._ask(rows.ASKED_OF[second], second, tokens, kept, whole)


def turned(number: int) -> tuple[str, str]:
    """The columns of a round in order: whoever was second goes first in the next one."""
    first, second = COLUMNS
    return (second, first) if number & 1 else (first, second)
