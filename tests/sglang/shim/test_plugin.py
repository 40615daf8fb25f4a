"""The plugin in a real SGLang: found by its entry point, hooked into the classes that run."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.sglang

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed here", allow_module_level=True)

from scheduler_shim.sglang import compat, hooks, plugin  # noqa: E402
from scheduler_shim.sglang.versions import Unsupported  # noqa: E402


def real(name: str) -> Any:
    return pkgutil.resolve_name(name)


def test_sglang_finds_the_plugin_by_its_entry_point() -> None:
    (entry,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="treecored")
    assert entry.load() is plugin.register


def test_the_backend_is_offered_under_its_name_and_only_once() -> None:
    registry = importlib.import_module("sglang.srt.mem_cache.registry")
    if registry.get_radix_cache_factory("treecored") is None:
        plugin.register()
    assert registry.get_radix_cache_factory("treecored") is plugin.factory
    with pytest.raises(ValueError, match="already registered"):
        plugin.register()


def test_every_hook_is_taken_once_by_the_classes_that_run() -> None:
    names = [*hooks.AROUND, *hooks.AFTER]
    hooks.install()
    hooked = {name: real(name) for name in names}
    assert all(hasattr(function, "__wrapped__") for function in hooked.values())
    assert not any(hasattr(function.__wrapped__, "_treecored") for function in hooked.values())
    hooks.install()
    assert {name: real(name) for name in names} == hooked, "a second time changes nothing"


def test_a_hooked_scheduler_with_another_cache_does_as_before() -> None:
    hooks.install()
    stock = SimpleNamespace(tree_cache=object(), is_fully_idle=lambda **_: False)
    stock.waiting_queue, stock.running_batch = [], SimpleNamespace(reqs=[])
    stock._engine_paused = False
    scheduler = real(hooks.SCHEDULER)
    assert scheduler.flush_cache(stock) is False, "it is not idle"


def test_what_the_hooks_read_of_requests_and_schedulers_is_there() -> None:
    source = inspect.getsource(real("sglang.srt.managers.schedule_batch.Req.__init__"))
    for name in ("rid", "output_ids", "retracted_stain", "_cache_breakdown_computed"):
        assert f"self.{name}" in source, name
    length = "prefix_len" if compat.dialect() == "new" else "prefix_indices"
    assert f"self.{length}" in source
    scheduler = inspect.getsource(importlib.import_module("sglang.srt.managers.scheduler"))
    for name in ("waiting_queue", "running_batch", "last_batch", "chunked_req", "page_size"):
        assert f"self.{name}" in scheduler, name
    assert "new_token_ratio_tracker.current" in scheduler


def test_an_engine_that_cannot_be_served_is_told_why_when_its_cache_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sglang.__version__", "0.6.0")
    with pytest.raises(Unsupported, match=r"0\.5\.13 to 0\.5\.23, this is 0\.6\.0"):
        plugin.factory(object())
