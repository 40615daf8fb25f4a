"""Killed and stopped processes in the midst of a storm: no request pays for it with a wrong answer.

The daemon may die, come back or hang, and an engine may die: held-back requests never fail, and
sharing comes back by itself.
"""

import os
import signal

import pytest

from tests.integration.daemon.support import wait_until
from tests.sglang import model
from tests.sglang.engines import Engine
from tests.sglang.node import Mode, Node, floor, until
from tests.sglang.oracle import Oracle
from tests.sglang.storm import TIGHT, Storm, workload

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

REQUESTS = 120
PAGE = 16
TICK_US_MAX = 50_000
"""A tick waits for the daemon 20 ms at most; the rest is for a busy machine."""

every_mode = pytest.mark.parametrize(
    ("version", "mode"),
    [
        ("0.5.23", "mirrored"),
        pytest.param("0.5.23", "thin", marks=pytest.mark.every_cell),
        pytest.param("0.5.16", "mirrored", marks=pytest.mark.every_cell),
        pytest.param("0.5.16", "thin", marks=pytest.mark.every_cell),
    ],
)


def start(node: Node, version: str, mode: Mode, **environ: str) -> list[Engine]:
    """Two engines with the product's own deadlines."""
    engines = [
        node.engine(name, version, mode, page_size=PAGE, environ=environ, **TIGHT)
        for name in ("a", "b")
    ]
    return [engine.wait_up() for engine in engines]


def assert_they_share(node: Node, engines: list[Engine], oracle: Oracle, first_seed: int) -> None:
    """Sooner or later a new prompt that one of them has served is a hit in the other."""
    one, other = engines[0], engines[-1]
    seeds = iter(range(first_seed, first_seed + 10_000))

    def look() -> bool:
        prompt = model.prompt(next(seeds), 200)
        cold = oracle.tokens(one.version, prompt)
        assert one.generate(prompt).tokens == cold
        hit = other.generate(prompt)
        assert hit.tokens == cold
        return hit.cached == floor(200, PAGE)

    until(look, 180)


@every_mode
def test_a_killed_daemon_fails_no_request_and_hits_return(
    version: str, mode: Mode, node: Node, oracle: Oracle
) -> None:
    engines = start(node, version, mode)
    storm = Storm(engines, workload(oracle, version, REQUESTS, seed=3), seed=3)
    storm.run(until=REQUESTS * 2 // 3)
    node.daemon.kill()
    storm.run(until=REQUESTS // 3)
    node.restart_daemon()
    tally = storm.run()
    assert tally.wrong == []
    assert_they_share(node, engines, oracle, 5_000)
    node.assert_clean()


@pytest.mark.every_cell
@every_mode
def test_a_killed_engine_takes_its_pages_with_it_and_nothing_else(
    version: str, mode: Mode, node: Node, oracle: Oracle
) -> None:
    engines = start(node, version, mode)
    storm = Storm(engines, workload(oracle, version, REQUESTS, seed=4), seed=4)
    storm.run(until=REQUESTS // 2)
    before = storm.tally.hit
    doomed = engines[1]
    doomed.kill()
    report = node.wait_for(lambda report: len(report.pools) == 1)
    assert [pool.instance for pool in report.pools] == [engines[0].name]
    storm.lose(doomed)
    tally = storm.run()
    assert tally.wrong == []
    assert tally.hit > before
    survivor = node.engine("c", version, mode, page_size=PAGE, environ={}, **TIGHT).wait_up()
    assert_they_share(node, [engines[0], survivor], oracle, 6_000)
    node.assert_clean()


@pytest.mark.every_cell
@every_mode
def test_a_stopped_daemon_does_not_stop_the_engines(
    version: str, mode: Mode, node: Node, oracle: Oracle
) -> None:
    engines = start(node, version, mode)
    storm = Storm(engines, workload(oracle, version, REQUESTS, seed=5), seed=5)
    storm.run(until=REQUESTS * 2 // 3)
    os.kill(node.daemon.process.pid, signal.SIGSTOP)
    try:
        tally = storm.run()
    finally:
        os.kill(node.daemon.process.pid, signal.SIGCONT)
    assert tally.wrong == []
    for engine in engines:
        wait_until(lambda engine=engine: engine.stats().get("ticks"))  # type: ignore[misc]
        assert engine.stats()["tick_us_max"] < TICK_US_MAX
    assert_they_share(node, engines, oracle, 7_000)
    node.assert_clean()
