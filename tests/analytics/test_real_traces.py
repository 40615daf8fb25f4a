"""On real traces: the figures that independent simulators and the real machinery gave."""

import resource
import time
from pathlib import Path

import pytest

from directory.analytics.simulate import simulate
from directory.analytics.source import Source
from directory.analytics.study import Study
from directory.analytics.traces import BlockOptions
from tests.analytics.support import AGENTIC, CONVERSATION, needs_agentic, needs_conversation

# `treecored replay TRACE --schedulers 1 --pool-pages N --host-pages 1 --bytes-per-token 8 --json`:
# one pool is a pure LRU cache of N pages, and a host tier of one page adds nothing to it.
REPLAYED = {
    1_709: 0.052121,
    8_545: 0.193782,
    17_090: 0.276232,
    42_725: 0.352925,
    85_450: 0.362707,
}
POINTS = 0.005
SECONDS_MAX = 60
KIB_MAX = 2 * 1024 * 1024


@needs_conversation
@pytest.mark.slow
def test_the_conversation_trace_has_its_known_ratio() -> None:
    study = Study.of(Source(CONVERSATION))
    assert study.totals.requests == 12_031
    assert round(study.totals.block_hit_ratio, 3) == 0.366
    assert round(study.totals.token_hit_ratio, 3) == 0.373


@needs_conversation
@pytest.mark.slow
def test_the_curve_predicts_the_real_replay_at_five_capacities() -> None:
    curve = Study.of(Source(CONVERSATION)).reuse.curve()
    for pages, replayed in REPLAYED.items():
        assert abs(curve.ratio(pages) - replayed) < POINTS


@needs_conversation
@pytest.mark.slow
def test_the_conversation_curve_is_that_of_other_simulators() -> None:
    study = Study.of(Source(CONVERSATION, options=BlockOptions(every_block=True)))
    curve = study.reuse.curve()
    assert study.reuse.pages == 182_790
    assert abs(curve.ratio_max - 0.366) < 0.0005
    for share, ratio in {1: 0.052, 5: 0.196, 10: 0.279, 25: 0.354, 50: 0.363}.items():
        assert abs(curve.ratio(182_790 * share // 100) - ratio) < 0.001


@needs_conversation
@pytest.mark.slow
def test_private_caches_hit_as_other_simulators_say() -> None:
    for schedulers, ratio in {2: 0.271, 4: 0.192, 8: 0.136}.items():
        found = simulate(Source(CONVERSATION), schedulers=schedulers)
        assert abs(found.unlimited_private - ratio) < 0.002


@needs_agentic
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_agentic_curve_is_right_quick_and_small() -> None:
    before = time.process_time()
    study = Study.of(Source(AGENTIC))
    curve = study.reuse.curve()
    assert time.process_time() - before < SECONDS_MAX
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < KIB_MAX
    assert study.totals.requests == 49_334
    assert study.reuse.pages == 3_450_959
    assert abs(curve.ratio_max - 0.963) < 0.001
    for permille, ratio in {5: 0.088, 10: 0.384, 15: 0.656, 20: 0.855, 30: 0.963}.items():
        assert abs(curve.ratio(3_450_959 * permille // 1000) - ratio) < 0.002


@needs_agentic
def test_reading_a_part_of_a_trace_reads_no_more(tmp_path: Path) -> None:
    del tmp_path
    source = Source(AGENTIC, options=BlockOptions(limit=100))
    assert sum(1 for _ in source.frames()) == 100
