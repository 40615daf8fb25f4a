"""Storms over two engines that load layer by layer: no wrong token, no leak, nothing left."""

from itertools import product
from typing import cast

import pytest

from tests.sglang.environments import VERSIONS
from tests.sglang.layerwise.test_engines import LAYERWISE, stats_of
from tests.sglang.node import Mode, Node
from tests.sglang.oracle import Oracle
from tests.sglang.storm import Storm, workload
from tests.sglang.test_storm import STAGED, two_engines

pytestmark = [pytest.mark.engines, pytest.mark.every_cell, pytest.mark.timeout(400)]

REQUESTS = 200


STORMS = [
    *product(VERSIONS, ("mirrored", "thin"), (1, 16), ("plain",)),
    ("0.5.16", "mirrored", 16, "overlap"),
    ("0.5.23", "thin", 16, "overlap"),
    ("0.5.23", "mirrored", 1, "staged"),
]


@pytest.mark.parametrize(("version", "mode", "page_size", "schedule"), STORMS)
def test_two_hundred_requests_leave_no_trace(
    version: str, mode: str, page_size: int, schedule: str, node: Node, oracle: Oracle
) -> None:
    environ = {**LAYERWISE, **(STAGED if schedule == "staged" else {})}
    given = {"environ": environ, "disable_overlap_schedule": schedule != "overlap"}
    engines = two_engines(node, version, cast(Mode, mode), page_size, **given)
    tally = Storm(engines, workload(oracle, version, REQUESTS, seed=page_size), seed=7).run()
    assert tally.wrong == []
    assert tally.answered > REQUESTS * 0.7
    node.assert_clean()
    stats = [stats_of(engine) for engine in engines]
    assert sum(one["loads"] for one in stats) > 0
    assert not any("loads_lost_in_flight" in one for one in stats)
