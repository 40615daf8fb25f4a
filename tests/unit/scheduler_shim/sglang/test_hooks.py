"""Hooks on stand-ins for SGLang's classes: what they let through, and what stays inside them."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from scheduler_shim.sglang import hooks
from scheduler_shim.sglang.hooks import HooksMissing, guarded, install, shim_of, weight_epoch
from tests.unit.scheduler_shim.sglang.conftest import Add
from tests.unit.scheduler_shim.sglang.layerwise_rig import LoadingEngine
from tests.unit.scheduler_shim.sglang.rig import MiniEngine
from tests.unit.scheduler_shim.sglang.test_held import ABC, start_fill
from tests.unit.scheduler_shim.support import FakeDaemon

CONTINUE = "continue"


class Batch:
    def __init__(self, *, empty: bool = True) -> None:
        self.empty = empty
        self.reqs: list[Any] = []
        self.batch_is_full = True
        self.extends = False
        self.forward_mode = SimpleNamespace(is_extend=lambda: self.extends)

    def is_empty(self) -> bool:
        return self.empty


class Scheduler:
    """As much of SGLang's scheduler as the hooks look at."""

    def __init__(self, engine: MiniEngine) -> None:
        self.tree_cache = SimpleNamespace(shim=engine.shim)
        self.waiting_queue = engine.queue
        self.running_batch = Batch()
        self.last_batch: Batch | None = None
        self.chunked_req = None
        self.flushed = True
        self.page_size = 4

    def flush_cache(self) -> bool:
        self.tree_cache.shim.flush()
        return self.flushed


class Adder:
    """As much of SGLang's prefill adder; it admits everybody."""

    def __init__(self, engine: MiniEngine) -> None:
        self.tree_cache = SimpleNamespace(shim=engine.shim)
        self.can_run_list: list[Any] = []

    def add_one_req(self, req: Any, has_chunked_req: bool) -> str:
        assert not has_chunked_req
        self.can_run_list.append(req)
        return "added"


def request(rid: str, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        rid=rid, retracted_stain=False, _cache_breakdown_computed=False, prefix_len=12, **more
    )


@pytest.fixture(autouse=True)
def policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's module with the answers of an adder."""
    module = ModuleType("schedule_policy")
    answers = SimpleNamespace(CONTINUE=CONTINUE, OTHER="other")
    module.AddReqResult = answers  # type: ignore[attr-defined]
    real = importlib.import_module

    def stand_in(name: str) -> Any:
        return module if name.startswith("sglang") else real(name)

    monkeypatch.setattr(importlib, "import_module", stand_in)


def test_a_held_request_is_skipped_and_the_next_ones_are_looked_at(
    daemon: FakeDaemon, add: Add
) -> None:
    add("a").serve("a1", ABC)
    b = add("b")
    start_fill(b)
    adder = Adder(b)
    add_one = Adder.add_one_req
    assert hooks.around_add_one_req(add_one, adder, request("r"), False) == CONTINUE
    assert hooks.around_add_one_req(add_one, adder, request("x"), has_chunked_req=False) == "added"
    assert [req.rid for req in adder.can_run_list] == ["x"]
    assert hooks.around_preempt(lambda *_: True, adder, request("r")) is False
    assert hooks.around_preempt(lambda *_: True, adder, request("x")) is True


def test_metrics_say_what_was_restored_for_a_request_that_is_admitted(
    daemon: FakeDaemon, add: Add
) -> None:
    add("a").serve("a1", ABC)
    b = add("b")
    start_fill(b)
    daemon.hold_copies = False
    b.closed = True
    for _ in range(4):
        daemon.run()
        b.step()
    adder, req = Adder(b), request("r")
    assert hooks.around_add_one_req(Adder.add_one_req, adder, req, False) == "added"
    assert (req.cached_tokens_host, req.cached_tokens_device) == (12, 0)
    assert req._cache_breakdown_computed
    again = request("r")
    hooks.around_add_one_req(Adder.add_one_req, adder, again, False)
    assert not again._cache_breakdown_computed, "it is forgotten once it is admitted"


