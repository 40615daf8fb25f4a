"""Storms over two engines with one daemon: no wrong token, no leak, nothing left behind."""

from itertools import product
from typing import Any, cast

import pytest

from tests.sglang.engines import Engine
from tests.sglang.environments import VERSIONS
from tests.sglang.node import Mode, Node
from tests.sglang.oracle import Oracle
from tests.sglang.storm import TIGHT, Storm, counted, workload

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

REQUESTS = 300
STAGED = {"TREECORED_STAGING_MIB": "1"}

IN_CI = {("0.5.23", "mirrored", 16, "plain")}


def storms() -> list[object]:
    """Every storm; those that are not for CI are for `make engines`."""
    storms = [
        *product(VERSIONS, ("mirrored", "thin"), (1, 16), ("plain",)),
        ("0.5.16", "thin", 16, "overlap"),
        ("0.5.23", "mirrored", 1, "overlap"),
        ("0.5.16", "mirrored", 1, "staged"),
        ("0.5.23", "thin", 16, "staged"),
    ]
    return [
        pytest.param(*storm, marks=() if storm in IN_CI else pytest.mark.every_cell)
        for storm in storms
    ]


@pytest.mark.parametrize(("version", "mode", "page_size", "schedule"), storms())
def test_three_hundred_requests_leave_no_trace(
    version: str, mode: str, page_size: int, schedule: str, node: Node, oracle: Oracle
) -> None:
    plain = schedule != "overlap"
    environ = STAGED if schedule == "staged" else {}
    engines = two_engines(
        node, version, cast(Mode, mode), page_size, disable_overlap_schedule=plain, environ=environ
    )
    questions = workload(oracle, version, REQUESTS, seed=page_size)
    tally = Storm(engines, questions, seed=page_size).run()

    assert tally.wrong == []
    assert tally.answered > REQUESTS * 0.7
    node.assert_clean()
    # What the storm is for has happened.
    assert tally.aborted_running > 0
    assert tally.aborted_unstarted > 0
    assert counted(engines, "etract") > 0, "no request was retracted"
    counters = node.report().counters
    assert counters["bytes_restored"] > 0
    assert counters["pool_pages_evicted"] > 10 * 768 // page_size
    assert tally.hit > tally.answered // 2
    if schedule == "staged":
        assert all(engine.stats()["stage_requests"] > 0 for engine in engines)


def two_engines(node: Node, version: str, mode: Mode, page_size: int, **more: Any) -> list[Engine]:
    """Two that are up, with pools in which there is never enough room."""
    given = {"page_size": page_size, **TIGHT, **more}
    engines = [node.engine(name, version, mode, **given) for name in ("a", "b")]
    return [engine.wait_up() for engine in engines]
