"""Loads that are lost under a forward pass: exactly their requests end, with status 503.

The mover is stopped first, so that it is certain which requests have a load in flight.
"""

import os
import signal
from collections.abc import Callable

import pytest

from tests.sglang import model, wire
from tests.sglang.engines import Engine
from tests.sglang.environments import VERSIONS
from tests.sglang.layerwise.test_engines import LENGTH, ask, serve, start, stats_of
from tests.sglang.node import Mode, Node, floor, until
from tests.sglang.oracle import Oracle

pytestmark = [pytest.mark.engines, pytest.mark.timeout(400)]

PAGE = 16

IN_CI = {("killed daemon", "0.5.16", "mirrored"), ("killed mover", "0.5.23", "thin")}


def cells(what: str) -> pytest.MarkDecorator:
    """Every version and mode; those that are not for CI are for `make engines`."""
    return pytest.mark.parametrize(
        ("version", "mode"),
        [
            pytest.param(
                version,
                mode,
                marks=() if (what, version, mode) in IN_CI else pytest.mark.every_cell,
            )
            for version in VERSIONS
            for mode in ("mirrored", "thin")
        ],
    )


def stopped_mover(node: Node) -> int:
    """Stop the mover; returns its process number."""
    mover = node.counter("daemon_mover_pid")
    os.kill(mover, signal.SIGSTOP)
    return mover


def evicted(node: Node, engine: Engine, oracle: Oracle) -> None:
    """Two prompts in the host tier alone (1, 2), the newest ones in the pool."""
    for seed in range(1, 6):
        serve(node, engine, oracle, seed, PAGE)


def lose(
    node: Node, engine: Engine, oracle: Oracle, strike: Callable[[int], None]
) -> dict[str, wire.Report]:
    """Ask for an evicted prompt, strike while its load is in flight, and ask for others, too."""
    prompts = {"loaded": model.prompt(1, LENGTH), "cold": model.prompt(90, 50),
               "own": model.prompt(5, LENGTH)}  # fmt: skip
    loads = node.counter("copies_in_flight")
    mover = stopped_mover(node)
    names = {"loaded": engine.submit(prompts["loaded"])}
    node.wait_for(lambda report: report.counters["copies_in_flight"] > loads)
    names |= {key: engine.submit(prompts[key]) for key in ("cold", "own")}
    strike(mover)
    found: dict[str, wire.Report] = {}
    while len(found) < len(names):
        report = engine.collect_any([name for key, name in names.items() if key not in found])
        assert not isinstance(report, wire.Up)
        key = next(key for key, name in names.items() if name == report.id)
        found[key] = report
        if isinstance(report, wire.Output):
            assert report.tokens == oracle.tokens(engine.version, prompts[key])
    return found


def assert_one_503(engine: Engine, found: dict[str, wire.Report]) -> None:
    """The request with the load has failed as SGLang's do, and no other one."""
    failed = {key: report for key, report in found.items() if isinstance(report, wire.Failed)}
    assert list(failed) == ["loaded"]
    assert "503" in failed["loaded"].error
    assert stats_of(engine)["loads_lost_in_flight"] == 1


def assert_loads_return(node: Node, engine: Engine, oracle: Oracle) -> None:
    """Sooner or later prompts are loaded again, right as ever."""
    loads = stats_of(engine)["loads"]
    seeds = iter(range(100, 1_000))

    def look() -> bool:
        first = next(seeds)
        for seed in (first, next(seeds), next(seeds), next(seeds)):
            ask(engine, oracle, model.prompt(seed, LENGTH))
        return ask(engine, oracle, model.prompt(first, LENGTH)).cached == floor(LENGTH, PAGE)

    until(look, 120)
    assert stats_of(engine)["loads"] > loads
    node.assert_clean()


@cells("killed daemon")
def test_a_killed_daemon_ends_the_request_whose_load_is_in_flight_and_no_other(
    version: str, mode: Mode, node: Node, oracle: Oracle
) -> None:
    engine = start(node, "a", version, PAGE, mode).wait_up()
    evicted(node, engine, oracle)
    assert_one_503(engine, lose(node, engine, oracle, lambda _: node.daemon.kill()))
    node.restart_daemon()
    assert_loads_return(node, engine, oracle)


@cells("killed mover")
def test_a_killed_mover_ends_the_request_whose_load_is_in_flight_and_no_other(
    version: str, mode: Mode, node: Node, oracle: Oracle
) -> None:
    engine = start(node, "a", version, PAGE, mode).wait_up()
    evicted(node, engine, oracle)
    found = lose(node, engine, oracle, lambda mover: os.kill(mover, signal.SIGKILL))
    assert_one_503(engine, found)
    assert_loads_return(node, engine, oracle)


@cells("stopped daemon")
def test_a_stopped_daemon_costs_a_load_its_request_after_the_deadline(
    version: str, mode: Mode, node: Node, oracle: Oracle
) -> None:
    engine = start(node, "a", version, PAGE, mode, TREECORED_LAYER_MS="300").wait_up()
    evicted(node, engine, oracle)

    def strike(mover: int) -> None:
        os.kill(node.daemon.process.pid, signal.SIGSTOP)
        os.kill(mover, signal.SIGCONT)

    try:
        found = lose(node, engine, oracle, strike)
    finally:
        os.kill(node.daemon.process.pid, signal.SIGCONT)
    failed = [key for key, report in found.items() if isinstance(report, wire.Failed)]
    assert failed in ([], ["loaded"]), "the mover may have been in time"
    assert stats_of(engine).get("loads_lost_in_flight", 0) == len(failed)
    assert_loads_return(node, engine, oracle)
