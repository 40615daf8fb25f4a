"""What the scheduler's tests share: a daemon, schedulers on it, and the two modes."""

from collections.abc import Iterator

import pytest

from directory.core.events import Mode
from tests.unit.scheduler_shim.pair import Pair
from tests.unit.scheduler_shim.support import MODES, Cluster, FakeDaemon


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
def cluster(daemon: FakeDaemon) -> Iterator[Cluster]:
    cluster = Cluster(daemon)
    yield cluster
    cluster.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()
