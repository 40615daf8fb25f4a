"""An end that brings nothing new, when something else happens: other weights, a lost daemon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed in this environment")
pytest.importorskip("sglang", reason="SGLang is not installed in this environment")

from scheduler_shim.client import DaemonClient
from scheduler_shim.deadlines import Deadlines
from tests.integration.daemon.support import DaemonProcess
from tests.sglang.cache.rig import Engine, Pools, Req, our_cache, our_pool
from tests.sglang.cache.test_requests import prompt, serve, whole

pytestmark = pytest.mark.sglang

PAGES, PAGE, STORED = 64, 16, 4
PATIENT = Deadlines(call_ms=10_000)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon of the test's own."""
    with DaemonProcess(tmp_path / "rt") as process:
        yield process


@pytest.fixture
def mirrored(daemon: DaemonProcess) -> Iterator[Engine]:
    """An engine whose cache tells a daemon."""
    pools = Pools(PAGES, PAGE)
    pool = our_pool(pools)
    client = DaemonClient.connect(
        daemon.runtime_dir, pool, instance="e", mode="mirrored", deadlines=PATIENT
    )
    engine = Engine(our_cache(pools, client=client, pool=pool), pools)
    yield engine
    engine.cache.shim.close()


def again(engine: Engine, rid: str) -> Req:
    """A running request over a stored prompt: its last page is computed anew, for nothing."""
    req = Req(rid, prompt(engine, STORED))
    assert engine.match(req) == (STORED - 1) * PAGE
    assert engine.admit(req)
    return req


@pytest.mark.parametrize("anew", [False, True], ids=["not there", "there"])
def test_after_the_weights_changed_it_frees_its_own_and_touches_no_tree_f7(
    anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`anew`: whether the same tokens are in the tree of the new weights, too."""
    pools = Pools(PAGES, PAGE)
    engine = Engine(our_cache(pools), pools)
    shim = engine.cache.shim
    serve(engine, Req("a", prompt(engine, STORED)), output=0)
    old = engine.accounts()
    req = again(engine, "b")
    shim.change_weights(7)
    if anew:
        assert serve(engine, Req("c", prompt(engine, STORED)), output=0) == 0
    fresh = STORED * PAGE if anew else 0
    ticks: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(shim.tree, "use_again", lambda *of: ticks.append(of))
        engine.end(req)
    assert not ticks, "the old tree is not used again, and the new one has nothing of it"
    assert engine.accounts() == (old[0] - fresh, old[1] + fresh, 0)
    assert shim.check() == []
    last = Req("d", prompt(engine, STORED, tail=1))
    assert engine.match(last) == fresh, "what it computed belongs to the old weights"


@pytest.mark.parametrize("running", [False, True], ids=["alone", "beside a running one"])
def test_a_daemon_that_is_lost_in_it_takes_nothing_from_the_tree_or_from_a_request_f67(
    mirrored: Engine, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    engine, shim = mirrored, mirrored.cache.shim
    serve(engine, Req("a", prompt(engine, STORED)), output=0)
    before = engine.accounts()
    req = again(engine, "b")
    beside = again(engine, "c") if running else None
    client = shim.client
    told: list[Any] = []

    def lose(*of: Any, **_: Any) -> None:
        told.append(of)
        client.lose("it is gone while this is told")

    monkeypatch.setattr(client, "report", lose)
    engine.end(req)
    assert len(told) == 1, "its use of the tree is told, and nothing else"
    assert shim.mode == "degraded"
    after_end(engine, beside, before)


def test_a_daemon_that_is_killed_before_it_is_no_reason_to_keep_or_lose_a_page_f67(
    mirrored: Engine, daemon: DaemonProcess
) -> None:
    engine, shim = mirrored, mirrored.cache.shim
    serve(engine, Req("a", prompt(engine, STORED)), output=0)
    before = engine.accounts()
    req, beside = again(engine, "b"), again(engine, "c")
    daemon.kill()
    engine.end(req)
    wait_for_loss(shim.tick, lambda: shim.mode == "degraded")
    after_end(engine, beside, before)


def wait_for_loss(tick: Callable[..., object], lost: Callable[[], bool]) -> None:
    """Tick as an engine does until the end of the session is seen."""
    for _ in range(100_000):
        if lost():
            return
        tick([], busy=False)
    raise AssertionError("the loss was never seen")


def after_end(engine: Engine, beside: Req | None, before: tuple[int, int, int]) -> None:
    """The tree is as it was before the request; who runs beside it reads its own pages to its end,
    and the next one finds all."""
    if beside is not None:
        engine.verify(beside, engine.row(beside)[: beside.extend_end].long())
        beside.prefix_len = beside.extend_end  # computed, and nothing of it stored yet
        assert engine.decode(beside, [1, 2, 3])
        engine.end(beside)
    assert engine.accounts() == before
    assert engine.cache.shim.check() == []
    last = Req("d", prompt(engine, STORED, tail=1))
    assert engine.match(last) == whole(engine, last)
