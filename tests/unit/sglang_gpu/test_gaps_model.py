"""The model of SGLang's loop beside prompts that come at a pace."""

from __future__ import annotations

import pytest

from benchmarks.sglang_gpu import gaps_model
from benchmarks.sglang_gpu.gaps_model import STEP_MS, full_ms, play, rows

PASS_MS = 22.0


def test_who_moves_nothing_waits_for_one_pass_at_full_rate_and_for_none_mostly_at_half() -> None:
    full = play("none", 1.05 * full_ms(PASS_MS), PASS_MS)
    half = play("none", 2 * full_ms(PASS_MS), PASS_MS)
    assert full is not None
    assert half is not None
    assert full.p50 == pytest.approx(PASS_MS + STEP_MS, rel=0.05)
    assert full.p99 < PASS_MS * 1.09 + STEP_MS * 1.03
    assert half.p50 == pytest.approx(STEP_MS, rel=0.02)
    assert half.bus == 0


def test_restores_land_behind_one_another_unless_what_decodes_has_a_step_between() -> None:
    none, held, stepped = (
        play(kind, 1.3 * full_ms(PASS_MS), PASS_MS) for kind in ("none", "held", "stepped")
    )
    assert none is not None
    assert held is not None
    assert stepped is not None
    assert held.p99 > 1.7 * none.p99
    assert stepped.p99 < 1.02 * none.p99
    every = 1.3 * full_ms(PASS_MS)
    assert stepped.bus == pytest.approx(gaps_model.RESTORE_MS / every, abs=0.01)
    assert held.bus == pytest.approx(stepped.bus, abs=0.01)


def test_who_loads_within_its_passes_is_overrun_first() -> None:
    assert play("within", 0.9 * full_ms(PASS_MS), PASS_MS) is None
    ((_, _, *cells),) = rows([0.9], PASS_MS)
    assert cells[-1] == "nothing decodes"
    assert "/" in str(cells[0])
