"""Real engines with adaptive loads: the same request loads by layers where nothing decodes, and is
held back where something does."""

import pytest

from tests.sglang import model, wire
from tests.sglang.engines import Engine
from tests.sglang.environments import VERSIONS
from tests.sglang.layerwise.test_engines import LENGTH, ask, serve, start, stats_of
from tests.sglang.node import Mode, Node, floor
from tests.sglang.oracle import Oracle

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]

PAGE = 16
LONG = 300
"""Tokens of an answer that goes on while others are asked for."""

IN_CI = {("0.5.16", "mirrored", True), ("0.5.23", "mirrored", False)}


def decoding(engine: Engine) -> str:
    """Have a long answer begun; returns its name."""
    name = engine.submit(model.prompt(60, 40), LONG)
    engine.generate([1, 2, 3], 1)  # admitted behind it
    return name


@pytest.mark.parametrize(
    ("version", "mode", "overlap"),
    [
        pytest.param(
            version,
            mode,
            overlap,
            marks=() if (version, mode, overlap) in IN_CI else pytest.mark.every_cell,
        )
        for version in VERSIONS
        for mode in ("mirrored", "thin")
        for overlap in (False, True)
    ],
)
def test_the_same_request_is_loaded_by_layers_alone_and_held_back_beside_a_decode(
    version: str, mode: Mode, overlap: bool, node: Node, oracle: Oracle
) -> None:
    given = {"TREECORED_LOADS": "adaptive"}
    engine = start(node, "a", version, PAGE, mode, overlap=overlap, **given).wait_up()
    whole = floor(LENGTH, PAGE)
    for seed in range(1, 6):
        serve(node, engine, oracle, seed, PAGE)
    alone = ask(engine, oracle, model.prompt(1, LENGTH))
    assert alone.details == {"device": 0, "host": whole}
    stats = stats_of(engine)
    assert (stats["loads"], stats.get("offers_held_back", 0)) == (1, 0)
    assert "restores" not in stats

    running = decoding(engine)
    beside = ask(engine, oracle, model.prompt(2, LENGTH))
    assert beside.details == {"device": 0, "host": whole}
    goes_on = engine.collect(running)
    assert isinstance(goes_on, wire.Output)
    assert len(goes_on.tokens) == LONG
    stats = stats_of(engine)
    assert (stats["loads"], stats["offers_held_back"], stats["restores"]) == (1, 1, 1)

    again = ask(engine, oracle, model.prompt(3, LENGTH))
    assert again.details == {"device": 0, "host": whole}
    stats = stats_of(engine)
    assert (stats["loads"], stats["restores"], stats["landed"]) == (2, 1, 3)
    assert not stats.keys() & {"lost", "loads_put_back", "layers_timed_out", "held_too_long"}
    node.assert_clean()