def test_what_decodes_is_what_has_not_ended_and_is_not_in_the_midst_of_its_chunks(
    daemon: FakeDaemon, add: Add
) -> None:
    scheduler = Scheduler(add("a"))
    ended = request("ended", finished=lambda: True)
    chunked = request("chunked", finished=lambda: False)
    computed = request("computed", finished=lambda: False)
    assert not hooks.decodes(scheduler)
    scheduler.running_batch.reqs = [ended]
    assert not hooks.decodes(scheduler)
    scheduler.last_batch = Batch()
    scheduler.last_batch.reqs = [chunked]
    scheduler.chunked_req = chunked  # type: ignore[assignment]
    assert not hooks.decodes(scheduler)
    scheduler.chunked_req = None
    assert hooks.decodes(scheduler), "its last chunk was computed"
    scheduler.last_batch = None
    scheduler.running_batch.reqs = [ended, computed]
    assert hooks.decodes(scheduler)


def test_a_tick_has_offers_told_what_decodes(daemon: FakeDaemon) -> None:
    loading = LoadingEngine(daemon, "loading")
    scheduler, offers = Scheduler(loading), loading.shim.loads.offers
    hooks.after_input(None, scheduler)
    assert offers is not None
    assert not offers.decoding()
    scheduler.running_batch.reqs = [request("computed", finished=lambda: False)]
    assert offers.decoding()
    loading.close()


def test_a_cache_of_somebody_elses_is_left_alone() -> None:
    adder = SimpleNamespace(tree_cache=SimpleNamespace(), can_run_list=[])
    assert shim_of(adder) is None
    assert hooks.around_add_one_req(lambda *_: "stock", adder, request("r")) == "stock"
    assert hooks.around_preempt(lambda *_: "stock", adder, request("r")) == "stock"
    assert hooks.around_flush(lambda *_: True, SimpleNamespace(tree_cache=None)) is True
    hooks.after_input(None, SimpleNamespace(tree_cache=object()))


