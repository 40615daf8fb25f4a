"""The cache over a thin tree: a real daemon keeps it, and answers as a mirror would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed in this environment")
pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

from scheduler_shim.client import DaemonClient
from scheduler_shim.deadlines import Deadlines
from tests.integration.daemon.support import DaemonProcess
from tests.sglang.cache.parity import PAGES, RUNNING_MAX, beside_mirror
from tests.sglang.cache.rig import Engine, Pools, Req, our_cache, our_pool
from tests.sglang.cache.test_requests import prompt, serve, whole

pytestmark = pytest.mark.sglang

OPERATIONS = 10_000
PATIENT = Deadlines(call_ms=10_000)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon of the test's own."""
    with DaemonProcess(tmp_path / "rt") as process:
        yield process


@pytest.fixture
def thin(daemon: DaemonProcess) -> Iterator[Callable[[int], Engine]]:
    """Makes engines whose tree the daemon keeps."""
    made: list[Engine] = []

    def make(page_size: int) -> Engine:
        pools = Pools(PAGES, page_size, rows=RUNNING_MAX)
        pool = our_pool(pools)
        client = DaemonClient.connect(
            daemon.runtime_dir, pool, instance=f"e{len(made)}", mode="thin", deadlines=PATIENT
        )
        cache = our_cache(pools, client=client, pool=pool, mode="thin")
        made.append(Engine(cache, pools))
        return made[-1]

    yield make
    for engine in made:
        engine.cache.shim.close()


def test_a_thin_cache_finds_what_was_stored(thin: Callable[[int], Engine]) -> None:
    engine = thin(16)
    assert serve(engine, Req("a", prompt(engine, 4, tail=3))) == 0
    assert serve(engine, Req("b", prompt(engine, 4, tail=3))) == 64
    assert engine.accounts() == (engine.pools.size - 64, 64, 0)
    assert engine.cache.shim.check() == []


def test_the_sums_are_exact_between_answers(thin: Callable[[int], Engine]) -> None:
    """A release is told and not answered, and the sums know of it all the same."""
    engine = thin(1)
    req = Req("a", prompt(engine, 20, tail=1))
    engine.match(req)
    assert engine.admit(req)
    engine.checkpoint(req)
    stored = whole(engine, req)
    assert engine.accounts() == (engine.pools.size - stored, 0, stored)
    engine.end(req)
    assert engine.accounts() == (engine.pools.size - stored, stored, 0)


def begin(engine: Engine, rid: str, seed: int, pages: int = 8) -> Req:
    """A running request that has stored its prompt."""
    req = Req(rid, prompt(engine, pages, seed, 1))
    engine.match(req)
    assert engine.admit(req)
    engine.checkpoint(req)
    return req


def finish(engine: Engine, req: Req) -> None:
    """The rest of a request's life."""
    assert engine.decode(req, list(range(2 * engine.page + 1)))
    engine.end(req)


def test_a_request_that_was_matched_is_locked_though_the_daemon_died_meanwhile(
    thin: Callable[[int], Engine], daemon: DaemonProcess
) -> None:
    """Nothing that a match has just named may be given up before it is locked."""
    engine = thin(16)
    serve(engine, Req("a", prompt(engine, 6, tail=1)), output=0)
    req = Req("b", prompt(engine, 6, tail=1))
    assert engine.match(req) == 96
    daemon.kill()
    assert engine.accounts() == (engine.pools.size - 96, 96, 0)
    assert engine.admit(req)
    assert engine.accounts()[2] == 96
    engine.checkpoint(req)
    assert engine.accounts()[2] == 96
    finish(engine, req)
    assert engine.cache.shim.mode == "degraded", "noticed by what needs an answer"
    assert sum(engine.accounts()) == engine.pools.size
    assert engine.cache.shim.check() == []


@pytest.mark.parametrize("page_size", [1, 16])
def test_running_requests_keep_their_pages_when_the_daemon_dies(
    thin: Callable[[int], Engine], daemon: DaemonProcess, page_size: int
) -> None:
    engine = thin(page_size)
    serve(engine, Req("cold", prompt(engine, 8, 5, 1)))
    running = [begin(engine, "a", 1), begin(engine, "b", 1), begin(engine, "c", 2)]
    daemon.kill()
    for req in running:
        assert engine.decode(req, [1, 2, 3])
        engine.verify(req, engine.row(req)[: req.extend_end].long())
    for req in running:
        finish(engine, req)
    engine.cache.shim.tick([], busy=False)
    assert engine.cache.shim.mode == "degraded"
    assert engine.match(Req("again", prompt(engine, 8, 1, 1))) == 8 * page_size
    assert sum(engine.accounts()) == engine.pools.size
    assert engine.cache.shim.check() == []


def test_an_eviction_that_the_daemon_does_not_answer_frees_what_nobody_runs_on(
    thin: Callable[[int], Engine], daemon: DaemonProcess
) -> None:
    engine = thin(16)
    serve(engine, Req("cold", prompt(engine, 40, 5, 1)), output=0)
    req = begin(engine, "a", 1)
    daemon.kill()
    assert engine.make_room(70 * engine.page)
    assert engine.accounts()[1:] == (0, whole(engine, req))
    finish(engine, req)
    assert engine.cache.shim.check() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_ten_thousand_operations_come_to_the_same(
    thin: Callable[[int], Engine], page_size: int
) -> None:
    parity = beside_mirror(thin(page_size), seed=page_size)
    shim = parity.ours.cache.shim
    for number in range(OPERATIONS):
        try:
            parity.step()
        except AssertionError as error:
            raise AssertionError(f"operation {number}: {error}") from error
        shim.tick([], busy=True)
        assert shim.mode == "thin", shim.stats()
        if number % 100 == 0:
            assert shim.check() + shim.room.tree.recount() == []
    assert shim.check() + shim.room.tree.recount() == []
    assert parity.stock.cache.shim.check() == []
