"""State tables: their shape and the one function that steps through them."""

from enum import StrEnum

import pytest

from directory.core.errors import InvalidTransition
from directory.core.states import (
    RESIDENCY,
    TABLES,
    LeaseState,
    PoolPhase,
    ResidencyEvent,
    ResidencyState,
    TransferState,
    step,
)


def test_a_step_that_the_table_lacks_names_object_state_and_event() -> None:
    with pytest.raises(InvalidTransition, match="page 7: no step from absent by land"):
        step(RESIDENCY, ResidencyState.ABSENT, ResidencyEvent.LAND, "page 7")


@pytest.mark.parametrize(
    ("table", "start"),
    [
        ("residency", ResidencyState.ABSENT),
        ("transfer", TransferState.IDLE),
        ("lease", LeaseState.FREE),
        ("pool", PoolPhase.UNKNOWN),
    ],
)
def test_every_state_can_be_reached_from_the_first_one(table: str, start: StrEnum) -> None:
    steps = TABLES[table]
    reached: set[StrEnum] = {start}
    for _ in steps:
        reached |= {end for (state, _), end in steps.items() if state in reached}
    assert reached == set(type(start))


def test_every_life_cycle_has_a_table() -> None:
    assert set(TABLES) == {"residency", "transfer", "lease", "pool"}
