"""Damaged host pages at any moment of any run: no wrong page, nothing stuck, clean at rest."""

from __future__ import annotations

import msgspec
import pytest

from directory.core.damage import Damage
from directory.core.host import HostSlots
from tests.simulation.options import Options, draw
from tests.simulation.simulation import Simulation

SEEDS = range(14)


def damaging(seed: int) -> Options:
    """A seed's run, with a host tier of which many pages turn out damaged."""
    options = draw(seed)
    return msgspec.structs.replace(
        options, host_pages=options.host_pages or 12, page_damage=(3.0, 20.0, 100.0)[seed % 3]
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_whose_host_pages_are_damaged_again_and_again_stays_clean(seed: int) -> None:
    result = Simulation(damaging(seed)).run()
    assert not result.problem, result.problem


def test_the_damage_strikes_what_is_in_use() -> None:
    found = [Simulation(damaging(seed)).run().facts for seed in range(2)]
    assert sum(facts.get("page_damage", 0) for facts in found) > 5


@pytest.mark.parametrize("bug", ["kept", "handed out"])
def test_the_checkers_find_damage_that_is_not_acted_upon(
    monkeypatch: pytest.MonkeyPatch, bug: str
) -> None:
    if bug == "kept":
        monkeypatch.setattr(Damage, "_give_up", lambda *_: [])
    else:
        monkeypatch.setattr(HostSlots, "damaged_slots", lambda *_: [])
    assert any(Simulation(damaging(seed)).run().problem for seed in range(6))
