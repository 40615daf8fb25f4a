"""The directory against a plain dictionary of paths, under random histories.

Strategy: one to three pools, thin or mirrored, random page size and host tier; every step of
`history.History` in any order. Checked after every step: the directory's own invariants, the whole
tree and the answers of matches against the model, conservation of pages; and the bytes of every
page that a restore brings.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from directory.core.events import Mode
from directory.core.limits import CLOSED_A_STEP_MAX
from tests.property.history import History, Pick

DATA = st.data()
MODES: tuple[Mode, ...] = ("thin", "mirrored")


def drawn(data: st.DataObject) -> Pick:
    """Choose by hypothesis, so that a failing history shrinks."""
    return lambda n: data.draw(st.integers(0, n - 1))


class TreeAgainstDict(RuleBasedStateMachine):
    """Every rule is a step of the history."""

    history: History

    @initialize(
        page_size=st.integers(1, 16),
        host_pages=st.sampled_from([0, 5, 16, 400]),
        modes=st.lists(st.sampled_from(MODES), min_size=1, max_size=3),
        closed_a_step=st.sampled_from([1, 3, CLOSED_A_STEP_MAX]),
    )
    def begin(self, page_size: int, host_pages: int, modes: list[Mode], closed_a_step: int) -> None:
        """Draw the world."""
        self.history = History(page_size, host_pages, modes, closed_a_step)

    @rule(data=DATA)
    def compute(self, data: st.DataObject) -> None:
        """Insert a path."""
        self.history.compute(drawn(data))

    @rule(data=DATA)
    def compute_more(self, data: st.DataObject) -> None:
        """Insert a path, or let a leased one grow."""
        self.history.compute(drawn(data))
        self.history.grow(drawn(data))

    @rule(data=DATA)
    def look_and_restore(self, data: st.DataObject) -> None:
        """Match with acquire, then restore."""
        self.history.look(drawn(data))
        self.history.restore(drawn(data))

    @rule(data=DATA)
    def look_or_release(self, data: st.DataObject) -> None:
        """A request comes, another goes."""
        self.history.release(drawn(data))
        self.history.look(drawn(data))

    @rule(data=DATA)
    def evict_or_release(self, data: st.DataObject) -> None:
        """Room is made."""
        self.history.release(drawn(data))
        self.history.evict(drawn(data))

    @rule(data=DATA)
    def finish(self, data: st.DataObject) -> None:
        """Copies go on and end."""
        self.history.carry_out(drawn(data))
        self.history.finish(drawn(data))

    @rule(data=DATA)
    def finish_all(self, data: st.DataObject) -> None:
        """Everything lands; then something rare may happen."""
        self.history.finish_all(drawn(data))
        self.history.mishap(drawn(data))

    @rule(data=DATA)
    def close_more(self, data: st.DataObject) -> None:
        """Who died goes on to end."""
        self.history.close_more(drawn(data))

    @invariant()
    def the_tree_is_the_dictionary(self) -> None:
        """See `History.check`."""
        if hasattr(self, "history"):
            self.history.check()

    def teardown(self) -> None:
        """At rest nothing is left behind."""
        if hasattr(self, "history"):
            self.history.end()


TestTreeAgainstDict = TreeAgainstDict.TestCase
TestTreeAgainstDict.settings = settings(max_examples=100, stateful_step_count=40)


@pytest.mark.parametrize("seed", range(24))
def test_a_random_storm_keeps_every_page_in_one_place_f26(seed: int) -> None:
    """Longer than hypothesis goes: every page in one node a pool, free + owned + in flight = all,
    a full walk after each step; those that die are taken out of the tree bit by bit."""
    pick = random.Random(seed).randrange
    history = History(
        1 + pick(4),
        (0, 6, 20, 400)[seed % 4],
        [MODES[pick(2)] for _ in range(1 + pick(3))],
        closed_a_step=(1, 1, 2, CLOSED_A_STEP_MAX)[seed // 4 % 4],
    )
    steps = [
        *[history.compute] * 5,
        *[history.look] * 4,
        *[history.grow] * 2,
        *[history.release] * 4,
        *[history.restore] * 3,
        *[history.evict] * 2,
        *[history.finish] * 6,
        history.carry_out,
        history.mishap,
        history.close_more,
    ]
    for _ in range(400):
        steps[pick(len(steps))](pick)
        history.check()
    history.end()
