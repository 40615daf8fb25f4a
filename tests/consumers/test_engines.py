"""Dynamo's indexer, fed with the events of two real engines, knows what the daemon's match says.

Needs SGLang's environments as well (`make sglang-envs`).
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.consumers.programs import Indexer
from tests.integration.daemon.listening import streams
from tests.integration.daemon.support import wait_until
from tests.ports import free_ports
from tests.sglang.conftest import models, nursery
from tests.sglang.engines import Nursery
from tests.sglang.environments import VERSIONS, ready
from tests.sglang.test_events import NAMES, PAGE, TellingNode, engines, prompts, serve

__all__ = ["models", "nursery"]
pytestmark = [
    pytest.mark.consumers,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not all(map(ready, VERSIONS)), reason="no environments for SGLang: make sglang-envs"
    ),
]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_indexer_has_the_longest_match_of_each_engine_and_tier(
    version: str,
    python: Path,
    nursery: Callable[[str], Nursery],
    models: Path,
    tmp_path: Path,
) -> None:
    asked = prompts()
    with (
        engines(nursery, models, tmp_path, version, "mirrored") as (node, both),
        Indexer(python, free_ports(1), tmp_path / "indexer.log") as indexer,
    ):
        where = streams(node.daemon, *NAMES)
        for number, name in enumerate(NAMES, 1):
            indexer.register(number, where[name], page_size=PAGE)
        serve(both, asked)
        node.wait_at_rest()
        wait_until(partial(agree, node, indexer, asked))
        found = [indexer.longest(number, tokens) for number in (1, 2) for tokens in asked]
        assert any(gpu for gpu, _ in found)
        assert any(cpu > gpu for gpu, cpu in found)


def agree(node: TellingNode, indexer: Indexer, asked: list[list[int]]) -> bool:
    """Whether indexer and daemon say the same of every prompt and engine."""
    for number, name in enumerate(NAMES, 1):
        for tokens in asked:
            wanted, (gpu, cpu) = node.held(name, tokens), indexer.longest(number, tokens)
            if gpu != wanted.own or (not wanted.peer and cpu != wanted.with_host):
                return False
    return True