def test_a_tick_that_fails_stays_inside_and_ends_the_daemons_part(
    daemon: FakeDaemon, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = add("a")

    def broken(*_: object, **__: object) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(a.shim._held, "tick", broken)
    hooks.after_input(None, Scheduler(a))
    assert "KeyError" in a.shim.failure
    assert a.shim.mode == "degraded"
    hooks.after_input(None, Scheduler(a))
    assert a.shim.counters["problems"] == 1
    a.shim.problems.clear()


def test_even_a_failure_that_cannot_be_dealt_with_does_not_reach_sglang(
    daemon: FakeDaemon, add: Add, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = add("a")

    def broken(*_: object) -> None:
        raise RuntimeError("again")

    monkeypatch.setattr(a.shim, "fail", broken)
    assert guarded(a.shim, "a test", lambda: 1 // 0, 5) == 5


@pytest.mark.parametrize(
    ("running", "last", "chunked", "busy"),
    [
        (True, None, None, False),
        (False, None, None, True),
        (True, False, None, True),
        (True, True, None, False),
        (True, None, "chunk", True),
    ],
)
def test_a_scheduler_is_busy_while_anything_is_to_be_computed(
    running: bool, last: bool | None, chunked: object, busy: bool, daemon: FakeDaemon, add: Add
) -> None:
    scheduler = Scheduler(add("a"))
    scheduler.running_batch = Batch(empty=running)
    scheduler.last_batch = None if last is None else Batch(empty=last)
    scheduler.chunked_req = chunked  # type: ignore[assignment]
    assert hooks.is_busy(scheduler) is busy


@pytest.mark.parametrize("empty", [True, False])
def test_an_empty_batch_is_not_full_for_ever(empty: bool, daemon: FakeDaemon, add: Add) -> None:
    scheduler = Scheduler(add("a"))
    scheduler.running_batch = Batch(empty=empty)
    hooks.after_input(None, scheduler)
    assert scheduler.running_batch.batch_is_full is not empty


def in_progress(new: int, done: int = 0, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        sampling_params=SimpleNamespace(max_new_tokens=new), output_ids=[0] * done, **more
    )


@pytest.mark.parametrize("dialect", ["old", "new"])
def test_what_requests_in_progress_have_yet_to_take_is_reserved_for_them(
    dialect: str, daemon: FakeDaemon, add: Add
) -> None:
    a = add("a")
    scheduler = Scheduler(a)
    assert hooks.reserved_tokens(scheduler) == 0
    scheduler.running_batch.reqs = [in_progress(10, 4)]
    assert hooks.reserved_tokens(scheduler) == 6 + 4
    scheduler.last_batch = Batch()
    scheduler.last_batch.reqs = list(scheduler.running_batch.reqs)
    assert hooks.reserved_tokens(scheduler) == 6 + 4, "nobody counts twice"
    prefix = {"prefix_len": 30} if dialect == "new" else {"prefix_indices": [0] * 30}
    scheduler.chunked_req = in_progress(8, origin_input_ids=[0] * 50, **prefix)  # type: ignore[assignment]
    assert hooks.reserved_tokens(scheduler) == 10 + 20 + 8 + 4
    scheduler.running_batch.reqs = [in_progress(10**9)]
    scheduler.last_batch, scheduler.chunked_req = None, None
    assert hooks.reserved_tokens(scheduler) == 4_096 + 4


def test_restores_leave_what_is_reserved(daemon: FakeDaemon, add: Add) -> None:
    add("a").serve("a1", ABC)
    b = add("b", page_count=8, share=1.0)
    scheduler = Scheduler(b)
    scheduler.running_batch.reqs = [in_progress(6 * 4 - 4)]
    b.submit("r", ABC)
    for _ in range(3):
        hooks.after_input(None, scheduler)
        daemon.run()
    assert b.counters["pages_asked_for"] == 2, "of 8 pages 6 are spoken for"
    b.settle()


def test_after_a_flush_unresolved_targets_are_taken_out_again(daemon: FakeDaemon, add: Add) -> None:
    add("a").serve("a1", ABC)
    b = add("b", flush_wait_ms=1)
    start_fill(b)
    scheduler = Scheduler(b)
    scheduler.flushed = False
    assert hooks.around_flush(Scheduler.flush_cache, scheduler) is False
    assert b.kept_out == b""
    scheduler.flushed = True
    assert hooks.around_flush(Scheduler.flush_cache, scheduler) is True
    assert len(b.kept_out) == 3 * 4
    daemon.hold_copies = False
    b.settle()


class Updater:
    def __init__(self, scheduler: Scheduler) -> None:
        self.flush_cache = scheduler.flush_cache  # all that the oldest dialect gives it


def test_an_update_of_the_weights_begins_a_new_epoch_even_if_it_fails(
    daemon: FakeDaemon, add: Add
) -> None:
    a = add("a")
    updater = Updater(Scheduler(a))

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        hooks.around_weights(fails, updater, SimpleNamespace(weight_version=None))
    assert a.shim.key_epoch > 0


def test_weights_share_their_epoch_by_name_only_where_that_is_trusted(
    daemon: FakeDaemon, add: Add
) -> None:
    named = SimpleNamespace(weight_version="v7")
    distrusting, trusting = add("a"), add("b", trust_weight_version=True)
    other = add("c", trust_weight_version=True)
    assert weight_epoch(distrusting.shim, named) != weight_epoch(distrusting.shim, named)
    assert weight_epoch(trusting.shim, named) == weight_epoch(other.shim, named)
    assert weight_epoch(trusting.shim, None) != weight_epoch(other.shim, None)
    assert weight_epoch(trusting.shim, SimpleNamespace(weight_version="v8")) != weight_epoch(
        trusting.shim, named
    )


def test_memory_goes_after_the_session_and_the_session_comes_after_memory(
    daemon: FakeDaemon, add: Add
) -> None:
    a = add("a")
    updater = Updater(Scheduler(a))
    seen = []
    hooks.around_release_memory(lambda *_: seen.append(a.shim.mode), updater, None)
    hooks.around_resume_memory(lambda *_: seen.append(a.shim.mode), updater, None)
    assert seen == ["degraded", "degraded"]
    for _ in range(100):
        a.step()
        daemon.run()
        daemon.clock_us += 10_000
    assert a.shim.mode == "mirrored"


def test_the_session_ends_with_the_loop(daemon: FakeDaemon, add: Add) -> None:
    a = add("a")
    hooks.around_exit(lambda _: None, Scheduler(a))
    assert len(daemon.directory.pools) == 0


# Installation, on a registry like SGLang's.


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> dict[str, type]:
    """Modules with the classes that are hooked, and a registry that wraps their methods."""
    classes: dict[str, type] = {}
    registry = ModuleType("hook_registry")
    hooks_given: list[tuple[str, Any, str]] = []

    class HookRegistry:
        @staticmethod
        def register(target: str, hook: Any, kind: str, *, source: object) -> None:
            assert source == ("treecored", "treecored")
            hooks_given.append((target, hook, kind))

        @staticmethod
        def apply_hooks() -> None:
            for target, _, _ in hooks_given:
                name, method = target.rsplit(".", 1)
                if name.endswith("Refusing"):
                    continue
                original = getattr(classes[name], method)

                def wrapper(*args: Any, **kwargs: Any) -> Any:
                    return None

                wrapper.__wrapped__ = original  # type: ignore[attr-defined]
                setattr(classes[name], method, wrapper)
            hooks_given.clear()

    registry.HookRegistry = HookRegistry  # type: ignore[attr-defined]
    registry.HookType = SimpleNamespace(AROUND="around", AFTER="after")  # type: ignore[attr-defined]
    registry.HookSource = lambda *parts: parts  # type: ignore[attr-defined]
    monkeypatch.setattr(importlib, "import_module", lambda _: registry)
    for target in [*hooks.AROUND, *hooks.AFTER, *hooks.AROUND_IF_THERE]:
        name, method = target.rsplit(".", 1)
        classes.setdefault(name, type(name.rsplit(".", 1)[1], (), {}))
        setattr(classes[name], method, lambda *_: None)

    def resolve(name: str) -> Any:
        owner, method = name.rsplit(".", 1)
        return getattr(classes[owner], method)

    monkeypatch.setattr(pkgutil, "resolve_name", resolve)
    return classes


def test_hooks_are_installed_once(stand_ins: dict[str, type]) -> None:
    install()
    first = vars(stand_ins[hooks.SCHEDULER])["flush_cache"]
    assert first.__wrapped__ is not None
    install()
    assert vars(stand_ins[hooks.SCHEDULER])["flush_cache"] is first


def test_what_not_every_version_has_is_hooked_where_it_is(stand_ins: dict[str, type]) -> None:
    del stand_ins[hooks.SCHEDULER].release_host_resources  # type: ignore[attr-defined]
    install()
    assert hasattr(vars(stand_ins[hooks.UPDATER])["begin_weight_update"], "__wrapped__")


def test_a_scheduler_without_a_needed_place_is_refused_by_its_name(
    stand_ins: dict[str, type],
) -> None:
    del stand_ins[hooks.ADDER].add_one_req  # type: ignore[attr-defined]
    with pytest.raises(HooksMissing, match=r"PrefillAdder\.add_one_req"):
        install()


def test_hooks_import_neither_sglang_nor_torch() -> None:
    assert "sglang" not in sys.modules
    assert "torch" not in sys.modules
