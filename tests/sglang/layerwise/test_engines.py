"""Real engines whose loads land layer by layer: right answers, and what a lost load costs.

The tokens of every answer are compared with those of a stock engine that caches nothing.
"""

from collections.abc import Mapping
from typing import Any

import pytest

from tests.sglang import model, wire
from tests.sglang.engines import Engine
from tests.sglang.environments import VERSIONS
from tests.sglang.node import PATIENT, Mode, Node, floor
from tests.sglang.oracle import Oracle

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

LENGTH = 400
POOL = 1024
LAYERWISE: Mapping[str, str] = {
    **PATIENT,
    "TREECORED_LOADS": "layerwise",
    "TREECORED_LAYER_MS": "20000",
}

IN_CI = {("0.5.16", 16, "thin"), ("0.5.23", 1, "mirrored")}

cells = pytest.mark.parametrize(
    ("version", "page_size", "mode"),
    [
        pytest.param(
            version,
            page_size,
            mode,
            marks=() if (version, page_size, mode) in IN_CI else pytest.mark.every_cell,
        )
        for version in VERSIONS
        for page_size in (1, 16, 64)
        for mode in ("mirrored", "thin")
    ],
)


def start(
    node: Node,
    name: str,
    version: str,
    page_size: int,
    mode: Mode,
    *,
    overlap: bool = False,
    **more: str,
) -> Engine:
    """An engine that loads layer by layer. `more`: treecored's settings."""
    environ = {**LAYERWISE, **more}
    given: dict[str, Any] = {"page_size": page_size, "max_total_tokens": POOL}
    given["disable_overlap_schedule"] = not overlap
    return node.engine(name, version, mode, environ=environ, chunked_prefill_size=128, **given)


def ask(engine: Engine, oracle: Oracle, tokens: list[int], new: int = 8) -> wire.Output:
    """Have a prompt served and its tokens compared."""
    output = engine.generate(tokens, new)
    assert output.tokens == oracle.tokens(engine.version, tokens)[:new]
    return output


def serve(node: Node, engine: Engine, oracle: Oracle, seed: int, page_size: int) -> None:
    """Have a new prompt computed, and wait until the host tier has it."""
    with node.backed_up(LENGTH // page_size):
        assert ask(engine, oracle, model.prompt(seed, LENGTH)).cached == 0


def stats_of(engine: Engine) -> dict[str, int]:
    """Its counters now: they are written while it runs, so it is given something to do."""
    before = engine.stats().get("ticks", 0)
    while engine.stats().get("ticks", 0) <= before:
        engine.generate([1, 2, 3], 4)
    return engine.stats()


@cells
def test_cold_own_and_loaded_answers_are_equal(
    version: str, page_size: int, mode: Mode, node: Node, oracle: Oracle
) -> None:
    engine = start(node, "a", version, page_size, mode).wait_up()
    for seed in range(1, 5):
        serve(node, engine, oracle, seed, page_size)
    whole = floor(LENGTH, page_size)
    loaded = ask(engine, oracle, model.prompt(1, LENGTH))
    assert loaded.cached == whole
    assert loaded.details == {"device": 0, "host": whole}
    again = ask(engine, oracle, model.prompt(1, LENGTH))
    assert again.details == {"device": whole, "host": 0}, "what was loaded is in the tree"
    longer = [*model.prompt(2, LENGTH), *model.prompt(9, 300)]  # three chunks behind the load
    assert ask(engine, oracle, longer).cached == LENGTH // page_size * page_size
    short = ask(engine, oracle, model.prompt(3, LENGTH), new=1)  # it ends with its first step
    assert short.cached == whole
    stats = stats_of(engine)
    assert (stats["loads"], stats["landed"]) == (3, 3)
    assert not stats.keys() & {"lost", "restores", "loads_put_back", "layers_timed_out"}
    node.assert_clean()
