"""The life cycle of a copy is its table, and nothing beside it."""

import itertools

import pytest

from directory.core.errors import InvalidTransition
from tests.unit.transfer.support import HOST, copy, part
from transfer.copies import TRANSITIONS, Copy, CopyState, CopyStep, involved_pools


def make(state: CopyState) -> Copy:
    made = Copy(copy(1, "backup", part(1, [0], HOST, [0])), deadline_us=0)
    made.state = state
    return made


@pytest.mark.parametrize(("state", "step"), list(itertools.product(CopyState, CopyStep)))
def test_a_step_leads_where_the_table_says_or_is_an_error(state: CopyState, step: CopyStep) -> None:
    made = make(state)
    if (state, step) in TRANSITIONS:
        made.step(step)
        assert made.state is TRANSITIONS[state, step]
    else:
        with pytest.raises(InvalidTransition, match="Copy 1 backup"):
            made.step(step)


def test_a_copy_that_is_done_goes_nowhere() -> None:
    assert not [step for state, step in TRANSITIONS if state is CopyState.DONE]


def test_only_backups_are_not_urgent() -> None:
    kinds = ("backup", "load_back", "peer_copy", "mixed")
    urgent = [Copy(copy(1, k), 0).urgent for k in kinds]  # type: ignore[arg-type]
    assert urgent == [False, True, True, True]


def test_a_copy_involves_the_pools_of_its_parts_fences_and_words() -> None:
    request = copy(
        1,
        "mixed",
        part(HOST, [0], 2, [0]),
        part(1, [0], 2, [1]),
        fences=[(3, 0, 1)],
        words=[(4, 0, 1)],
    )
    assert involved_pools(request) == {1, 2, 3, 4}
