"""A daemon, engines on it that are closed at the end, and both modes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from directory.core.events import Mode
from tests.unit.scheduler_shim.sglang.layerwise_rig import ABC, OTHERS, LoadingEngine
from tests.unit.scheduler_shim.sglang.rig import MiniEngine
from tests.unit.scheduler_shim.support import MODES, FakeDaemon

Add = Callable[..., MiniEngine]
Load = Callable[..., LoadingEngine]


@pytest.fixture
def daemon() -> Iterator[FakeDaemon]:
    daemon = FakeDaemon()
    yield daemon
    daemon.close()


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    chosen: Mode = request.param
    return chosen


@pytest.fixture
def add(daemon: FakeDaemon) -> Iterator[Add]:
    engines: list[MiniEngine] = []

    def make(instance: str, mode: Mode = "mirrored", **more: object) -> MiniEngine:
        engine = MiniEngine(daemon, instance, mode, **more)  # type: ignore[arg-type]
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(daemon: FakeDaemon) -> Iterator[Load]:
    """Makes engines that load layer by layer, and whose prompt ABC is in the host tier alone."""
    made: list[LoadingEngine] = []

    def make(mode: Mode, **more: Any) -> LoadingEngine:
        loading = LoadingEngine(daemon, f"e{len(made)}", mode, page_count=12, **more)
        made.append(loading)
        for number, tokens in enumerate((ABC, *OTHERS)):
            loading.serve(f"cold{number}", tokens)
        assert loading.holds(ABC) == 0
        return loading

    yield make
    for loading in made:
        loading.close()
